"""Tables of a report page: tests of gaps, gaps at equal cost, groups of rows, scores and runs."""

import os
from collections.abc import Sequence
from dataclasses import replace

from diffllm.compare.arms.arm import RunArm, runs_of
from diffllm.compare.arms.budget import BUDGETS
from diffllm.compare.arms.gap import ArmGap
from diffllm.compare.arms.run import EVAL_LOSS, Run, run_value
from diffllm.compare.arms.sentences import (
    MISSING,
    clock,
    compact,
    digits_for,
    finite,
    fixed,
    in_digits,
    in_words,
    p_text,
    with_interval,
)
from diffllm.compare.report.evaluations import ScoreCell, ScoreLine
from diffllm.compare.report.results import gap_tag, lost_seeds, tested_rows
from diffllm.compare.report.rows import Group, Row
from diffllm.compare.report.styles import RowStyle
from diffllm.compare.report.tables import has_content
from diffllm.core.printing import Cell, Table, TableColumn
from diffllm.metrics.display import spike_text
from diffllm.metrics.table import metric_of
from diffllm.statistics.gap_tests import Gap

HOLM = "p, Holm"
TESTS = (
    "Row",
    "Pairs",
    ("Paired gap", "nats per token, 95%"),
    "p",
    HOLM,
    ("Unpaired gap", "Welch, 95%"),
    "Welch's p",
    ("Documents and seeds", "95%"),
    ("Correlation", "between seeds"),
    ("Trend", "per doubling of tokens, 95%"),
    ("Diverged", "95%, and p"),
)
SPIKE_COUNTS = (
    "spikes/loss_total",
    "spikes/grad_total",
    "spikes_detrended/loss_total",
    "spikes_detrended/grad_total",
)


def gap_table(rows: list[Row], styles: list[RowStyle]) -> Table | None:
    """Return the table of tests; None if no gap has a test and no run diverged."""
    tests = len(tested_rows(rows))
    lines = []
    for row, style in zip(rows, styles, strict=True):
        if row.against is not None and row.outcome is not None:
            against = f"against {row.against.label}"
            names = Cell(row.label, small=(against,), icon=style.swatch)
            cells = test_cells(row, row.outcome, tests > 1)
            lines.append([names, *cells])
    # Numbers of diverged runs have a test even if no gap has one.
    has_test = tests > 0 or any(row.diverged for row in rows)
    if not lines or not has_test:
        return None
    table = Table.of(TESTS, lines)
    if tests > 1:
        return table
    # Holm's correction does not change a single p.
    columns = [column for column in table.columns if column.title != HOLM]
    return Table(columns)


def test_cells(row: Row, gap: ArmGap, several: bool) -> list[Cell]:
    """Return the cells of a gap in the table of tests, in the order of TESTS.

    Args:
        several: whether the page has several gaps, so that the tag is next to Holm's p.
    """
    paired = gap.paired
    over_documents = MISSING
    if gap.over_documents:
        interval = in_words(gap.over_documents.estimate, signed=True)
        if interval:
            over_documents = interval
    slope = row.trend.slope if row.trend else None
    tag = gap_tag(row)
    return [
        Cell(str(paired.seeds) if paired else "0"),
        Cell(gap_text(paired, 4)),
        # A single gap has no column of Holm's p.
        Cell(gap_p_text(paired), tag="" if several else tag),
        Cell(p_text(row.p_holm), tag=tag),
        Cell(gap_text(gap.welch, 4)),
        Cell(gap_p_text(gap.welch)),
        Cell(over_documents),
        Cell(fixed(gap.correlation, 2, signed=True)),
        Cell(gap_text(slope)),
        diverged_cell(gap),
    ]


def gap_text(gap: Gap | None, digits: int = 0) -> str:
    return with_interval(gap.estimate, True, digits) if gap else MISSING


def gap_p_text(gap: Gap | None) -> str:
    return p_text(gap.p if gap else None)


def diverged_cell(gap: ArmGap) -> Cell:
    candidate, base = gap.candidate, gap.base
    if not candidate.diverged and not base.diverged:
        return Cell("no run")
    low, high = candidate.interval
    text = (
        f"{candidate.diverged} of {candidate.runs} ({low:.0%} to {high:.0%}) against "
        f"{base.diverged} of {base.runs}"
    )
    test = f"p {p_text(gap.p_diverged)}, Fisher"
    return Cell(text, small=(test,))


def cost_columns(rows: list[Row]) -> list[TableColumn]:
    """Return the columns of gaps at equal tokens, FLOPs and seconds."""
    columns = []
    for name, budget in BUDGETS.items():
        cells = [equal_cell(row, name) for row in rows]
        if not has_content(cells):
            continue
        title = f"At equal {budget.unit}"
        loss = "held-out sample loss" if name == "tokens" else "final held-out loss"
        meaning = f"{budget.meaning}; {loss} minus the baseline's after equal {budget.unit}"
        columns.append(TableColumn(title, cells, "nats per token", meaning))
    return columns


