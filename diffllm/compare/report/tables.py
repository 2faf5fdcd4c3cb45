"""The tables of a report beside its results: tests of gaps, costs, groups, scores, runs."""

import os

from diffllm.compare.report.columns import cost_columns
from diffllm.compare.report.evaluations import ScoreCell, ScoreLine
from diffllm.compare.report.figures import RowStyle
from diffllm.compare.report.groups import Group
from diffllm.compare.report.notes import gap_tag, p_text
from diffllm.compare.report.numbers import (
    MISSING,
    clock,
    compact,
    fixed,
    in_digits,
    in_words,
    with_interval,
)
from diffllm.compare.report.rows import Row
from diffllm.core.printing import Cell, Column, Table
from diffllm.statistics.arm_comparison import ArmComparison

TESTS = (
    "Row", "Pairs", ("Paired gap", "nats a token, 95%"), "p", "p, Holm",
    ("Unpaired gap", "Welch, 95%"), ("p", "Welch"), ("Documents and seeds", "bootstrap, 95%"),
    ("Correlation", "between seeds"), ("Diverged", "95%, and p"),
)  # fmt: skip


def gap_table(rows: list[Row], styles: list[RowStyle]) -> Table | None:
    lines = []
    for row, style in zip(rows, styles, strict=True):
        found = row.outcome
        if row.against is None or found is None:
            continue
        paired, unpaired = found.paired, found.welch
        lines.append(
            [
                Cell(row.label, small=(f"against {row.against.label}",), icon=style.swatch),
                Cell(str(paired.seeds) if paired else "0"),
                Cell(with_interval(paired.estimate, True, 4) if paired else MISSING),
                Cell(p_text(paired.p if paired else None)),
                Cell(p_text(row.p_holm), tag=gap_tag(row)),
                Cell(with_interval(unpaired.estimate, True, 4) if unpaired else MISSING),
                Cell(p_text(unpaired.p if unpaired else None)),
                Cell((in_words(row.documents, signed=True) if row.documents else "") or MISSING),
                Cell(fixed(found.correlation, 2, signed=True)),
                diverged_cell(found),
            ]
        )
    return Table.of(TESTS, lines) if lines else None


def diverged_cell(found: ArmComparison) -> Cell:
    own, base = found.own, found.base
    if not own.diverged and not base.diverged:
        return Cell("no run")
    low, high = own.interval
    text = f"{own.diverged} of {own.runs} ({low:.0%} to {high:.0%}) against "
    text += f"{base.diverged} of {base.runs}"
    return Cell(text, small=(f"p {p_text(found.p_diverged)}, Fisher",))


def cost_table(rows: list[Row], baseline: str | None) -> Table | None:
    if not (kept := [row for row in rows if row.equal]):
        return None
    labels = Column(f"Gap to {baseline}", [Cell(row.label) for row in kept])
    return Table([labels, *cost_columns(kept)])


def groups_table(groups: list[Group]) -> Table:
    heads = ["Group", "rows", *groups[0].values]
    lines = [
        [group.letter, ", ".join(row.label for row in group.rows), *group.values.values()]
        for group in groups
    ]
    return Table.of(heads, lines, range(len(heads)))


def score_table(name: str, lines: list[ScoreLine], rows: list[Row]) -> Table:

    def cell(score: ScoreCell | None) -> Cell:
        if score is None:
            return Cell(MISSING)
        gap = (with_interval(score.gap, signed=True),) if score.gap else ()
        return Cell(in_digits(score.mean.mean), small=gap)

    guessed = any(line.chance is not None for line in lines)
    heads = [name, *["Guess"] * guessed, *(row.label for row in rows)]
    cells: list[list[str | Cell]] = [
        [line.of or "all", *[fixed(line.chance, 3)] * guessed, *map(cell, line.cells)]
        for line in lines
    ]
    return Table.of(heads, cells)


def runs_table(rows: list[Row]) -> Table:
    runs = [(row.label, run) for row in rows for run in row.runs]
    root = os.path.commonpath([run.path.absolute().parent for _, run in runs])
    lines: list[list[str | Cell]] = []
    for label, run in runs:
        losses, command = run.series("eval/loss").values, run.facts.get("command")
        path = os.path.relpath(run.path.absolute(), root)
        lines.append(
            [
                label,
                str(run.cfg.seed),
                Cell(path, small=(command,) if isinstance(command, str) else ()),
                compact(run.metrics.tokens[-1] if len(run.metrics.tokens) else None),
                fixed(losses[-1] if len(losses) else None),
                clock((run.summary or {}).get("seconds")),
                run.state,
            ]
        )
    heads = ["Row", "Seed", "Directory", "Tokens", "Held-out loss", "Time", "State"]
    return Table.of(heads, lines, (0, 2, 6))
