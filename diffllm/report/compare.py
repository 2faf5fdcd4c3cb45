"""From runs to a comparison: rows, gaps to the baseline, what cannot be compared."""

from typing import Any

from diffllm.report.columns import SKIPPED, row_values
from diffllm.report.comparison import Comparison, Difference, Row
from diffllm.report.gaps import baseline_row, choose_baseline, gap, one_variant_notes
from diffllm.report.keys import FACTS, as_text, distinguish, fact_text
from diffllm.report.notes import fact_notes, parameter_notes, run_notes, speed_notes
from diffllm.report.rows import make_rows
from diffllm.report.runs import Run


def compare(runs: list[Run], baseline: str | None = None, title: str = "") -> Comparison:
    """Group runs into rows and measure each against the baseline's row with equal other keys.

    Args:
        runs: at least one; their order does not matter.
        baseline: a variant; None takes `standard` if it is there, else the first row's if there
            are several.

    Raises:
        ConfigError: no run has the baseline's variant.
    """
    runs = sorted(runs, key=lambda run: str(run.path))
    keys = distinguish(runs)
    notes: list[str] = []
    rows_and_values = make_rows(runs, keys, notes)
    rows = [row for row, _ in rows_and_values]
    chosen = choose_baseline(baseline, rows)
    kept = [run for row in rows for run in row.runs]
    notes += [note for run in kept for note in run_notes(run)]
    pairs = [(row, base) for row in rows if (base := baseline_row(row, rows, chosen, notes))]
    for row, base in pairs:
        row.gap = gap(row, base, notes)
        row.baseline = base if row.gap else None
    notes += one_variant_notes(rows) + fact_notes(kept)
    notes += parameter_notes(pairs) + speed_notes(kept)
    skips = any(SKIPPED in (run.summary or {}) or SKIPPED in run.names for run in kept)
    for row in rows:
        row.values = row_values(row, keys.incomparable, skips)
    differences = [difference(key, rows_and_values) for key in keys.incomparable]
    return Comparison(title, rows, chosen, differences, notes)


def difference(key: str, rows: list[tuple[Row, dict[str, Any]]]) -> Difference:
    """Each value of a key, as text, and the labels of the rows that have it."""
    labels: dict[str, list[str]] = {}
    for row, values in rows:
        value = values[key]
        text = fact_text(value) if key in FACTS else as_text(value)
        labels.setdefault(text, []).append(row.label)
    return Difference(key, labels)
