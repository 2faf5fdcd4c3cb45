"""Rows of a report (sets of runs that differ only in the seed), groups of rows, and labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from textwrap import shorten
from typing import Any

import numpy as np

from diffllm.compare.arms.comparable import ATTENTION, CHANGED, shown_value, value_text
from diffllm.compare.arms.directories import shortlist
from diffllm.compare.arms.gap import ArmGap
from diffllm.compare.arms.run import Metrics, Run
from diffllm.compare.arms.sentences import finite
from diffllm.compare.report.keys import HEADLINE, Keys, determine, distinguish, overrides
from diffllm.config import TrainConfig
from diffllm.metrics.metric import Metric
from diffllm.metrics.table import metric_of
from diffllm.statistics.divergence import Share
from diffllm.statistics.estimates import Estimate, Rate, estimate
from diffllm.statistics.trend import Trend

FIRST = ("standard", "gated", "diff_v1", "diff_v2")


@dataclass(frozen=True)
class EqualGap:
    """Loss gap of a row to its baseline at equal tokens, equal FLOPs or equal seconds."""

    gap: Estimate
    at: float
    """Mean number of tokens, FLOPs or seconds."""


@dataclass
class Row:
    """Runs that differ only in the seed, and statistics over these runs."""

    label: str
    """"diff_v2", "diff_v2 lr=0.001" or, if that is too long, "B: diff_v2"."""
    keys: dict[str, Any]
    """Values of the keys that distinguish the rows of the report."""
    runs: list[Run]
    """Sorted by seed."""
    differing: dict[str, Any] = field(default_factory=dict)
    """Values of the keys in `keys` and in `incomparable`."""
    loss: Estimate | None = None
    """Final held-out loss, in nats per token."""
    gap: Estimate | None = None
    """Loss of this row minus the loss of `baseline`, over seeds with a loss in both rows."""
    values: dict[str, Any] = field(default_factory=dict)
    """Cells of report.csv, by column."""
    baseline: "Row | None" = None
    """Baseline row; None if `gap` is None."""
    is_baseline: bool = False
    against: "Row | None" = None
    """Baseline row, even if `gap` is None."""
    outcome: ArmGap | None = None
    """Tests of the gap."""
    documents: Estimate | None = None
    """Gap with a confidence interval over documents and seeds."""
    no_documents: str = ""
    """Explains why `documents` is None."""
    p_holm: float | None = None
    """p-value of the gap after Holm's correction over the gaps of all rows."""
    diverged: int = 0
    group: str = ""
    trend: Trend | None = None
    equal: dict[str, EqualGap] = field(default_factory=dict)
    """Gaps at equal cost, by the names "tokens", "flops" and "seconds"."""
    incomparable: list[str] = field(default_factory=list)
    """Keys that must be equal in two rows to compare the rows."""

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.summary is not None]

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.ended]

    @property
    def diverged_share(self) -> Share:
        return Share(self.diverged, len(self.ended))

    @property
    def seeds(self) -> int:
        return self.loss.seeds if self.loss else 0

    def fact(self, name: str) -> Any:
        return next((v for run in self.runs if (v := run.facts.get(name)) is not None), None)

    def mean(self, name: str) -> float | None:
        known = [x for run in self.finished if (x := finite((run.summary or {}).get(name)))]
        return float(np.mean(known)) if known else None

    def events(self, series: str) -> Rate | None:
        """Count the spikes of "loss" or "grad", and the steps that were tested, in all ended runs.

        Return None if no step was tested.
        """
        count, judged = (
            sum(finite(run_value(run, metric_of(f"spikes_detrended/{series}_{what}"))) or 0
                for run in self.ended)
            for what in ("total", "judged")
        )  # fmt: skip
        return Rate(round(count), round(judged)) if round(judged) else None

    @property
    def measured(self) -> dict[tuple[int, int], Run]:
        """Runs with a finite final loss, by (seed, model.init_seed)."""
        return {run.seeds: run for run in self.runs if run.final_loss is not None}

    @property
    def losses(self) -> dict[tuple[int, int], float | None]:
        """Final losses of ended runs, by (seed, model.init_seed); None for a diverged run."""
        return {run.seeds: run.final_loss for run in self.ended}


