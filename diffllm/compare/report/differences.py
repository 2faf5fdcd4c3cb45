"""Settings of the rows of a report, and every difference between rows with its role."""

from dataclasses import replace
from typing import Any

from diffllm.compare.arms.arm import runs_of
from diffllm.compare.arms.budget import LENGTH_KEYS, planned_budgets
from diffllm.compare.arms.comparability import (
    ATTENTION_PREFIX,
    REPORT,
    Comparand,
    Difference,
    Role,
    differences,
    value_text,
)
from diffllm.compare.arms.heldout import HELDOUT_SPLIT
from diffllm.compare.arms.run import Run
from diffllm.compare.arms.run_search import shortlist
from diffllm.compare.report.keys import (
    FACTS,
    HEADLINE,
    SEEDS,
    all_declarations,
    default_values,
    keys_of_fact,
    overrides,
    values_of,
)
from diffllm.compare.report.rows import Row
from diffllm.config.changes import is_within
from diffllm.core.keys import declaration_of
from diffllm.core.printing import Cell, Table
from diffllm.core.run_facts import fact_declarations, facts_of, machine_facts

OMITTED = ("run", "attention")
"""Section and computed value that differ between any two rows."""
MOST_LABELS = 4
"""Row labels per value in the table of differences."""
ROLE_NAMES = {"question": "variant", "declared": "allowed"}
"""Names of roles on the page, if they differ from those of `Role`."""
ORDER: tuple[Role, ...] = ("question", "condition", "declared", "harmless")


def row_differences(rows: list[Row]) -> list[Difference]:
    """Return the keys and facts in which rows differ, with the rows that have each value.

    Omit the attention variant and the columns of the table of results. A row can have several
    values of a key that does not influence the loss.
    """
    declared = all_declarations(runs_of(rows))
    # These keys follow from a budget, which is compared in their place.
    for name in LENGTH_KEYS:
        declared[name] = replace(declaration_of(name, declared), fact="budget")
    keys_of_rows = rows[0].differing
    for name in keys_of_rows:
        # These keys distinguish rows, even if a fact is compared in their place.
        declared[name] = replace(declaration_of(name, declared), fact=None)
    result = []
    for difference in differences(comparands_of(rows), REPORT, declared):
        if not is_within(difference.key, OMITTED):
            result.append(difference)
    # The sort is stable: keys of equal rank stay sorted by name.
    result.sort(key=lambda item: (ORDER.index(item.role), item.key not in keys_of_rows))
    return result


def comparands_of(rows: list[Row]) -> list[Comparand]:
    """Return the compared values of each run; columns of the table of results are omitted."""
    runs = runs_of(rows)
    budgets = dict(zip(runs, planned_budgets(runs), strict=True))
    comparands = []
    for row in rows:
        for run, values in zip(row.runs, values_of(row.runs), strict=True):
            for name in row.values:
                values.pop(name, None)
            values["budget"] = budgets[run]
            # The keys that distinguish rows have the row's values, such as a text of all versions.
            values |= row.differing
            comparands.append(Comparand(row.label, run.cfg.seed, values))
    return comparands


def row_settings(row: Row, differing: list[Difference]) -> str:
    """Return the settings of a row in which rows differ, such as "attention=gated optim.lr=0.1"."""
    texts = [f"attention={row.keys['attention']}"]
    for difference in differing:
        values = []
        for text, labels in difference.values.items():
            if row.label in labels:
                values.append(text)
        # A row has several values if its seeds differ in a key without influence on the loss.
        if values:
            alternatives = " or ".join(values)
            texts.append(f"{difference.key}={alternatives}")
    return " ".join(texts)


def differences_table(differing: list[Difference]) -> Table:
    """Return a table of the keys in which rows differ: role with reason, and rows of each value."""
    lines: list[list[str | Cell]] = []
    for difference in differing:
        values = []
        for text, labels in difference.values.items():
            values.append(f"{text}: {shortlist(labels, MOST_LABELS)}")
        name = ROLE_NAMES.get(difference.role, difference.role)
        role_cell = Cell(name, small=(difference.reason,))
        values_cell = Cell(small=tuple(values))
        lines.append([difference.key, role_cell, values_cell])
    return Table.of(["Key", "Role", "Values"], lines, range(3))


def row_settings_table(rows: list[Row], differing: list[Difference]) -> Table:
    lines = [[row.label, row_settings(row, differing)] for row in rows]
    return Table.of(["Row", "Settings"], lines, range(2))


def settings(rows: list[Row]) -> dict[str, str]:
    """Return the values of the settings of all runs, as text, by key or fact.

    These are the keys in HEADLINE, then all keys that decide numbers, order or a measurement and
    are not at their default in every run, then facts.
    """
    runs = runs_of(rows)
    settings_of_runs = [changed_settings(run) for run in runs]
    texts = {}
    for name in setting_names(runs, settings_of_runs):
        # A key is shown if one run has changed it; the other runs then show their default.
        distinct: dict[str, None] = {}
        for run, values in zip(runs, settings_of_runs, strict=True):
            default = run.config.get(name)
            value = values.get(name, default)
            if value not in (None, [], ""):
                distinct[value_text(name, value)] = None
        if distinct:
            texts[name] = " or ".join(distinct)
    return texts


def setting_names(runs: list[Run], settings_of_runs: list[dict[str, Any]]) -> list[str]:
    """Return the names of all settings: keys in HEADLINE, other keys as declared, then facts."""
    names: set[str] = set().union(*settings_of_runs)
    # A dict of None is a set that keeps its order.
    keys = dict.fromkeys([*HEADLINE, *all_declarations(runs)])
    facts = fact_declarations()
    ordered = []
    for key in keys:
        # `all_declarations` also contains the facts, which follow all keys.
        if key in names and key not in facts:
            ordered.append(key)
    return ordered + sorted(names.difference(ordered))


def changed_settings(run: Run) -> dict[str, Any]:
    """Return the settings of one run that are not at their default, by key or fact.

    The training corpus of a run that `diffllm import` created is not known: its fact is "unknown",
    and the config keys of the corpus have the value None.
    """
    defaults = default_values()
    values: dict[str, Any] = {"model": run.cfg.resolved.choices["model"]}
    for name, value in run.config.items():
        declared = declaration_of(name, run.declarations)
        # A mixture can have 500 sources; config.yaml lists them.
        if declared.harmless or name in SEEDS or is_within(name, ["resolved", "data.sources"]):
            continue
        # Below model.attention, defaults depend on the variant: `overrides` adds these keys.
        if name.startswith(ATTENTION_PREFIX) or declared.effect == "logging":
            continue
        default = defaults.get(name)
        if declared.follows:
            # The default of such a key is the value of another key.
            default = run.config.get(declared.follows)
        if name in HEADLINE or value != default:
            values[name] = value
    values |= overrides(run)
    facts = vars(facts_of(run.facts))
    for name in (*FACTS, *machine_facts()):
        values[name] = facts[name]
    values[HELDOUT_SPLIT] = run.facts.get(HELDOUT_SPLIT)
    if "imported" in run.facts:
        for name in keys_of_fact("corpus", run.declarations):
            values[name] = None
        values["corpus"] = "unknown"
    git = run.facts.get("git")
    if isinstance(git, dict) and isinstance(git.get("commit"), str):
        commit = git["commit"][:12]
        if git.get("dirty"):
            commit += ", with uncommitted changes"
        values["commit"] = commit
    return values
