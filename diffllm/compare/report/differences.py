"""List every difference between the rows of a report, with its role in the comparison."""

from dataclasses import replace

from diffllm.compare.arms.budget import LENGTH_KEYS, planned_budgets
from diffllm.compare.arms.comparable import REPORT, Comparand, Difference, Role, differences
from diffllm.compare.arms.directories import shortlist
from diffllm.compare.report.keys import all_declarations, values_of
from diffllm.compare.report.rows import Row
from diffllm.config.changes import is_within
from diffllm.core.keys import declaration_of
from diffllm.core.printing import Cell, Table

OMITTED = ("run", "attention")
"""Section and computed value that differ between any two rows."""
MOST_LABELS = 4
"""Row labels per value in the table of differences."""
ORDER: tuple[Role, ...] = ("question", "condition", "declared", "harmless")


def row_differences(rows: list[Row]) -> list[Difference]:
    """Return the keys and facts in which rows differ, with the rows that have each value.

    Omit the attention variant and the columns of the table of results. A row can have several
    values of a key that does not influence the loss.
    """
    runs = [run for row in rows for run in row.runs]
    declared = all_declarations(runs)
    columns = {name for row in rows for name in row.values}
    budgets = dict(zip(runs, planned_budgets(runs), strict=True))
    comparands = []
    for row in rows:
        for run, values in zip(row.runs, values_of(row.runs), strict=True):
            for name in columns:
                values.pop(name, None)
            values["budget"] = budgets[run]
            comparands.append(Comparand(row.label, run.cfg.seed, values | row.differing))
    for name in LENGTH_KEYS:
        declared[name] = replace(declaration_of(name, declared), fact="budget")
    for name in rows[0].differing:
        # These keys distinguish rows, even if a fact is compared in their place.
        declared[name] = replace(declaration_of(name, declared), fact=None)
    result = differences(comparands, REPORT, declared)
    shown = [difference for difference in result if not is_within(difference.key, OMITTED)]

    def place(difference: Difference) -> tuple[int, bool]:
        return ORDER.index(difference.role), difference.key not in rows[0].differing

    return sorted(shown, key=place)


def row_settings(row: Row, differences: list[Difference]) -> str:
    """Return the settings of a row in which rows differ, such as "attention=gated optim.lr=0.1"."""
    words = [f"attention={row.keys['attention']}"]
    for difference in differences:
        texts = [text for text, labels in difference.values.items() if row.label in labels]
        if texts:
            words.append(f"{difference.key}={' or '.join(texts)}")
    return " ".join(words)


def differences_table(differences: list[Difference]) -> Table:
    """Return a table of the keys in which rows differ: role with reason, and rows of each value."""
    roles = {"question": "variant", "declared": "allowed"}
    lines: list[list[str | Cell]] = []
    for difference in differences:
        name = roles.get(difference.role, difference.role)
        values = []
        for text, labels in difference.values.items():
            values.append(f"{text}: {shortlist(labels, MOST_LABELS)}")
        cells = [Cell(name, small=(difference.reason,)), Cell(small=tuple(values))]
        lines.append([difference.key, *cells])
    return Table.of(["Key", "Role", "Values"], lines, range(3))


def row_settings_table(rows: list[Row], differences: list[Difference]) -> Table:
    lines = [[row.label, row_settings(row, differences)] for row in rows]
    return Table.of(["Row", "Settings"], lines, range(2))
