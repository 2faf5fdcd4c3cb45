"""Rows of a report (arms with their gaps to a baseline), groups of rows, and labels."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from textwrap import shorten
from typing import Any, NamedTuple

from diffllm.compare.arms.arm import RunArm
from diffllm.compare.arms.comparable import ATTENTION, CHANGED, shown_value, value_text
from diffllm.compare.arms.directories import shortlist
from diffllm.compare.arms.gap import ArmGap
from diffllm.compare.arms.run import Metrics, Run
from diffllm.compare.report.keys import HEADLINE, Keys, determine, distinguish, overrides
from diffllm.config import TrainConfig
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.trend import Trend

FIRST = ("standard", "gated", "diff_v1", "diff_v2")


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

    def order(arm: RunArm) -> list[tuple[int, Any]]:
        return [variant_order(arm.keys["attention"]), *map(value_order, arm.keys.values())]

    return sorted(arms, key=order), notes


def arm_identity(values: dict[str, Any]) -> str:
    """Return a text that is equal for two runs of one arm; `values` is an entry of Keys.values."""
    return shown_value([values[key] for key in sorted(values)])


def variant_order(name: str) -> tuple[int, str]:
    return (*FIRST, name).index(name), name


def value_order(value: Any) -> tuple[int, Any]:
    if value is None:
        return 0, None
    return (1, value) if isinstance(value, int | float) else (2, shown_value(value))


def newest_by_seed(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Return the newest finished run of each seed, and a note about each other run."""
    by_seed: dict[tuple[int, int], Run] = {}
    notes = []

    def age(run: Run) -> tuple[bool, float, str]:
        files = [run.path / name for name in ("summary.json", "metrics.jsonl", "config.yaml")]
        written = next((file.stat().st_mtime for file in files if file.exists()), 0.0)
        return run.summary is not None, written, str(run.path)

    for run in sorted(runs, key=age):
        older = by_seed.get(run.seeds)
        if older is not None:
            reason = "newer" if (run.summary is None) == (older.summary is None) else "finished"
            notes.append(
                f"{older.path} is skipped: {run.path} is {reason}; keys and seed are equal."
            )
        by_seed[run.seeds] = run
    return [by_seed[seeds] for seeds in sorted(by_seed)], notes


LONGEST_LABEL = 48
"""Number of characters above which labels get the letter of a group."""


class Group(NamedTuple):
    """Rows of a report that can be compared with each other."""

    letter: str
    rows: Sequence[Row]
    values: dict[str, str]
    """This group's values, as text, of the keys that differ between groups."""


class ArmGroup(NamedTuple):
    """Arms of a `Group`, before their gaps are measured."""

    letter: str
    arms: list[RunArm]
    values: dict[str, str]


