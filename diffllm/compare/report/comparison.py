"""Compare runs: group runs that differ only in the seed, and measure loss gaps to a baseline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diffllm.compare.arms.arm import RunArm, Seeds, runs_of
from diffllm.compare.arms.budget import budget_notes
from diffllm.compare.arms.comparability import ATTENTION_PREFIX, Difference
from diffllm.compare.arms.gap import arm_gap, loss_trend
from diffllm.compare.arms.run import Run, load_run
from diffllm.compare.arms.run_search import find_runs, sweep_notes
from diffllm.compare.arms.sentences import plural
from diffllm.compare.report.curves import equal_gaps
from diffllm.compare.report.differences import row_differences
from diffllm.compare.report.evaluations import Evaluated, columns, evaluations
from diffllm.compare.report.keys import MATCHES, distinguish, overrides
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
    runs, unreadable = load_runs(directories.runs)
    comparison = compare(runs, baseline, directories.title, step)
    skipped = []
    for path, reason in unreadable.items():
        skipped.append(f"{path} is skipped: {reason}.")
    notes = list(skipped)
    for sweep in directories.sweeps:
        notes += sweep_notes(sweep)
    notes += comparison.notes
    score_notes = skipped + comparison.score_notes
    return replace(comparison, notes=notes, score_notes=score_notes), directories.home


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Return the runs in the directories `paths`, and the error of each unreadable directory.

    Raises ConfigError if no run can be read.
    """
    runs: list[Run] = []
    unreadable: dict[Path, str] = {}
    for path in paths:
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
    return runs, unreadable


