"""Gaps: which row each is measured from, and by how much the losses differ."""

from diffllm.errors import ConfigError
from diffllm.report.comparison import Estimate, Row
from diffllm.report.keys import ATTENTION, overrides
from diffllm.report.statistics import paired_gap


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


def baseline_row(row: Row, rows: list[Row], baseline: str | None, notes: list[str]) -> Row | None:
    """The row that a gap is measured from: the baseline's, all keys outside of attention equal.

    Of several, which then differ in fields of the variant, the one as its YAML has them. None for
    that row itself, and where there is none, which is noted.
    """
    if baseline is None:
        return None
    found = [
        other
        for other in rows
        if other.keys["attention"] == baseline
        and all(
            other.keys[key] == value
            for key, value in row.keys.items()
            if key != "attention" and not key.startswith(ATTENTION)
        )
    ]
    if len(found) > 1:
        found = [other for other in found if not overrides(other.runs[0])]
    if not found:
        same_variant = row.keys["attention"] == baseline
        what = (
            f"{baseline} without overrides" if same_variant else f"{baseline} with its other keys"
        )
        notes.append(f"{row.label} has no gap: there is no run of {what}.")
        return None
    return None if found[0] is row else found[0]


def gap(row: Row, base: Row, notes: list[str]) -> Estimate | None:
    """Of the loss, paired over common seeds; that a seed is missing on one side is noted."""
    own, theirs = (
        {run.seeds: run.final_loss for run in side.runs if run.final_loss is not None}
        for side in (row, base)
    )
    found = paired_gap(own, theirs)
    if own and theirs and own.keys() != theirs.keys():
        common = ", ".join(map(seed_text, sorted(own.keys() & theirs.keys())))
        what = f"is over seed {common} alone" if common else "is unknown"
        notes.append(
            f"The gap of {row.label} to {base.label} {what}: they have other seeds otherwise, "
            f"{', '.join(map(seed_text, sorted(own.keys() ^ theirs.keys())))}."
        )
    return found


def seed_text(seeds: tuple[int, int]) -> str:
    """ "0", or "0 (init_seed 3)" where initial values have a seed of their own."""
    seed, init_seed = seeds
    return str(seed) if seed == init_seed else f"{seed} (init_seed {init_seed})"
