"""Rows of a report (arms with their gaps to a baseline), groups of rows, and labels."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from textwrap import shorten
from typing import Any, NamedTuple

from diffllm.compare.arms.arm import RunArm
from diffllm.compare.arms.comparability import ATTENTION_PREFIX, CHANGED, shown_value, value_text
from diffllm.compare.arms.gap import ArmGap
from diffllm.compare.arms.run import Metrics, Run
from diffllm.compare.arms.run_search import shortlist
from diffllm.compare.report.keys import HEADLINE, Keys, distinguish, has_differences, overrides
from diffllm.config import TrainConfig
from diffllm.core.run_files import RunFile
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.trend import Trend

FIRST_VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
"""Variants that come before all others in tables, and whose colours no other variant has."""


@dataclass(frozen=True)
class EqualGap:
    """Loss gap of a row to its baseline at equal tokens, equal FLOPs or equal seconds."""

    gap: Estimate
    at: float
    """Mean number of tokens, FLOPs or seconds."""


@dataclass(frozen=True, eq=False)
class Row(RunArm):
    """An arm in a report, with its gap to the baseline."""

    is_baseline: bool = False
    """Whether the row is the baseline of a gap."""
    against: RunArm | None = None
    """Arm that the row is compared with; None without a comparable baseline."""
    outcome: ArmGap | None = None
    """Gap to `against`, with its tests."""
    p_holm: float | None = None
    """p-value of the gap after Holm's correction over the gaps of all rows."""
    trend: Trend | None = None
    equal: dict[str, EqualGap] = field(default_factory=dict)
    """Gaps at equal cost, by the names "tokens", "flops" and "seconds"."""
    values: dict[str, Any] = field(default_factory=dict)
    """Cells of report.csv, by column."""

    @property
    def gap(self) -> Estimate | None:
        """Loss of this row minus the loss of `baseline`, over seeds with a loss in both."""
        if self.outcome is None or self.outcome.paired is None:
            return None
        return self.outcome.paired.estimate

    @property
    def baseline(self) -> RunArm | None:
        """Baseline of the gap; None if `gap` is None."""
        return self.against if self.gap else None


def make_arms(runs: list[Run], keys: Keys) -> tuple[list[RunArm], list[str]]:
    """Group the runs that differ only in the seed into arms, sorted by variant and keys.

    The arms do not have labels yet. If several runs of an arm have the same seed, use the newest
    finished run, or the newest run if none is finished.

    Returns the arms, and a note about each skipped run.
    """
    members: dict[str, list[Run]] = {}
    values_of_arms: dict[str, dict[str, Any]] = {}
    for run, values in zip(runs, keys.values, strict=True):
        identity = arm_identity(values)
        members.setdefault(identity, []).append(run)
        values_of_arms.setdefault(identity, values)
    arms = []
    notes = []
    for identity, values in values_of_arms.items():
        newest, skipped = newest_by_seed(members[identity])
        notes += skipped
        swept = {key: values[key] for key in keys.swept}
        arms.append(RunArm.of("", swept, newest, values))
    return sorted(arms, key=arm_order), notes


def arm_order(arm: RunArm) -> list[tuple[int, Any]]:
    """Return the sort key of an arm: its variant, then its values of the distinguishing keys."""
    orders_of_values = map(value_order, arm.keys.values())
    return [variant_order(arm.variant), *orders_of_values]


def arm_identity(values: dict[str, Any]) -> str:
    """Return a text that is equal for two runs of one arm; `values` is an entry of Keys.values."""
    return shown_value([values[key] for key in sorted(values)])


def variant_order(name: str) -> tuple[int, str]:
    """Return the sort key of a variant: those in FIRST_VARIANTS, then the others by name."""
    return (*FIRST_VARIANTS, name).index(name), name