def compare(
    runs: list[Run], baseline: str | None = None, title: str = "", step: int = 0
) -> Comparison:
    """Group runs that differ only in the seed, and measure loss gaps to the variant `baseline`.

    Raises ConfigError if no run has the attention variant `baseline`.

    Args:
        baseline: variant to compare others with; default: `standard` if present, else the first.
        step: step of the evaluated checkpoints to show; 0 selects the newest of each run.
    """
    # The report must not depend on the order of the paths.
    runs = sorted(runs, key=lambda run: str(run.path))
    keys = distinguish(runs)
    arms, skipped = make_arms(runs, keys)
    arms, values_of_groups = group_arms(arms, keys)
    chosen = choose_baseline(baseline, arms)
    baselines: dict[RunArm, RunArm | None] = {}
    # An arm that is its own baseline has no gap.
    pairs = []
    for arm in arms:
        base = baseline_arm(arm, arms, chosen)
        baselines[arm] = base
        if base is not None and base is not arm:
            pairs.append((arm, base))
    score_notes = missing_baseline_notes(baselines, chosen)
    bases = dict(pairs)
    evaluated, about_scores = evaluations(arms, bases, step)
    rows = make_rows(arms, bases, evaluated, keys.incomparable)
    groups = []
    for letter, values in values_of_groups.items():
        rows_of_group = [row for row in rows if row.group == letter]
        groups.append(Group(letter, rows_of_group, values))
    return Comparison(
        title=title,
        rows=rows,
        baseline=chosen,
        differences=keys.incomparable,
        groups=groups,
        warnings=budget_notes(runs) + document_warnings(pairs),
        notes=skipped + notes_of(arms, pairs, score_notes) + about_scores,
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
        # `run_notes` explains why a run with a changed config has no gap.
        if base is None and not arm.runs[0].changes:
            labels.append(arm.label)
    if not labels or len(baselines) < 2:
        return []
    return [f"No gap for {', '.join(labels)}: no run of {chosen} agrees in all other keys."]


def make_rows(
    arms: Sequence[RunArm],
    bases: Mapping[RunArm, RunArm],
    evaluated: Sequence[Evaluated],
    incomparable: list[str],
) -> list[Row]:
    """Measure the gap of each arm to its baseline in `bases`, and fill the cells of report.csv."""
    measured = []
    p_values = []
    baselines = set()
    for arm in arms:
        row = row_with_gap(arm, bases.get(arm))
        measured.append(row)
        p_values.append(row.outcome.p if row.outcome else None)
        baselines.add(row.baseline)
    # All gaps of a report are one family of tests.
    corrected = holm(p_values)
    rows = []
    for i, arm in enumerate(arms):
        row = replace(measured[i], is_baseline=arm in baselines, p_holm=corrected[i])
        cells = row_values(row, incomparable)
        cells |= columns(evaluated, i)
        rows.append(replace(row, values=cells))
    return rows


def row_with_gap(arm: RunArm, base: RunArm | None) -> Row:
    """Return the row of an arm with the gap to its baseline, if any."""
    row = Row(arm.label, arm.seed_values, arm.keys, arm.runs, arm.differing, arm.group)
    if base is None:
        return row
    gap = arm_gap(arm, base)
    row = replace(row, against=base, outcome=gap)
    # Without a common seed of finite losses, there is no gap at equal cost and no trend.
    if gap.paired is None:
        return row
    equal = equal_gaps(arm, base, gap.paired.estimate)
    return replace(row, trend=loss_trend(arm, base), equal=equal)


def notes_of(
    arms: Sequence[RunArm], pairs: list[tuple[RunArm, RunArm]], score_notes: Sequence[str]
) -> list[str]:
    """Return the notes of a report about its runs.

    Args:
        pairs: each arm that has a baseline, with this baseline.
    """
    runs = runs_of(arms)
    notes = []
    for run in runs:
        notes += run_notes(run)
    for arm, base in pairs:
        notes += seed_notes(arm, base)
    notes += score_notes
    notes += fact_notes(runs)
    notes += parameter_notes(pairs)
    notes += length_notes(pairs)
    notes += speed_notes(runs)
    notes += code_notes(arms)
    return notes


def choose_baseline(requested: str | None, arms: Sequence[RunArm]) -> str | None:
    variants = list(dict.fromkeys(arm.variant for arm in arms))
    if requested is not None and requested not in variants:
        raise ConfigError(
            f"baseline={requested} is not the attention variant of any run; "
            f"choose from {', '.join(variants)}"
        )
    if requested is not None:
        return requested
    if "standard" in variants:
        return "standard"
    # A single row is compared with nothing, so its table needs no name of a baseline.
    return variants[0] if len(arms) > 1 else None


def baseline_arm(arm: RunArm, arms: Sequence[RunArm], baseline: str | None) -> RunArm | None:
    """Return the arm of `arms` that `arm` is compared with, or None if there is no such arm.

    The returned arm has the attention variant `baseline` and a comparable model size. Its other
    config keys have the same values as in `arm`; keys below `model.attention` may differ. If
    several arms qualify, return the arm without overrides of `model.attention`. The result can be
    `arm` itself. If the config of `arm` changed during training, return None, because no single
    config then explains the loss.
    """
    if baseline is None or arm.runs[0].changes:
        return None
    equal_keys = {"attention": baseline}
    for key, value in arm.keys.items():
        # `comparable_in_size` judges the keys in MATCHES: their values need not be equal.
        if key not in (*MATCHES, "attention") and not key.startswith(ATTENTION_PREFIX):
            equal_keys[key] = value
    agreeing = [other for other in arms if equal_keys.items() <= other.keys.items()]
    candidates = comparable_in_size(arm, agreeing)
    if len(candidates) == 1:
        return candidates[0]
    for candidate in candidates:
        if not overrides(candidate.runs[0]):
            return candidate
    return None


def comparable_in_size(arm: RunArm, others: Sequence[RunArm]) -> list[RunArm]:
    """Return the arms with the values of `arm` in MATCHES, or else the arms of comparable size."""
    keys = arm.keys.keys() & MATCHES
    equal = []
    comparable = []
    for other in others:
        if all(other.keys[key] == arm.keys[key] for key in keys):
            equal.append(other)
        if all(has_comparable_size(arm, other, key) for key in keys):
            comparable.append(other)
    return equal or comparable


def has_comparable_size(arm: RunArm, other: RunArm, match: str) -> bool:
    """Return whether two arms are comparable in model size, judged by config key `match`.

    `match` is "model.match_params_to" or "model.match_flops_to". The value of this key is a
    variant: the model gets as many parameters or FLOPs as that variant. Two arms with equal values
    are comparable. An arm whose value is the arm's own variant is comparable with every arm,
    because its model keeps the default size.
    """
    size, other_size = arm.keys[match], other.keys[match]
    return size == other_size or size == arm.variant or other_size == other.variant


def seed_notes(arm: RunArm, base: RunArm) -> list[str]:
    """Return a note about measured seeds that only one of two arms has."""
    seeds = arm.measured.keys()
    base_seeds = base.measured.keys()
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