def make_rows(runs: list[Run], keys: Keys, notes: list[str]) -> list[Row]:
    """Group the runs that differ only in the seed into rows, and sort the rows by variant and keys.

    If several runs of a row have the same seed, use the newest finished run, and add a message to
    `notes`. If none of these runs is finished, use the newest run. Do not set labels and gaps.
    """
    groups: dict[str, list[int]] = {}
    for i, values in enumerate(keys.values):
        groups.setdefault(row_identity(values), []).append(i)
    rows = []
    for members in groups.values():
        values = keys.values[members[0]]
        same = one_a_seed([runs[i] for i in members], notes)
        row = Row("", {key: values[key] for key in keys.swept}, same, values)
        losses = [run.final_loss for run in same if run.final_loss is not None]
        row.loss = estimate(losses).within(0.0, math.inf) if losses else None
        row.diverged = sum(run.diverged for run in same)
        rows.append(row)

    def order(row: Row) -> list[tuple[int, Any]]:
        return [variant_order(row.keys["attention"]), *map(value_order, row.keys.values())]

    return sorted(rows, key=order)


def row_identity(values: dict[str, Any]) -> str:
    """Return a text that is equal for two runs of one row; `values` is an entry of Keys.values."""
    return shown_value([values[key] for key in sorted(values)])


def variant_order(name: str) -> tuple[int, str]:
    return (*FIRST, name).index(name), name


def value_order(value: Any) -> tuple[int, Any]:
    if value is None:
        return 0, None
    return (1, value) if isinstance(value, int | float) else (2, shown_value(value))


def one_a_seed(runs: list[Run], notes: list[str]) -> list[Run]:
    by_seed: dict[tuple[int, int], Run] = {}

    def age(run: Run) -> tuple[bool, float, str]:
        files = [run.path / name for name in ("summary.json", "metrics.jsonl", "config.yaml")]
        written = next((file.stat().st_mtime for file in files if file.exists()), 0.0)
        return run.summary is not None, written, str(run.path)

    for run in sorted(runs, key=age):
        if other := by_seed.get(run.seeds):
            why = "newer" if (run.summary is None) == (other.summary is None) else "finished"
            notes.append(f"{other.path} is skipped: {run.path} is {why}; keys and seed are equal.")
        by_seed[run.seeds] = run
    return [by_seed[seeds] for seeds in sorted(by_seed)]


def row_value(row: Row, metric: Metric) -> float | None:
    assert metric.column
    known = [x for run in row.finished if (x := run_value(run, metric)) is not None]
    return finite(getattr(np, metric.column.seeds)(known)) if known else None


def run_value(run: Run, metric: Metric) -> float | None:
    """Return a run's value of a metric for report.csv.

    `metric.column.steps` selects the last step or all steps. `metric.column.of` is the reduction
    over these steps and over layers. Return None if the run has no finite value, and NaN if a layer
    is not finite: without this layer, the run would seem to have smaller outliers.
    """
    column, layers = metric.column, metric.name.endswith("*")
    assert column
    said = finite((run.summary or {}).get(metric.name))
    if column.steps == "last" and said is not None:
        return said
    values = run.by_layer(metric.quantity).values if layers else run.series(metric.name).values
    if column.steps == "last":
        values = values[-1:]
    known = np.isfinite(values)
    if layers and not known.all():
        return math.nan
    return float(getattr(np, column.of)(values[known])) if known.any() else None


LONGEST = 48


@dataclass
class Group:
    """Rows of a report that can be compared with each other."""

    letter: str
    rows: list[Row]
    values: dict[str, str] = field(default_factory=dict)
    """This group's values, as text, of the keys that differ between groups."""


