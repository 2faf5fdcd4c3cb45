"""Scores of an evaluation as curves: over the number that tells their levels apart, such as that of
distractors."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffllm.evaluation.results import Lines
from diffllm.report.bands import Band, over_seeds
from diffllm.report.numbers import finite
from diffllm.report.runs import Series

FEWEST = 3
"""Levels that make a curve."""


class Curves(NamedTuple):
    """The scores of all rows over one setting, at equal values of the others."""

    title: str
    """The values of the other settings, as "shared 3"; empty without any."""
    setting: str
    values: list[float]
    """The levels, in increasing order, at which the curves stand side by side."""
    bands: list[Band | None]
    """One a row, over the places of `values`."""
    guesses: list[float | None]
    """The score of a guess at each level."""


def curves(rows: Sequence[Mapping[Any, Lines]]) -> list[Curves]:
    """Gather the curves that scores of an evaluation make; "level" of a score has the numbers that
    it stands at.

    Args:
        rows: the scores of each row's runs, by seed.
    """
    levels: dict[str, dict[str, Any]] = {}
    for row in rows:
        for scores in row.values():
            for of, score in scores.items():
                if isinstance(score.get("level"), dict):
                    levels.setdefault(of, score["level"])
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for of, level in levels.items():
        groups.setdefault(tuple(level), {})[of] = level
    return [made for of_keys in groups.values() for made in over_first(of_keys, rows)]


def over_first(
    levels: Mapping[str, dict[str, Any]], rows: Sequence[Mapping[Any, Lines]]
) -> list[Curves]:
    """Gather the curves over the first setting that makes any, of levels with the same ones."""
    for setting in next(iter(levels.values())):
        others: dict[str, dict[float, str]] = {}
        for of, level in levels.items():
            if (value := finite(level[setting])) is not None:
                rest = {k: v for k, v in level.items() if k != setting}
                words = (v if isinstance(v, str) else f"{k} {v}" for k, v in rest.items())
                others.setdefault(", ".join(words), {})[value] = of
        found = [
            along(title, setting, dict(sorted(at.items())), rows)
            for title, at in others.items()
            if len(at) >= FEWEST
        ]
        if found:
            return found
    return []


def along(
    title: str, setting: str, at: Mapping[float, str], rows: Sequence[Mapping[Any, Lines]]
) -> Curves:
    """Set the scores of all rows beside each other, level by level."""
    places, runs = np.arange(len(at)), [scores for row in rows for scores in row.values()]
    bands = []
    for row in rows:
        known = [[number(scores, of, "value") for of in at.values()] for scores in row.values()]
        bands.append(over_seeds(Series(places, np.array(y, np.float64)) for y in known))
    guesses = [
        next((x for run in runs if (x := number(run, of, "chance")) is not None), None)
        for of in at.values()
    ]
    return Curves(title, setting, list(at), bands, guesses)


def number(scores: Lines, of: str, key: str) -> float | None:
    """Return a number of a score; None where it has none, or is not there."""
    return finite(scores.get(of, {}).get(key))