def group_arms(arms: list[RunArm], runs: list[Run], keys: Keys) -> list[ArmGroup]:
    """Divide arms into groups of comparable arms, and give each arm its label and group.

    Sort the groups by their number of arms with a loss, largest first. If these arms have only one
    attention variant, or if the config changed during the runs of the group, use 0 instead of this
    number.
    """
    together: dict[str, list[RunArm]] = {}
    for arm in arms:
        conditions = shown_value([arm.differing[key] for key in keys.incomparable])
        together.setdefault(conditions, []).append(arm)
    members = sorted(together.values(), key=arms_to_compare, reverse=True)
    has_groups = len(members) > 1
    shown_together = keys_of_model_choice(runs, keys)
    labels = {arm: label(arm, arms, shown_together) for arm in arms}
    longest = max(len(text) for text in labels.values())
    is_unclear = longest > LONGEST_LABEL or len(set(labels.values())) < len(labels)
    groups = []
    for i, arms_of_group in enumerate(members):
        letter = ""
        values = {}
        if has_groups:
            letter = ascii_uppercase[i % 26] * (i // 26 + 1)
            values = distinguishing(arms_of_group[0], members, keys, shown_together)
        labelled = []
        for arm in arms_of_group:
            text = labels[arm]
            if has_groups and is_unclear:
                text = f"{letter}: {label(arm, arms_of_group, set(), inside=True)}"
            labelled.append(replace(arm, label=text, group=letter))
        groups.append(ArmGroup(letter, labelled, values))
    return groups


def arms_to_compare(arms: list[RunArm]) -> int:
    """Return the number of arms with a loss, or 0 if there is nothing to compare."""
    variants = [arm.keys["attention"] for arm in arms if arm.loss is not None]
    if arms[0].differing.get(CHANGED) or len(set(variants)) < 2:
        return 0
    return len(variants)


def label(row: RunArm, rows: list[RunArm], shown_together: set[str], inside: bool = False) -> str:
    """Return a label that distinguishes `row` from the other `rows`, such as "diff_v2 lr=0.001".

    Args:
        shown_together: keys that the label omits. If there are such keys, the label contains
            `model=<choice>` instead of them.
        inside: whether to omit keys whose values are equal in all of `rows`.
    """
    variant = row.keys["attention"]
    rows_of_variant = [other for other in rows if other.keys["attention"] == variant]
    overridden = overrides(row.runs[0])
    names = [last_name(key) for key in row.keys]
    parts = [variant]
    if shown_together:
        parts.append(f"model={row.runs[0].cfg.resolved.choices['model']}")
    for key, value in row.keys.items():
        if key == "attention" or key in shown_together:
            continue
        is_of_attention = key.startswith(ATTENTION)
        others = rows_of_variant if is_of_attention else rows
        is_equal = all(shown_value(other.keys[key]) == shown_value(value) for other in others)
        if is_equal and (inside or (is_of_attention and key not in overridden)):
            continue  # The variant's YAML sets this value, or the variant lacks the key.
        if key == CHANGED:
            if value:
                parts.append("changed")
            continue
        is_ambiguous = names.count(last_name(key)) > 1
        parts.append(f"{key if is_ambiguous else last_name(key)}={value_text(key, value)}")
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
    runs = [Run(Path(), cfg, {}, None, Metrics([])) for cfg in configs]
    keys = distinguish(runs)
    arms, _ = make_arms(runs, keys)
    shown_together = keys_of_model_choice(runs, keys)
    labels = {arm_identity(arm.differing): label(arm, arms, shown_together) for arm in arms}
    return [labels[arm_identity(values)] for values in keys.values]


def keys_of_model_choice(runs: list[Run], keys: Keys) -> set[str]:
    """Return the config keys that `model=<choice>` sets, such as model.dim for `model=mini`.

    Return only keys that differ between runs. Labels show `model=<choice>` instead of these keys.
    Return an empty set if only one key is found, or if two choices have the same values of all
    found keys.
    """
    values = []
    for values_of_run, run in zip(keys.values, runs, strict=True):
        values.append({**values_of_run, "choice": run.cfg.resolved.choices["model"]})
    determined = set()
    for key in keys.swept:
        is_of_model = key.startswith("model.") and not key.startswith(ATTENTION)
        if is_of_model and determine(["choice"], key, values):
            determined.add(key)
    if len(determined) > 1 and determine(determined, "choice", values):
        return determined
    return set()


def distinguishing(
    row: RunArm, groups: list[list[RunArm]], keys: Keys, shown_together: set[str]
) -> dict[str, str]:
    """Return the values in `row` of the keys that differ between groups, but not within a group.

    Args:
        shown_together: keys that `model=<choice>` sets. If there are such keys, the result also
            contains the key "model", with the choice of `row` as value.
    """
    texts = {}
    if shown_together:
        texts["model"] = row.runs[0].cfg.resolved.choices["model"]
    for key in sorted({*keys.incomparable, *keys.swept} - {"attention"}, key=key_order):
        values_of_groups = []
        for group in groups:
            values_of_groups.append({shown_value(other.differing.get(key)) for other in group})
        is_equal_inside = all(len(values) == 1 for values in values_of_groups)
        if is_equal_inside and len(set.union(*values_of_groups)) > 1:
            texts[key] = value_text(key, row.differing.get(key))
    return texts


def key_order(key: str) -> tuple[int, str]:
    return (*HEADLINE, key).index(key), key


def in_short(group: Group, width: int) -> str:
    parts = [f"{last_name(key)}={value}" for key, value in group.values.items()]
    return shorten(" ".join(parts), width, placeholder=" ...")


def keys_apart(groups: list[Group], incomparable: list[str], most: int) -> str:
    keys = set(incomparable)
    if groups and "model" in groups[0].values:
        keys = {key for key in keys if not key.startswith("model.")} | {"model"}
    return shortlist(sorted(keys, key=key_order), most)


def apart_text(groups: list[Group], incomparable: list[str]) -> str:
    keys = keys_apart(groups, incomparable, 5)
    return f"{len(groups)} groups of rows that cannot be compared; they differ in {keys}"
