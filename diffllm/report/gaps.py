"""Gaps: which row each is measured from, and by how much the losses differ."""

from diffllm.errors import ConfigError
from diffllm.report.comparison import Estimate, Row
from diffllm.report.keys import ATTENTION, MATCH, overrides
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

    A row that others are matched to goes with these. Of several, which then differ in fields of the
    variant, the one as its YAML has them. None for that row itself, and where there is none, which
    is noted.
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
            if key not in ("attention", MATCH) and not key.startswith(ATTENTION)
        )
    ]
    found = equally_matched(row, found, rows)
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


def equally_matched(row: Row, found: list[Row], rows: list[Row]) -> list[Row]:
    """Those of `found` with parameters matched as the row's are.

    The target of a matching needs none to have the parameters of those that are matched to it.
    """
    variant, target = row.keys["attention"], row.keys.get(MATCH)
    targets = [target]
    if target is None and not any(
        other.keys["attention"] == other.keys.get(MATCH) == variant for other in rows
    ):
        targets = [variant, None]
    for wanted in targets:
        matched = [other for other in found if other.keys.get(MATCH) == wanted]
        itself = [
            other
            for other in found
            if other.keys["attention"] == wanted and other.keys.get(MATCH) is None
        ]
        if matched or itself:
            return matched or itself
    return []


def one_variant_notes(rows: list[Row]) -> list[str]:
    """Why there is no gap where other keys than the variant were swept."""
    variants = {row.keys["attention"] for row in rows}
    others = [k for k in rows[0].keys if k != "attention"]
    if len(rows) == 1 or len(variants) > 1 or any(key.startswith(ATTENTION) for key in others):
        return []
    return [
        f"There is no gap: all rows are of {variants.pop()}, and a gap is between variants that "
        f"agree on all other keys; these rows differ in {', '.join(others)}."
    ]


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
