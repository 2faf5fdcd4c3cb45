"""A comparison: each row's gap to its baseline, and all that forbids or limits comparing them."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diffllm.compare.report.budgets import equal_gaps
from diffllm.compare.report.evaluations import Evaluated, columns, evaluations
from diffllm.compare.report.find import find_runs, sweep_notes
from diffllm.compare.report.groups import Group, differing_keys, make_groups
from diffllm.compare.report.keys import ATTENTION, MATCHES, distinguish, match_of, overrides
from diffllm.compare.report.notes import fact_notes, parameter_notes, run_notes, speed_notes
from diffllm.compare.report.rows import Row, make_rows, row_values
from diffllm.compare.report.runs import Run, load_run
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.evaluation.heldout import DocumentLosses, document_losses
from diffllm.metrics.records import LARGEST
from diffllm.statistics.arm_comparison import compare_arms
from diffllm.statistics.bootstrap import LEAST_DOCUMENTS, bootstrap, withheld
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.gap_tests import holm


@dataclass
class Comparison:
    """All that a report shows."""

    title: str
    rows: list[Row]
    baseline: str | None
    """The variant that gaps are measured from."""
    differences: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Keys that make rows incomparable ("steps", "data.dataset", "corpus"): each value, as text,
    and the labels of the rows that have it."""
    groups: list[Group] = field(default_factory=list)
    """The rows that can be compared with each other, in the order of `rows`."""
    notes: list[str] = field(default_factory=list)
    """Unfinished runs, runs that could not be read, missing seeds: a sentence each."""
    evaluated: list[Evaluated] = field(default_factory=list)
    """The results that checkpoints of these runs have of tasks and measurements."""


def read(paths: list[Path], baseline: str | None = None) -> tuple[Comparison, Path | None]:
    """The comparison of all runs in `paths`, and the directory that its report belongs in, if any.

    A run that cannot be read is a note, and so are a sweep's runs that have not started. Raises
    ConfigError if no run can be read, or none has the baseline's variant.
    """
    found = find_runs(paths)
    runs: list[Run] = []
    unreadable: list[str] = []
    for path in found.runs:
        try:
            runs.append(load_run(path))
        except CheckpointError as error:
            unreadable.append(f"{path} is left out: {error}.")
    if not runs:
        more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
        raise ConfigError(f"no run can be read: {unreadable[0]}{more}")
    comparison = compare(runs, baseline, found.title)
    waiting = [note for sweep in found.sweeps for note in sweep_notes(sweep)]
    comparison.notes = unreadable + waiting + comparison.notes
    return comparison, found.home


def compare(runs: list[Run], baseline: str | None = None, title: str = "") -> Comparison:
    """Group runs into rows and measure each against the baseline's row with equal other keys.

    There is at least one run. Without `baseline` it is `standard` if there, else the first row's
    if there are several. Raises ConfigError if no run has the baseline's variant.
    """
    runs = sorted(runs, key=lambda run: str(run.path))
    keys = distinguish(runs)
    notes: list[str] = []
    groups = make_groups(make_rows(runs, keys, notes), runs, keys)
    rows = [row for group in groups for row in group.rows]
    chosen = choose_baseline(baseline, rows)
    kept = [run for row in rows for run in row.runs]
    notes += [note for run in kept for note in run_notes(run)]
    alone: list[Row] = []
    pairs = [(row, base) for row in rows if (base := baseline_row(row, rows, chosen, alone))]
    notes += no_gap_notes(alone, chosen)
    for row, base in pairs:
        measure(row, base, notes)
    adjust(rows)
    notes += one_variant_notes(rows) + fact_notes(kept)
    notes += parameter_notes(pairs) + speed_notes(kept)
    evaluated = evaluations(rows, notes)
    for i, row in enumerate(rows):
        row.equal = equal_gaps(row)
        row.values = row_values(row, keys.incomparable) | columns(evaluated, i)
    apart = differing_keys(groups, keys.incomparable)
    return Comparison(title, rows, chosen, apart, groups, notes, evaluated)


def choose_baseline(wanted: str | None, rows: list[Row]) -> str | None:
    """The variant that gaps are measured from; raises ConfigError."""
    variants = list(dict.fromkeys(row.keys["attention"] for row in rows))
    if wanted is not None:
        if wanted not in variants:
            raise ConfigError(
                f"baseline={wanted} is the variant of none of these runs; "
                f"choose from {', '.join(variants)}"
            )
        return wanted
    if "standard" in variants:
        return "standard"
    return variants[0] if len(rows) > 1 else None


