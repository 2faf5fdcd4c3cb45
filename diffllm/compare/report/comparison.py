"""Compare runs: group runs that differ only in the seed, and measure loss gaps to a baseline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from diffllm.compare.arms.arm import RunArm, Seeds
from diffllm.compare.arms.budget import budget_notes
from diffllm.compare.arms.comparable import ATTENTION, Difference
from diffllm.compare.arms.directories import find_runs, sweep_notes
from diffllm.compare.arms.gap import arm_gap, loss_trend
from diffllm.compare.arms.run import Run, load_run
from diffllm.compare.arms.sentences import plural
from diffllm.compare.report.curves import equal_gaps
from diffllm.compare.report.differences import row_differences
from diffllm.compare.report.evaluations import Evaluated, columns, evaluations
from diffllm.compare.report.keys import MATCHES, Keys, distinguish, overrides
from diffllm.compare.report.notes import (
    code_notes,
    document_warnings,
    fact_notes,
    length_notes,
    parameter_notes,
    run_notes,
    speed_notes,
)
from diffllm.compare.report.rows import Group, Row, group_arms, make_arms
from diffllm.compare.report.tables import row_values
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.statistics.gap_tests import holm


@dataclass(frozen=True)
class Comparison:
    """Content of a report about several runs.

    Attributes:
        rows: arms with their gaps and cells.
        baseline: attention variant that others are compared with; None if there is
            only one row, its variant is not `standard`, and no baseline was requested.
        differences: config keys whose values prevent a comparison between groups.
        groups: sets of rows whose losses can be compared.
        warnings: reasons why gaps are missing or unreliable; shown with the results.
        score_notes: those `notes` that also apply to the evaluation scores in `evaluated`.
        row_differences: all keys and facts in which rows differ, also those without influence.
    """

    title: str
    rows: list[Row]
    baseline: str | None
    differences: list[str]
    groups: list[Group]
    warnings: list[str]
    notes: list[str]
    evaluated: list[Evaluated]
    score_notes: list[str]
    row_differences: list[Difference]


def read(
    paths: list[Path], baseline: str | None = None, step: int = 0
) -> tuple[Comparison, Path | None]:
    """Compare all runs in `paths`; return (comparison, default directory of the report).

    The default directory is the closest directory that contains all runs, or None if other users
    may own this directory. A run that cannot be read is skipped with a note. Raises
    ConfigError if no run can be read, or if no run has the attention variant `baseline`.

    Args:
        paths: run directories, directories that contain runs, or globs.
        baseline: variant to compare others with; default: `standard` if present, else the first.
        step: step of the evaluated checkpoints to show; 0 selects the newest of each run.
    """
    directories = find_runs(paths)
    runs: list[Run] = []
    unreadable: dict[Path, str] = {}
    for path in directories.runs:
        try:
            runs.append(load_run(path))
        except CheckpointError as error:
            unreadable[path] = str(error)
    if not runs:
        first, *others = unreadable.values()
        text = f"none of the runs can be read: {first}"
        if others:
            text += f"; {plural(len(others), 'more run')} cannot be read"
        raise ConfigError(text)
    comparison = compare(runs, baseline, directories.title, step)
    waiting = [note for sweep in directories.sweeps for note in sweep_notes(sweep)]
    skipped = [f"{path} is skipped: {reason}." for path, reason in unreadable.items()]
    notes = skipped + waiting + comparison.notes
    score_notes = skipped + comparison.score_notes
    return replace(comparison, notes=notes, score_notes=score_notes), directories.home


def compare(
    runs: list[Run], baseline: str | None = None, title: str = "", step: int = 0
) -> Comparison:
    """Group runs that differ only in the seed, and measure loss gaps to the variant `baseline`.

    Raises ConfigError if no run has the attention variant `baseline`.

    Args:
        baseline: variant to compare others with; default: `standard` if present, else the first.
        step: step of the evaluated checkpoints to show; 0 selects the newest of each run.
    """
    runs = sorted(runs, key=lambda run: str(run.path))
    keys = distinguish(runs)
    arms, skipped = make_arms(runs, keys)
    groups = group_arms(arms, runs, keys)
    arms = [arm for group in groups for arm in group.arms]
    chosen = choose_baseline(baseline, arms)
    baselines = {arm: baseline_arm(arm, arms, chosen) for arm in arms}
    bases = {}
    for arm, base in baselines.items():
        if base is not None and base is not arm:
            bases[arm] = base
    score_notes = missing_baseline_notes(baselines, chosen)
    evaluated, about_scores = evaluations(arms, bases, step)
    rows = make_rows(arms, bases, evaluated, keys)
    row_of = dict(zip(arms, rows, strict=True))
    return Comparison(
        title=title,
        rows=rows,
        baseline=chosen,
        differences=keys.incomparable,
        groups=[Group(g.letter, [row_of[arm] for arm in g.arms], g.values) for g in groups],
        warnings=budget_notes(runs) + document_warnings([*bases.items()]),
        notes=skipped + notes_of(arms, bases, score_notes) + about_scores,
        evaluated=evaluated,
        score_notes=score_notes + about_scores,
        row_differences=row_differences(rows),
    )


def missing_baseline_notes(
    baselines: Mapping[RunArm, RunArm | None], chosen: str | None
) -> list[str]:
    """Return a note about the arms without a baseline, if there are several arms."""
    labels = []
    for arm, base in baselines.items():
        if base is None and not arm.runs[0].changes:
            labels.append(arm.label)
    if not labels or len(baselines) < 2:
        return []
    return [f"No gap for {', '.join(labels)}: no run of {chosen} agrees in all other keys."]


def make_rows(
    arms: Sequence[RunArm],
    bases: Mapping[RunArm, RunArm],
    evaluated: Sequence[Evaluated],
    keys: Keys,
) -> list[Row]:
    """Measure the gap of each arm to its baseline in `bases`, and fill the cells of report.csv."""
    gaps = {}
    for arm, base in bases.items():
        gaps[arm] = arm_gap(arm, base)
    # All gaps of a report are one family of tests.
    p_values = {arm: gap.p for arm, gap in gaps.items() if gap.p is not None}
    p_holm = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    baselines = {bases[arm] for arm, gap in gaps.items() if gap.paired is not None}
    rows = []
    for i, arm in enumerate(arms):
        against = bases.get(arm)
        gap = gaps.get(arm)
        trend = None
        equal = {}
        if against is not None and gap is not None and gap.paired is not None:
            trend = loss_trend(arm, against)
            equal = equal_gaps(arm, against, gap.paired.estimate)
        row = Row(
            **{field.name: getattr(arm, field.name) for field in fields(arm)},
            is_baseline=arm in baselines,
            against=against,
            outcome=gap,
            p_holm=p_holm.get(arm),
            trend=trend,
            equal=equal,
        )
        cells = row_values(row, keys.incomparable) | columns(evaluated, i)
        rows.append(replace(row, values=cells))
    return rows


def notes_of(
    arms: Sequence[RunArm], bases: Mapping[RunArm, RunArm], score_notes: Sequence[str]
) -> list[str]:
    runs = [run for arm in arms for run in arm.runs]
    pairs = [*bases.items()]
    notes = [note for run in runs for note in run_notes(run)]
    notes += [note for pair in pairs for note in seed_notes(*pair)]
    notes += [*score_notes, *fact_notes(runs), *parameter_notes(pairs), *length_notes(pairs)]
    return [*notes, *speed_notes(runs), *code_notes(arms)]


def choose_baseline(requested: str | None, rows: Sequence[RunArm]) -> str | None:
    variants = list(dict.fromkeys(row.keys["attention"] for row in rows))
    if requested is not None and requested not in variants:
        raise ConfigError(
            f"baseline={requested} is not the attention variant of any run; "
            f"choose from {', '.join(variants)}"
        )
    if requested or "standard" in variants:
        return requested or "standard"
    return variants[0] if len(rows) > 1 else None


def baseline_arm(row: RunArm, rows: Sequence[RunArm], baseline: str | None) -> RunArm | None:
    """Return the row of `rows` that `row` is compared with, or None if there is no such row.

    The returned row has the attention variant `baseline` and a comparable model size. Its other
    config keys have the same values as in `row`; keys below `model.attention` may differ. If
    several rows qualify, return the row without overrides of `model.attention`. The result can be
    `row` itself. If the config of `row` changed during training, return None, because no single
    config then explains the loss.
    """
    if baseline is None or row.runs[0].changes:
        return None
    equal_keys = {"attention": baseline}
    for key, value in row.keys.items():
        if key not in (*MATCHES, "attention") and not key.startswith(ATTENTION):
            equal_keys[key] = value
    candidates = [other for other in rows if equal_keys.items() <= other.keys.items()]
    candidates = comparable_in_size(row, candidates)
    if len(candidates) > 1:
        candidates = [other for other in candidates if not overrides(other.runs[0])]
    return candidates[0] if candidates else None


def comparable_in_size(row: RunArm, others: Sequence[RunArm]) -> list[RunArm]:
    """Return the arms with the values of `row` in MATCHES, or else the arms of comparable size."""
    keys = [key for key in MATCHES if key in row.keys]
    equal = [other for other in others if all(other.keys[key] == row.keys[key] for key in keys)]
    if equal:
        return equal
    return [other for other in others if all(sizes_comparable(row, other, key) for key in keys)]


def sizes_comparable(row: RunArm, other: RunArm, match: str) -> bool:
    """Return whether two report rows are comparable in model size, judged by config key `match`.

    `match` is "model.match_params_to" or "model.match_flops_to". The value of this key is a
    variant: the model gets as many parameters or FLOPs as that variant. Two rows with equal values
    are comparable. A row whose value is the row's own variant is comparable with every row, because
    its model keeps the default size.
    """
    size, other_size = row.keys[match], other.keys[match]
    if size == other_size:
        return True
    return size == row.keys["attention"] or other_size == other.keys["attention"]


def seed_notes(arm: RunArm, base: RunArm) -> list[str]:
    """Return a note about measured seeds that only one of two arms has."""
    seeds, base_seeds = arm.measured.keys(), base.measured.keys()
    if not seeds or not base_seeds or seeds == base_seeds:
        return []
    common = seeds & base_seeds
    extent = f"uses only seed {seeds_text(common)}" if common else "is unknown"
    reason = f"only one row has seed {seeds_text(seeds ^ base_seeds)}"
    return [f"The gap of {arm.label} to {base.label} {extent}: {reason}."]


def seeds_text(seeds: Iterable[Seeds]) -> str:
    texts = []
    for seed, init_seed in sorted(seeds):
        texts.append(str(seed) if seed == init_seed else f"{seed} (init_seed {init_seed})")
    return ", ".join(texts)
