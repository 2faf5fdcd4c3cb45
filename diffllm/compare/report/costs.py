"""The table of gaps at equal cost: tokens, FLOPs and seconds."""

from diffllm.compare.arms.budget import BUDGETS
from diffllm.compare.arms.sentences import MISSING, clock, compact, fixed, in_words
from diffllm.compare.report.results import lost_seeds
from diffllm.compare.report.rows import Row
from diffllm.core.printing import Cell, Table, TableColumn


def cost_table(rows: list[Row], baseline: str | None) -> Table | None:
    rows = [row for row in rows if row.equal]
    if not rows:
        return None
    labels = TableColumn(f"Gap to {baseline}", [Cell(row.label) for row in rows])
    return Table([labels, *cost_columns(rows)])


def cost_columns(rows: list[Row]) -> list[TableColumn]:
    columns = []
    for name, budget in BUDGETS.items():
        if not any(name in row.equal for row in rows):
            continue
        loss = "held-out sample loss" if name == "tokens" else "final held-out loss"
        meaning = f"{budget.meaning}; {loss} minus the baseline's after equal {budget.unit}"
        cells = [equal_cell(row, name) for row in rows]
        columns.append(TableColumn(f"At equal {budget.unit}", cells, "nats per token", meaning))
    return columns


def unplanned_sentences(rows: list[Row]) -> list[str]:
    """State how to plan runs for missing columns of the table of costs; [] if none is missing."""
    missing = []
    for name in ("flops", "seconds"):
        if not any(name in row.equal for row in rows):
            missing.append(f"equal {BUDGETS[name].unit}")
    if not missing:
        return []
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
    tag = f"at {clock(equal.at) if budget == 'seconds' else compact(equal.at, 3)}"
    return Cell(fixed(equal.gap.mean, signed=True), equal.gap.mean, tuple(small), tag)
