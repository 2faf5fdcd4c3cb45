"""Scores of examples with intervals over clusters, per layer and per group of examples.

Shapes: n examples, L layers, K columns.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffllm.evaluation.evaluation import NamedScore
from diffllm.statistics.bootstrap import of_columns


@dataclass(frozen=True)
class Sample:
    """The examples of an evaluation, grouped to compute intervals and scores of subsets."""

    clusters: np.ndarray
    """Cluster number of each example, (n,); the examples of a cluster are dependent."""
    groupings: Mapping[str, np.ndarray]
    """For each field of the examples, such as "depth", the value in each example, (n,)."""

    def score(
        self,
        name: str,
        values: np.ndarray,
        totals: np.ndarray | None = None,
        chance: float | None = None,
        limits: tuple[float, float] | None = (0.0, 1.0),
        **details: Any,
    ) -> NamedScore:
        """Compute the score sum(values) / sum(totals) over all examples and layers.

        The result contains a 95% interval from a bootstrap over clusters of examples. It also
        contains the score and the interval of each layer. For each value of each field in
        `groupings`, it contains the score of the examples with this value, without an interval.

        Args:
            name: name of the score.
            values: numerator of each example and layer, (n, L).
            totals: denominator of each example and layer, (n, L); None means 1 everywhere.
            chance: expected score of a uniform attention map; None if not defined.
            limits: smallest and largest possible score, stored as "range"; None if unlimited.
            details: additional fields for the results file.
        """
        if totals is None:
            totals = np.ones_like(values)
        # Column 0 is the mean over layers; the other columns are the layers.
        top = np.column_stack((values.mean(1), values))
        bottom = np.column_stack((totals.mean(1), totals))
        # Dependent examples must be resampled together, so the bootstrap draws clusters.
        top_by_cluster = group_sums(top, self.clusters)
        bottom_by_cluster = group_sums(bottom, self.clusters)
        intervals = of_columns(top_by_cluster, bottom_by_cluster)
        value, *layers = ratios(top, bottom)
        layer_names = [str(i) for i in range(len(layers))]
        content: dict[str, Any] = {
            "independent": len(set(self.clusters.tolist())),
            "range": limits,
            "layer_intervals": dict(zip(layer_names, intervals[1:], strict=True)),
            "by_layer": dict(zip(layer_names, layers, strict=True)),
        }
        for field, field_values in self.groupings.items():
            # A dict, unlike a set, keeps the order of the examples.
            distinct_values = list(dict.fromkeys(field_values.tolist()))
            if len(distinct_values) < 2:
                continue
            by_value = {}
            for field_value in distinct_values:
                has_value = field_values == field_value
                mean, *_ = ratios(top[has_value], bottom[has_value])
                by_value[field_value] = mean
            content[f"by_{field}"] = by_value
        content |= details
        if value is None:
            value = math.nan
        return NamedScore(name, value, intervals[0], len(values), chance, content)


def group_sums(columns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Sum the rows of each group; return one row per group, with the K columns of `columns`.

    `columns` has shape (n, K). `groups` contains the group number of each row, (n,).
    """
    sums = [np.bincount(groups, column) for column in columns.T]
    return np.stack(sums, -1)


def ratios(top: np.ndarray, bottom: np.ndarray) -> list[float | None]:
    """Divide the column sums of `top` (n, K) by the column sums of `bottom` (n, K).

    A ratio is None if its divisor is 0.
    """
    numerators = top.sum(0).tolist()
    divisors = bottom.sum(0).tolist()
    quotients = []
    for numerator, divisor in zip(numerators, divisors, strict=True):
        quotients.append(numerator / divisor if divisor else None)
    return quotients