def unplanned_sentences(rows: list[Row]) -> list[str]:
    """State how to plan runs for missing columns of the table of costs; [] if none is missing."""
    missing = []
    for name in ("flops", "seconds"):
        if not any(name in row.equal for row in rows):
            missing.append(f"equal {BUDGETS[name].unit}")
    if not missing:
        return []
    # `train.budget` has no limit in seconds.
    in_sweep = "`train.budget.flops` in a sweep, or " if "equal FLOPs" in missing else ""
    return [f"No gap at {' or '.join(missing)}: plan such runs with {in_sweep}`budget` in a study."]


def equal_cell(row: Row, budget: str) -> Cell:
    equal = row.equal.get(budget)
    if equal is None:
        return Cell(MISSING)
    small = lost_seeds(row)
    interval = in_words(equal.gap, signed=True)
    if interval:
        small.insert(0, interval)
    cost = clock(equal.at) if budget == "seconds" else compact(equal.at, 3)
    text = fixed(equal.gap.mean, signed=True)
    return Cell(text, equal.gap.mean, tuple(small), tag=f"at {cost}")


def groups_table(groups: list[Group]) -> Table:
    heads = ["Group", "rows", *groups[0].values]
    lines = []
    for group in groups:
        labels = ", ".join(row.label for row in group.rows)
        lines.append([group.letter, labels, *group.values.values()])
    return Table.of(heads, lines, range(len(heads)))


def score_table(name: str, lines: list[ScoreLine], rows: Sequence[RunArm]) -> Table:
    """Return a table of scores with one column per evaluated row of the report."""
    names = []
    chances = []
    for line in lines:
        names.append(Cell(line.name or "all"))
        chances.append(Cell(fixed(line.chance, 3)))
    columns = [TableColumn("Chance", chances)]
    for i, row in enumerate(rows):
        cells = [score_cell(line.cells[i]) for line in lines]
        columns.append(TableColumn(row.label, cells))
    measured = [column for column in columns if has_content(column.cells)]
    return Table([TableColumn(name, names, left=True), *measured])


def score_cell(score: ScoreCell | None) -> Cell:
    if score is None:
        return Cell(MISSING)
    small = []
    interval = in_words(score.mean, digits=digits_for(score.mean))
    if interval:
        small.append(interval)
    if score.over_examples:
        low, high = score.over_examples
        small.append(f"{low:.3f} to {high:.3f} over examples")
    if score.gap:
        small.append(f"gap {with_interval(score.gap, signed=True)}")
    return Cell(in_digits(score.mean.mean), small=tuple(small))


def runs_table(rows: list[Row]) -> Table:
    parents = [run.path.absolute().parent for run in runs_of(rows)]
    root = os.path.commonpath(parents)
    lines = []
    for row in rows:
        for run in row.runs:
            lines.append(run_cells(row.label, run, root))
    heads = ["Row", "Seed", "Directory", "Tokens", "Held-out loss", "Time", "Spikes", "State"]
    return Table.of(heads, lines, (0, 2, 6, 7))


def run_cells(label: str, run: Run, root: str) -> list[str | Cell]:
    """Return the cells of a run in the table of runs, with its path relative to `root`."""
    directory = Cell(os.path.relpath(run.path.absolute(), root))
    command = run.facts.get("command")
    if isinstance(command, str):
        directory = replace(directory, small=(command,))
    loss = Cell(fixed(run.final_loss))
    sample_loss = run.last_value(EVAL_LOSS)
    # A run that has ended without a final loss has diverged: its last sample loss does not count.
    if not run.ended and sample_loss is not None:
        loss = Cell(fixed(sample_loss), small=("held-out sample",))
    tokens = MISSING
    if len(run.metrics.tokens):
        tokens = compact(int(run.metrics.tokens[-1]))
    summary = run.summary or {}
    return [
        label,
        str(run.cfg.seed),
        directory,
        tokens,
        loss,
        clock(summary.get("seconds")),
        spikes_cell(run),
        run.state,
    ]


def spikes_cell(run: Run) -> Cell:
    counts = {}
    for name in SPIKE_COUNTS:
        count = finite(run_value(run, metric_of(name)))
        if count is None:
            return Cell(MISSING)
        counts[name] = count
    # The text names the counts of both definitions, separated by a semicolon.
    of_values, _, without_trend = spike_text(counts).partition("; ")
    return Cell(of_values, small=(without_trend,))
