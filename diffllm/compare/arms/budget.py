"""Equal costs of training: the steps that a budget pays, and the check that costs are equal.

A cost is a number of training FLOPs or of seconds of training steps.
"""

from collections.abc import Mapping

from diffllm.compare.arms.sentences import compact, percent
from diffllm.core.errors import ConfigError, listed

TOLERANCE = 0.03
"""Largest relative difference between the costs of arms with equal budgets."""


def equal_steps(where: str, budget: float, cost_of_step: float) -> int:
    """Return the steps that cost `budget`, rounded.

    Raises ConfigError, with the text `where` in front, if the budget is less than one step.
    """
    if budget < cost_of_step * (1 - 1e-9):  # a quotient of equal costs can be rounded
        raise ConfigError(
            f"{where}the budget of a run, {budget:.3g}, is less than one training step, "
            f"{cost_of_step:.3g} (FLOPs or seconds)"
        )
    return round(budget / cost_of_step)


def unequal_costs(what: str, costs: Mapping[str, float], advice: str = "") -> list[str]:
    """Return a message if the costs of arms, by name, differ by more than TOLERANCE."""
    if len(costs) < 2:
        return []
    apart = max(costs.values()) / min(costs.values()) - 1
    if apart <= TOLERANCE:
        return []
    by_arm = [f"{compact(cost)} in {arm}" for arm, cost in costs.items()]
    return [
        f"budget: {what} per run differ by {percent(apart)}, more than {percent(TOLERANCE)}: "
        f"{listed(by_arm)}{advice}"
    ]
