"""List every difference between the rows of a report, with its role in the comparison."""

<<<<<<< HEAD
from diffllm.compare.arms.budgets import LENGTH_KEYS
from diffllm.compare.arms.comparable import (
    ATTENTION,
    Difference,
    Role,
    arms_by_value,
    disagrees,
    role,
)
=======
from dataclasses import replace

from diffllm.compare.arms.comparable import REPORT, Comparand, Difference, Role, differences
>>>>>>> main
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
    comparands = []
    for row in rows:
        for run, values in zip(row.runs, values_of(row.runs), strict=True):
            for name in columns:
                values.pop(name, None)
            comparands.append(Comparand(row.label, run.cfg.seed, values | row.differing))
    for name in rows[0].differing:
        # These keys distinguish rows, even if a fact is compared in their place.
        declared[name] = replace(declaration_of(name, declared), fact=None)
    result = differences(comparands, REPORT, declared)
    shown = [difference for difference in result if not is_within(difference.key, OMITTED)]

    def place(difference: Difference) -> tuple[int, bool]:
        return ORDER.index(difference.role), difference.key not in rows[0].differing

<<<<<<< HEAD
def other_difference(rows: list[Row], name: str, declared: Declaration) -> list[Difference]:
    """Return a difference in a key or fact that does not distinguish rows; [] if rows agree."""
    key_role = role(name, declared, "report")
    if key_role == "question":  # Variants have different defaults; labels show overrides.
        return []
    if name in LENGTH_KEYS:
        key_role, why = "declared", "follows from the equal budget"
    elif key_role == "condition":
        # The key is not compared, because a fact or another key is compared in its place.
        key_role, why = "harmless", f"{declared.fact or declared.follows} is compared instead"
    elif key_role == "harmless":
        why = harmless_reason(declared)
    elif declared.computes:
        why = "rows may differ"
    else:
        why = "decides only how often values are measured"
    runs: list[tuple[str, int, str]] = []
    for row in rows:
        for run in row.runs:
            # Attention variants have different keys.
            if name.startswith(ATTENTION) and name not in run.config:
                continue
            runs.append((row.label, run.cfg.seed, value_text(name, recorded_value(run, name))))
    if not disagrees(runs):
        return []
    return [Difference(name, key_role, arms_by_value(runs), why)]


def recorded_value(run: Run, name: str) -> object:
    """Return a fact of run.json ("unknown" if it is missing), or the value of a config key."""
    if name not in fact_declarations():
        return run.config.get(name)
    fact = getattr(facts_of(run.facts), name)
    return "unknown" if fact is None else fact


def harmless_reason(declared: Declaration) -> str:
    if declared.effect == "speed":
        return "decides only speed"
    if declared.effect == "logging":
        return "decides only which values are logged, and how often"
    if "path" in declared.kinds:
        return "decides only where files are"
    return "has no influence on training and evaluation"


def initial_seeds(rows: list[Row]) -> list[Difference]:
    """Return the difference of rows whose runs of one seed have different model.init_seed.

    Gaps are paired by both seeds, so these runs are not compared.
    """
    runs: list[tuple[str, int, str]] = []
    for row in rows:
        for run in row.runs:
            seed, init_seed = run.seeds
            runs.append((row.label, seed, "seed" if init_seed == seed else str(init_seed)))
    if not disagrees(runs):
        return []
    why = "gaps compare only runs with equal initial values"
    return [Difference("model.init_seed", "condition", arms_by_value(runs), why)]
=======
    return sorted(shown, key=place)
>>>>>>> main


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
