"""Rows: the runs of one combination of swept keys, in order and with a label."""

from typing import Any

from diffllm.report.comparison import Row
from diffllm.report.keys import ATTENTION, FACTS, Keys, as_text, decides, fact_text, overrides
from diffllm.report.runs import Run
from diffllm.report.statistics import estimate

ORDER = ("standard", "gated", "diff_v1", "diff_v2")
"""Rows begin with these; other variants follow by name."""
HASH = 8
"""Characters of a hash that a label shows."""


def make_rows(runs: list[Run], keys: Keys, notes: list[str]) -> list[tuple[Row, dict[str, Any]]]:
    """Rows in their order, labelled, each with its values of all `keys`; they have no gaps yet.

    Args:
        keys: of these runs.
        notes: gets a sentence for every run that is left out because another repeats it.
    """
    groups: dict[str, list[int]] = {}
    for i, values in enumerate(keys.values):
        groups.setdefault(as_text([values[key] for key in sorted(values)]), []).append(i)
    found = []
    for members in groups.values():
        values = keys.values[members[0]]
        kept = one_a_seed([runs[i] for i in members], notes)
        losses = [run.final_loss for run in kept if run.final_loss is not None]
        swept = {key: values[key] for key in keys.swept}
        row = Row("", swept, kept, estimate(losses) if losses else None, None, {})
        row.diverged = sum(run.summary is not None for run in kept) - len(losses)
        found.append((row, values))
    found.sort(key=lambda pair: row_order(pair[0].keys))
    rows = [row for row, _ in found]
    shown_together = keys_of_model_choice(runs, keys)
    for row in rows:
        row.label = label(row, rows, shown_together)
    return found


def row_order(keys: dict[str, Any]) -> tuple[Any, ...]:
    """Sorts rows: variants as in ORDER, then by the other keys, numbers by size."""
    variant, *others = keys.values()
    place = ORDER.index(variant) if variant in ORDER else len(ORDER)
    return (place, variant, *map(value_order, others))


def value_order(value: Any) -> tuple[int, float, str]:
    """None, then numbers, then text."""
    if value is None:
        return 0, 0.0, ""
    if isinstance(value, (int, float)):
        return 1, float(value), ""
    return 2, 0.0, as_text(value)


def one_a_seed(runs: list[Run], notes: list[str]) -> list[Run]:
    """The newest finished run of every seed, by seed; what is left out is noted."""
    by_seed: dict[tuple[int, int], Run] = {}
    for run in sorted(runs, key=lambda run: (run.summary is not None, written(run), str(run.path))):
        if other := by_seed.get(run.seeds):
            why = "newer" if (run.summary is None) == (other.summary is None) else "finished"
            notes.append(
                f"{other.path} is left out: {run.path} has the same keys and the same seed and is "
                f"{why}."
            )
        by_seed[run.seeds] = run
    return [by_seed[seeds] for seeds in sorted(by_seed)]


def written(run: Run) -> float:
    """When a run was finished, or last wrote; seconds since the epoch."""
    files = [run.path / name for name in ("summary.json", "metrics.jsonl", "config.yaml")]
    return next((file.stat().st_mtime for file in files if file.exists()), 0.0)


def label(row: Row, rows: list[Row], shown_together: set[str]) -> str:
    """The variant, and what else tells the row apart: "diff_v2 lr=0.001".

    Args:
        shown_together: keys that `model=<choice>` stands for.
    """
    own, parts = overrides(row.runs[0]), []
    for key, value in row.keys.items():
        if key == "attention" or key in shown_together:
            continue
        if key.startswith(ATTENTION):
            alike = [r for r in rows if r.keys["attention"] == row.keys["attention"]]
            if key not in own and all(other.keys[key] == value for other in alike):
                continue  # the variant's own, or none of its fields
        name = key.rpartition(".")[2]
        ambiguous = sum(other.rpartition(".")[2] == name for other in row.keys) > 1
        text = fact_text(value)[:HASH] if key in FACTS else as_text(value)
        parts.append(f"{key if ambiguous else name}={text}")
    if shown_together:
        parts.insert(0, f"model={row.runs[0].cfg.run.choices['model']}")
    return " ".join([row.keys["attention"], *parts])


def keys_of_model_choice(runs: list[Run], keys: Keys) -> set[str]:
    """Swept keys of `model` that the choice of `model=` decides, if it decides more than one."""
    values = [
        {**each, "choice": run.cfg.run.choices["model"]}
        for each, run in zip(keys.values, runs, strict=True)
    ]
    found = {
        key
        for key in keys.swept
        if key.startswith("model.") and not key.startswith(ATTENTION)
        if decides(["choice"], key, values)
    }
    return found if len(found) > 1 and decides(found, "choice", values) else set()