def value_order(value: Any) -> tuple[int, Any]:
    """Return the sort key of a value of any type: None, then numbers, then others as text."""
    # Python cannot compare values of different types; the first item separates the types.
    if value is None:
        return 0, None
    if isinstance(value, int | float):
        return 1, value
    return 2, shown_value(value)


def newest_by_seed(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Return the newest finished run of each seed, and a note about each other run."""
    by_seed: dict[tuple[int, int], Run] = {}
    notes = []
    for run in sorted(runs, key=age_order):
        older = by_seed.get(run.seeds)
        if older is not None:
            is_equally_complete = (run.summary is None) == (older.summary is None)
            reason = "newer" if is_equally_complete else "finished"
            notes.append(
                f"{older.path} is skipped: {run.path} is {reason}; keys and seed are equal."
            )
        by_seed[run.seeds] = run
    return [by_seed[seeds] for seeds in sorted(by_seed)], notes


def age_order(run: Run) -> tuple[bool, float, str]:
    """Return the sort key of runs of one seed: unfinished runs first, then by last change."""
    last_change = 0.0
    # A run writes these files in this order.
    for name in (RunFile.CONFIG, RunFile.METRICS, RunFile.SUMMARY):
        file = run.path / name
        if file.exists():
            last_change = file.stat().st_mtime
    return run.summary is not None, last_change, str(run.path)


LONGEST_LABEL = 48
"""Number of characters above which labels get the letter of a group."""


class Group(NamedTuple):
    """Rows of a report that can be compared with each other."""

    letter: str
    rows: list[Row]
    values: dict[str, str]
    """This group's values, as text, of the keys that differ between groups."""


def group_arms(arms: list[RunArm], keys: Keys) -> tuple[list[RunArm], dict[str, dict[str, str]]]:
    """Divide arms into groups of comparable arms, and give each arm its label and group.

    Sort the groups by their number of arms with a loss, largest first. If these arms have only one
    attention variant, or if the config changed during the runs of the group, use 0 instead of this
    number.

    Returns the arms in the order of the groups, and `Group.values` by letter of the group.
    """
    members: dict[str, list[RunArm]] = {}
    labels = {}
    for arm in arms:
        labels[arm] = label(arm, arms, keys.of_model)
        values = [arm.differing[key] for key in keys.incomparable]
        conditions = shown_value(values)
        members.setdefault(conditions, []).append(arm)
    groups = sorted(members.values(), key=arms_to_compare, reverse=True)
    labelled = []
    if len(groups) == 1:
        for arm in arms:
            labelled.append(replace(arm, label=labels[arm]))
        return labelled, {"": {}}
    longest = max(map(len, labels.values()))
    is_ambiguous = len(set(labels.values())) < len(labels)
    is_unclear = longest > LONGEST_LABEL or is_ambiguous
    values_of_groups = {}
    for i, group in enumerate(groups):
        # A to Z, then AA to ZZ.
        letter = ascii_uppercase[i % 26] * (i // 26 + 1)
        values_of_groups[letter] = distinguishing(group[0], groups, keys)
        for arm in group:
            text = labels[arm]
            if is_unclear:
                text = f"{letter}: {label(arm, group, set(), inside=True)}"
            labelled.append(replace(arm, label=text, group=letter))
    return labelled, values_of_groups


def arms_to_compare(arms: list[RunArm]) -> int:
    """Return the number of arms with a loss, or 0 if there is nothing to compare."""
    variants = []
    for arm in arms:
        if arm.loss is not None:
            variants.append(arm.variant)
    if arms[0].differing.get(CHANGED) or len(set(variants)) < 2:
        return 0
    return len(variants)


def label(arm: RunArm, arms: list[RunArm], of_model: set[str], inside: bool = False) -> str:
    """Return a label that distinguishes `arm` from the other `arms`, such as "diff_v2 lr=0.001".

    Args:
        of_model: keys that the label omits. If there are such keys, the label contains
            `model=<choice>` instead of them.
        inside: whether to omit keys whose values are equal in all of `arms`.
    """
    overridden = overrides(arm.runs[0])
    names = [last_name(key) for key in arm.keys]
    parts = [arm.variant]
    if of_model:
        parts.append(f"model={arm.runs[0].cfg.resolved.choices['model']}")
    for key, value in arm.keys.items():
        if key == "attention" or key in of_model:
            continue
        is_of_attention = key.startswith(ATTENTION_PREFIX)
        values = []
        for other in arms:
            if other.variant == arm.variant or not is_of_attention:
                values.append(other.keys)
        # The variant's YAML sets the value, or the variant lacks the key.
        is_implied = is_of_attention and key not in overridden
        if (inside or is_implied) and not has_differences(key, values):
            continue
        if key == CHANGED:
            if value:
                parts.append("changed")
            continue
        name = last_name(key)
        if names.count(name) > 1:
            name = key
        parts.append(f"{name}={value_text(key, value)}")
    return " ".join(parts)


def last_name(key: str) -> str:
    """Return the last part of a dotted key."""
    return key.rpartition(".")[2]


def row_labels(configs: Sequence[TrainConfig]) -> list[str]:
    """Return the row label of each run in a report of runs with these configs.

    The runs need not have started. If the report divides its rows into groups, its labels may be
    shorter, with the letter of a group. Labels differ for configs that have an equal effect, for
    example two paths of one corpus, because only the facts of started runs show this.
    """
    runs = []
    for cfg in configs:
        runs.append(Run(Path(), cfg, facts={}, summary=None, metrics=Metrics([])))
    keys = distinguish(runs)
    arms, _ = make_arms(runs, keys)
    labels = {}
    for arm in arms:
        identity = arm_identity(arm.differing)
        labels[identity] = label(arm, arms, keys.of_model)
    # `make_arms` keeps one run per seed, so the runs of the arms do not include all configs.
    return [labels[arm_identity(values)] for values in keys.values]


def distinguishing(arm: RunArm, groups: list[list[RunArm]], keys: Keys) -> dict[str, str]:
    """Return the values in `arm` of the keys that differ between groups, but not within a group.

    If there are keys that `model=<choice>` sets, the result also contains the key "model", with the
    choice of `arm` as value.
    """
    texts = {}
    if keys.of_model:
        texts["model"] = arm.runs[0].cfg.resolved.choices["model"]
    names = {*keys.incomparable, *keys.swept} - {"attention"}
    values_of_groups = [group[0].differing for group in groups]
    for key in sorted(names, key=key_order):
        differs_inside = False
        for group in groups:
            values_of_arms = [other.differing for other in group]
            if has_differences(key, values_of_arms):
                differs_inside = True
        if not differs_inside and has_differences(key, values_of_groups):
            value = arm.differing.get(key)
            texts[key] = value_text(key, value)
    return texts


def key_order(key: str) -> tuple[int, str]:
    """Return the sort key of a config key: those in HEADLINE, then the others by name."""
    return (*HEADLINE, key).index(key), key


def in_short(group: Group, width: int) -> str:
    """Return the values that distinguish a group, in at most `width` characters."""
    parts = []
    for key, value in group.values.items():
        parts.append(f"{last_name(key)}={value}")
    return shorten(" ".join(parts), width, placeholder=" ...")


def keys_apart(groups: list[Group], incomparable: list[str], most: int) -> str:
    """Return a list of the keys that prevent comparisons between groups, of at most `most` keys."""
    keys = set()
    has_choices = bool(groups) and "model" in groups[0].values
    if has_choices:
        keys.add("model")
    for key in incomparable:
        # model=<choice> replaces all keys of a model.
        if not has_choices or not key.startswith("model."):
            keys.add(key)
    return shortlist(sorted(keys, key=key_order), most)


def apart_text(groups: list[Group], incomparable: list[str]) -> str:
    keys = keys_apart(groups, incomparable, 5)
    return f"{len(groups)} groups of rows that cannot be compared; they differ in {keys}"
