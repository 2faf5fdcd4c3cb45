"""Config of a curriculum: weights of the sources of a mixture, which change during a run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from diffllm.core.bounds import at_most
from diffllm.core.errors import ConfigError
from diffllm.core.keys import key

MOST_WEIGHT = 1e18
MOST_SOURCES, MOST_POINTS, MOST_WEIGHTS = 500, 500, 10_000


class Between(Enum):
    """How the sampling weights of sources change between two points of a curriculum."""

    constant = "constant"
    linear = "linear"


@dataclass
class Point:
    at: float = key(
        0.0,
        least=0,
        most=1e15,
        effect="order",
        help="Share of the run's tokens if at most 1, else a number of tokens.",
    )
    weights: dict[str, float] = key(
        {},
        effect="order",
        help="Weights from this point on, by source; 0 for sources that are not named.",
    )


def check_curriculum(points: Sequence[Point], sources: Collection[str]) -> None:
    """Raise ConfigError for invalid weights, or if the points are not in ascending order.

    `sources` contains the names of the sources of the mixture.
    """
    for i, (former, point) in enumerate(pairwise([Point(), *points])):
        check_point(f"data.curriculum[{i}]", point, sources)
        # Shares and numbers of tokens compare only if the run's length is known.
        has_same_unit = (former.at <= 1) == (point.at <= 1)
        if has_same_unit and point.at <= former.at:
            previous = f", the value of data.curriculum[{i - 1}].at" if i else ""
            raise ConfigError(
                f"data.curriculum[{i}].at={point.at:g} must be greater than {former.at:g}{previous}"
            )


def check_point(key_name: str, point: Point, sources: Collection[str]) -> None:
    """Raise ConfigError for invalid weights; `key_name` is the key of the curriculum point."""
    for name, weight in point.weights.items():
        if name not in sources:
            names = ", ".join(sources)
            raise ConfigError(
                f"{key_name}.weights: the source {name!r} must be one of data.sources: {names}"
            )
        # Checked here, because `check_bounds` does not read the values of mappings. NaN is never
        # within these bounds.
        if not 0 <= weight <= MOST_WEIGHT:
            raise ConfigError(
                f"{key_name}.weights.{name}={weight:g} must be from 0 to {MOST_WEIGHT:g}"
            )
    if not any(point.weights.values()):
        raise ConfigError(f"{key_name}.weights: all are 0; at least one must be above 0")


def check_sizes(sources: int, points: int) -> None:
    at_most("entries in data.sources", sources, MOST_SOURCES)
    at_most("entries in data.curriculum", points, MOST_POINTS)
    at_most("weights in data.curriculum (points x sources)", points * sources, MOST_WEIGHTS)
