"""Compare runs: group runs that differ only in the seed, and measure loss gaps to a baseline."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diffllm.compare.arms.comparable import ATTENTION, Difference
from diffllm.compare.arms.directories import find_runs, sweep_notes
from diffllm.compare.arms.gap import arm_gap
from diffllm.compare.arms.run import Run, load_run
from diffllm.compare.arms.sentences import plural
from diffllm.compare.report.curves import equal_gaps
from diffllm.compare.report.differences import row_differences
from diffllm.compare.report.evaluations import Evaluated, columns, evaluations
from diffllm.compare.report.keys import MATCHES, distinguish, overrides
from diffllm.compare.report.notes import (
    code_notes,
    fact_notes,
    length_notes,
    parameter_notes,
    run_notes,
    speed_notes,
)
from diffllm.compare.report.rows import Group, Row, make_groups, make_rows
from diffllm.compare.report.tables import row_values
from diffllm.compare.report.trends import row_trend
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.evaluation.heldout import document_losses, same_documents
from diffllm.metrics.records import LARGEST
from diffllm.statistics.bootstrap import LEAST_DOCUMENTS, bootstrap, withheld
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.gap_tests import holm


@dataclass
class Comparison:
    """Content of a report about several runs.

    Attributes:
        rows: sets of runs that differ only in the seed.
        baseline: attention variant that others are compared with; None if there is
            only one row, its variant is not `standard`, and no baseline was requested.
        differences: config keys whose values prevent a comparison between groups.
        groups: sets of rows whose losses can be compared.
        score_notes: those `notes` that also apply to the evaluation scores in `evaluated`.
        row_differences: all keys and facts in which rows differ, also those without influence.
    """

    title: str
    rows: list[Row]
    baseline: str | None
    differences: list[str] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    evaluated: list[Evaluated] = field(default_factory=list)
    score_notes: list[str] = field(default_factory=list)
    row_differences: list[Difference] = field(default_factory=list)


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
    found = find_runs(paths)
    runs: list[Run] = []
    unreadable: dict[Path, str] = {}
    for path in found.runs:
        try:
            runs.append(load_run(path))
        except CheckpointError as error:
            unreadable[path] = str(error)
    if not runs:
        first, *others = unreadable.values()
        more = f"; {plural(len(others), 'more run')} cannot be read" if others else ""
        raise ConfigError(f"none of the runs can be read: {first}{more}")
    comparison = compare(runs, baseline, found.title, step)
    waiting = [note for sweep in found.sweeps for note in sweep_notes(sweep)]
    skipped = [f"{path} is skipped: {reason}." for path, reason in unreadable.items()]
    comparison.notes = skipped + waiting + comparison.notes
    comparison.score_notes = skipped + comparison.score_notes
    return comparison, found.home


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
    notes: list[str] = []
    groups = make_groups(make_rows(runs, keys, notes), runs, keys)
    rows = [row for group in groups for row in group.rows]
    chosen = choose_baseline(baseline, rows)
    kept = [run for row in rows for run in row.runs]
    notes += [note for run in kept for note in run_notes(run)]
    bases = [(row, baseline_row(row, rows, chosen)) for row in rows]
    pairs = [(row, base) for row, base in bases if base is not None and base is not row]
    for row, base in pairs:
        measure_gap(row, base, notes)
    tested = [(row, p) for row in rows if row.outcome and (p := row.outcome.p) is not None]
    for (row, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        row.p_holm = p  # All gaps are one family of tests.
    alone = [row.label for row, base in bases if base is None and not row.runs[0].changes]
    no_gap = f"No gap for {', '.join(alone)}: no run of {chosen} agrees in all other keys."
    of_scores = [no_gap] if alone and len(rows) > 1 else []
    notes += of_scores + fact_notes(kept) + parameter_notes(pairs) + length_notes(pairs)
    notes += speed_notes(kept) + code_notes(rows)
    evaluated, about = evaluations(rows, step)
    for i, row in enumerate(rows):
        row.equal = equal_gaps(row)
        row.incomparable = keys.incomparable
        row.values = row_values(row) | columns(evaluated, i)
    return Comparison(
        title,
        rows,
        chosen,
        keys.incomparable,
        groups,
        notes + about,
        evaluated,
        of_scores + about,
        row_differences(rows),
    )


def choose_baseline(wanted: str | None, rows: list[Row]) -> str | None:
    variants = list(dict.fromkeys(row.keys["attention"] for row in rows))
    if wanted is not None and wanted not in variants:
        raise ConfigError(
            f"baseline={wanted} is not the attention variant of any run; "
            f"choose from {', '.join(variants)}"
        )
    default = variants[0] if len(rows) > 1 else None
    return wanted or ("standard" if "standard" in variants else default)


def baseline_row(row: Row, rows: list[Row], baseline: str | None) -> Row | None:
    """Return the row of `rows` that `row` is compared with, or None if there is no such row.

    The returned row has the attention variant `baseline` and a comparable model size. Its other
    config keys have the same values as in `row`; keys below `model.attention` may differ. If
    several rows qualify, return the row without overrides of `model.attention`. The result can be
    `row` itself. If the config of `row` changed during training, return None, because no single
    config then explains the loss.
    """
    if baseline is None or row.runs[0].changes:
        return None
    sizes = {key: v for key, v in row.keys.items() if key in MATCHES}
    alike = {k: v for k, v in row.keys.items() if k not in MATCHES and not k.startswith(ATTENTION)}
    alike["attention"] = baseline
    found = [other for other in rows if alike.items() <= other.keys.items()]
    same = [other for other in found if sizes.items() <= other.keys.items()]
    found = same or [o for o in found if all(sizes_comparable(row, o, key) for key in sizes)]
    if len(found) > 1:
        found = [other for other in found if not overrides(other.runs[0])]
    return found[0] if found else None


def sizes_comparable(row: Row, other: Row, match: str) -> bool:
    """Return whether two report rows are comparable in model size, judged by config key `match`.

    `match` is "model.match_params_to" or "model.match_flops_to". The value of this key is a
    variant: the model gets as many parameters or FLOPs as that variant. Two rows with equal values
    are comparable. A row whose value is the row's own variant is comparable with every row, because
    its model keeps the default size.
    """
    own, theirs = row.keys[match], other.keys[match]
    return own == theirs or own == row.keys["attention"] or theirs == other.keys["attention"]


def measure_gap(row: Row, base: Row, notes: list[str]) -> None:
    row.against, row.outcome = base, (found := arm_gap(row.losses, base.losses))
    if found.paired is not None:
        row.gap, row.baseline, base.is_baseline = found.paired.estimate, base, True
        row.documents, row.no_documents = over_documents(row, base)
        row.trend = row_trend(row, base)
    own, theirs = row.measured.keys(), base.measured.keys()
    if own and theirs and own != theirs:
        common, others = (
            ", ".join(str(seed) if seed == init else f"{seed} (init_seed {init})"
                      for seed, init in sorted(seeds))
            for seeds in (own & theirs, own ^ theirs)
        )  # fmt: skip
        what = f"uses only seed {common}" if common else "is unknown"
        why = f"only one row has seed {others}"
        notes.append(f"The gap of {row.label} to {base.label} {what}: {why}.")


def over_documents(row: Row, base: Row) -> tuple[Estimate | None, str]:
    """Estimate the loss gap of `row` to `base` with a bootstrap over documents and seeds.

    Return (gap with interval, ""). If no interval can be computed, return (None, the reason).
    """
    own, others = row.measured, base.measured
    seeds = sorted(own.keys() & others.keys())
    if why := withheld(len(seeds), LEAST_DOCUMENTS):
        return None, why
    try:
        found = [document_losses(side[seed].path) for side in (others, own) for seed in seeds]
    except CheckpointError as error:
        return None, f"withheld: {error}"
    first = found[0]
    if not all(same_documents(first, each) for each in found):
        return None, "withheld: the runs were measured on different documents"
    nats = np.stack([each.nats for each in found])
    if not (np.abs(nats) <= LARGEST).all():
        return None, "withheld: a document's loss is not finite"
    if why := withheld(len(seeds), nats.shape[1]):
        return None, why
    return bootstrap(nats[len(seeds) :], nats[: len(seeds)], first.tokens), ""