def make_groups(rows: list[Row], runs: list[Run], keys: Keys) -> list[Group]:
    """Divide the rows of a report into groups of comparable rows, and set the label of each row.

    Sort the groups by their number of rows with a loss, largest first. If these rows have only one
    attention variant, or if the config changed during the runs of the group, use 0 instead of this
    number.
    """
    together: dict[str, list[Row]] = {}
    for row in rows:
        same = shown_value([row.differing[key] for key in keys.incomparable])
        together.setdefault(same, []).append(row)
    groups = [Group("", members) for members in together.values()]
    groups.sort(key=rows_to_compare, reverse=True)
    several = len(groups) > 1
    for i, group in enumerate(groups):
        group.letter = ascii_uppercase[i % 26] * (i // 26 + 1) if several else ""
        for row in group.rows:
            row.group = group.letter
    shown_together = keys_of_model_choice(runs, keys)
    for row in rows:
        row.label = label(row, rows, shown_together)
    labels = [row.label for row in rows]
    lettered = several and (max(map(len, labels)) > LONGEST or len({*labels}) < len(labels))
    for group in groups:
        for row in group.rows if lettered else ():
            row.label = f"{group.letter}: {label(row, group.rows, set(), inside=True)}"
        if several:
            group.values = distinguishing(group.rows[0], groups, keys, shown_together)
    return groups


def rows_to_compare(group: Group) -> int:
    variants = [row.keys["attention"] for row in group.rows if row.loss is not None]
    changed = group.rows[0].differing.get(CHANGED)
    return 0 if changed or len({*variants}) < 2 else len(variants)


def label(row: Row, rows: list[Row], shown_together: set[str], inside: bool = False) -> str:
    """Return a label that distinguishes `row` from the other `rows`, such as "diff_v2 lr=0.001".

    Args:
        shown_together: keys that the label omits. If there are such keys, the label contains
            `model=<choice>` instead of them.
        inside: whether to omit keys whose values are equal in all of `rows`.
    """
    own, parts = overrides(row.runs[0]), []
    for key, value in row.keys.items():
        if key == "attention" or key in shown_together:
            continue
        alike = rows
        if key.startswith(ATTENTION):
            alike = [r for r in rows if r.keys["attention"] == row.keys["attention"]]
        same = all(shown_value(other.keys[key]) == shown_value(value) for other in alike)
        if same and (inside or (key.startswith(ATTENTION) and key not in own)):
            continue  # The variant's YAML sets this value, or the variant lacks the key.
        if key == CHANGED:
            parts += ["changed"] if value else []
            continue
        name = key.rpartition(".")[2]
        ambiguous = sum(other.rpartition(".")[2] == name for other in row.keys) > 1
        parts.append(f"{key if ambiguous else name}={value_text(key, value)}")
    if shown_together:
        parts.insert(0, f"model={row.runs[0].cfg.resolved.choices['model']}")
    return " ".join([row.keys["attention"], *parts])


def row_labels(configs: Sequence[TrainConfig]) -> list[str]:
    """Return the row label of each run in a report of runs with these configs.

    The runs need not have started. If the report divides its rows into groups, its labels may be
    shorter, with the letter of a group. Labels differ for configs that have an equal effect, for
    example two paths of one corpus, because only the facts of started runs show this.
    """
    runs = [Run(Path(), cfg, {}, None, Metrics([])) for cfg in configs]
    keys = distinguish(runs)
    rows = make_rows(runs, keys, [])
    shown_together = keys_of_model_choice(runs, keys)
    labels = {row_identity(row.differing): label(row, rows, shown_together) for row in rows}
    return [labels[row_identity(values)] for values in keys.values]


def keys_of_model_choice(runs: list[Run], keys: Keys) -> set[str]:
    """Return the config keys that `model=<choice>` sets, such as model.dim for `model=mini`.

    Return only keys that differ between runs. Labels show `model=<choice>` instead of these keys.
    Return an empty set if only one key is found, or if two choices have the same values of all
    found keys.
    """
    values = [
        {**each, "choice": run.cfg.resolved.choices["model"]}
        for each, run in zip(keys.values, runs, strict=True)
    ]
    of_model = (k for k in keys.swept if k.startswith("model.") and not k.startswith(ATTENTION))
    found = {key for key in of_model if determine(["choice"], key, values)}
    return found if len(found) > 1 and determine(found, "choice", values) else set()


def distinguishing(
    row: Row, groups: list[Group], keys: Keys, shown_together: set[str]
) -> dict[str, str]:
    """Return the values in `row` of the keys that differ between groups, but not within a group.

    Args:
        shown_together: keys that `model=<choice>` sets. If there are such keys, the result also
            contains the key "model", with the choice of `row` as value.
    """
    found = {"model": row.runs[0].cfg.resolved.choices["model"]} if shown_together else {}
    for key in sorted({*keys.incomparable, *keys.swept} - {"attention"}, key=telling):
        values = [{shown_value(r.differing.get(key)) for r in group.rows} for group in groups]
        if {*map(len, values)} == {1} and len(set.union(*values)) > 1:
            found[key] = value_text(key, row.differing.get(key))
    return found


def telling(key: str) -> tuple[int, str]:
    return (*HEADLINE, key).index(key), key


def in_short(group: Group, width: int) -> str:
    parts = (f"{key.rpartition('.')[2]}={value}" for key, value in group.values.items())
    return shorten(" ".join(parts), width, placeholder=" ...")


def keys_apart(groups: list[Group], incomparable: list[str], most: int) -> str:
    keys = set(incomparable)
    if groups and "model" in groups[0].values:
        keys = {key for key in keys if not key.startswith("model.")} | {"model"}
    return shortlist(sorted(keys, key=telling), most)


def apart_text(groups: list[Group], incomparable: list[str]) -> str:
    keys = keys_apart(groups, incomparable, 5)
    return f"{len(groups)} groups of rows that cannot be compared; they differ in {keys}"