def baseline_row(row: Row, rows: list[Row], baseline: str | None, alone: list[Row]) -> Row | None:
    """The row that a gap is measured from: the baseline's, all keys outside of attention equal.

    A row that others are matched to goes with these. Of several, which then differ in fields of the
    variant, the one as its YAML has them. None for that row itself, and where there is none; the
    row is then added to `alone`.
    """
    if baseline is None or row.runs[0].changes:
        return None
    found = [
        other
        for other in rows
        if other.keys["attention"] == baseline
        and all(
            other.keys[key] == value
            for key, value in row.keys.items()
            if key not in ("attention", *MATCHES) and not key.startswith(ATTENTION)
        )
    ]
    found = equally_matched(row, found, rows)
    if len(found) > 1:
        found = [other for other in found if not overrides(other.runs[0])]
    if not found:
        alone.append(row)
        return None
    return None if found[0] is row else found[0]


def no_gap_notes(alone: list[Row], baseline: str | None) -> list[str]:
    """Which rows have no gap because no run of the baseline is like them."""
    notes = []
    for own in (False, True):
        labels = [row.label for row in alone if (row.keys["attention"] == baseline) == own]
        one = len(labels) == 1
        like = "without overrides" if own else f"with {'its' if one else 'their'} other keys"
        has = "has" if one else "have"
        if labels:
            names = ", ".join(labels)
            notes.append(f"{names} {has} no gap: there is no run of {baseline} {like}.")
    return notes


def equally_matched(row: Row, found: list[Row], rows: list[Row]) -> list[Row]:
    """Those of `found` with their total matched as the row's is.

    The target of a matching needs none to have the total of those that are matched to it.
    """
    variant, own = row.keys["attention"], match_of(row.keys)
    wanted = [own]
    if own is None:
        as_target = [(key, variant) for key in MATCHES]
        taken = [match_of(r.keys) for r in rows if r.keys["attention"] == variant]
        wanted = [*(match for match in as_target if match not in taken), None]
    for match in wanted:
        matched = [other for other in found if match_of(other.keys) == match]
        if match and not matched:  # then the target itself
            matched = [
                other
                for other in found
                if other.keys["attention"] == match[1] and match_of(other.keys) is None
            ]
        if matched:
            return matched
    return []


def one_variant_notes(rows: list[Row]) -> list[str]:
    """Why there is no gap where other keys than the variant were swept."""
    variants = {row.keys["attention"] for row in rows}
    others = [k for k in rows[0].keys if k != "attention"]
    if len(rows) == 1 or len(variants) > 1 or any(key.startswith(ATTENTION) for key in others):
        return []
    return [
        f"There is no gap: all rows are of {variants.pop()}, and a gap is between variants that "
        f"agree on all other keys; these rows differ in {', '.join(others)}."
    ]


def measure(row: Row, base: Row, notes: list[str]) -> None:
    """Set a row's outcome, gap and baseline; a seed missing on one side is noted."""
    row.against, row.outcome = base, (found := compare_arms(row.losses, base.losses))
    if found.paired is not None:
        row.gap, row.baseline = found.paired.estimate, base
        row.documents, row.no_documents = over_documents(row, base)
    own, theirs = (
        {seed for seed, loss in side.losses.items() if loss is not None} for side in (row, base)
    )
    if own and theirs and own != theirs:
        common = ", ".join(map(seed_text, sorted(own & theirs)))
        what = f"is over seed {common} alone" if common else "is unknown"
        notes.append(
            f"The gap of {row.label} to {base.label} {what}: they have other seeds otherwise, "
            f"{', '.join(map(seed_text, sorted(own ^ theirs)))}."
        )


def over_documents(row: Row, base: Row) -> tuple[Estimate | None, str]:
    """The gap of the rows over the documents and the seeds that both have, or why there is none.

    Runs are read only where there are seeds enough.
    """
    own, others = finite_runs(row), finite_runs(base)
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


def finite_runs(row: Row) -> dict[tuple[int, int], Run]:
    return {run.seeds: run for run in row.finished if run.final_loss is not None}


def same_documents(one: DocumentLosses, other: DocumentLosses) -> bool:
    return np.array_equal(one.texts, other.texts) and np.array_equal(one.tokens, other.tokens)


def adjust(rows: list[Row]) -> None:
    """Set Holm's p of every gap that has a test: all of them are one family."""
    tested = [(row, p) for row in rows if row.outcome and (p := row.outcome.p) is not None]
    adjusted = holm([p for _, p in tested])
    for (row, _), p in zip(tested, adjusted, strict=True):
        row.p_holm = p


def seed_text(seeds: tuple[int, int]) -> str:
    """ "0", or "0 (init_seed 3)" where initial values have a seed of their own."""
    seed, init_seed = seeds
    return str(seed) if seed == init_seed else f"{seed} (init_seed {init_seed})"
