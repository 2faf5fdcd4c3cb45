"""What a reader of a comparison has to know besides its numbers, a sentence each."""

from diffllm.report.comparison import Row
from diffllm.report.keys import FACTS, SPEED, as_text, differs, overrides
from diffllm.report.runs import Run

TOLERANCE = 0.005
"""Share by which totals of parameters may differ before it is said."""


def run_notes(run: Run) -> list[str]:
    """What is missing of a run."""
    notes = []
    if run.summary is None:
        notes.append(
            f"{run.path} has not finished: step {run.last_step} of {run.cfg.steps}; it is in no "
            "number of the table."
        )
    elif run.final_loss is None:
        notes.append(
            f"{run.path} ended with a held-out loss that is not a finite number; it is in no loss "
            "or gap, which look better for it."
        )
    if run.damaged_lines:
        notes.append(f"{run.damaged_lines} lines of {run.path}/metrics.jsonl cannot be read.")
    return notes


def fact_notes(runs: list[Run]) -> list[str]:
    """Runs whose run.json does not say what they were, and what that forbids."""
    everywhere = [fact for fact in FACTS if all(run.facts.get(fact) is None for run in runs)]
    notes = []
    if everywhere:
        notes.append(
            f"No run.json says the {listed(everywhere)} of a run: the config keys behind it are "
            "compared instead, and these may be equal where the runs are not."
        )
    for run in runs:
        unknown = [f for f in FACTS if run.facts.get(f) is None and f not in everywhere]
        if unknown:
            notes.append(
                f"{run.path}/run.json does not say the {listed(unknown)} of its run: no gap is "
                "measured to runs where that is known."
            )
    return notes


def listed(names: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def parameter_notes(gaps: list[tuple[Row, Row]]) -> list[str]:
    """Rows of another size than the one they are measured from, and how to make them equal.

    Args:
        gaps: rows, each with its baseline's row.
    """
    notes = []
    matched_to = {run.cfg.model.match_params_to for pair in gaps for r in pair for run in r.runs}
    for row, base in gaps:
        size, other = (r.runs[0].facts.get("parameters") for r in (row, base))
        if not size or not other or abs(size / other - 1) <= TOLERANCE:
            continue
        more = f"{abs(size / other - 1):.1%} {'more' if size > other else 'fewer'}"
        larger = max(
            (r for pair in gaps if pair[1] is base for r in pair),
            key=lambda r: r.runs[0].facts.get("parameters") or 0,
        )
        target = larger.runs[0].variant
        mend = f"; model.match_params_to={target} makes them equal"
        if target in matched_to or overrides(larger.runs[0]):
            mend = ""  # it is there already, or its YAML does not have these parameters
        notes.append(f"{row.label} has {more} parameters than {base.label}{mend}.")
    return notes


def speed_notes(runs: list[Run]) -> list[str]:
    """Why tokens a second cannot be compared, if they cannot."""
    values = [run.config | run.facts for run in runs]
    found = []
    for key in SPEED:
        known = [each for each in values if key in each]
        if differs(key, known):
            found.append(f"{key} ({', '.join(sorted({as_text(each[key]) for each in known}))})")
    if not found:
        return []
    return [f"Tokens a second and MFU are not comparable: the runs differ in {', '.join(found)}."]
