"""Costs of runs in tokens, FLOPs and seconds, and runs that were planned with equal costs."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from diffllm.compare.arms.run import Run, flops_facts, keys_seen
from diffllm.compare.arms.sentences import compact, percent
from diffllm.core.run_facts import machine_facts

COST_TOLERANCE = 0.03
"""Largest relative difference between the FLOPs or seconds of runs with equal budgets."""
LENGTH_KEYS = ("steps", "optim.warmup_steps")
"""Config keys that follow from a budget."""
Array = np.ndarray


def tokens_spent(run: Run, tokens: Array) -> Array:
    return tokens


def flops_spent(run: Run, tokens: Array) -> Array | None:
    """Return the training FLOPs after which a run had trained on `tokens` tokens, shape (n,).

    With document masks, attention counts the keys that were visible up to then. Return None if the
    run does not record its FLOPs per token.
    """
    per_token, per_key = flops_facts(run.facts)
    if per_token is None:
        return None
    logged_tokens, keys = keys_seen(run.metrics)
    if per_key is None or not len(logged_tokens):
        return tokens * per_token
    # `per_token` counts the mean number of visible keys; the deviation so far is added.
    mean_keys = keys[-1] / logged_tokens[-1]
    deviations = keys - logged_tokens * mean_keys
    # Training starts at 0 tokens, which no line logs.
    points = np.append(0, logged_tokens)
    deviation = np.interp(tokens, points, np.append(0, deviations))
    return tokens * per_token + per_key * deviation


def seconds_spent(run: Run, tokens: Array) -> Array | None:
    """Return the training time in seconds after which a run had trained on `tokens` tokens.

    `tokens` and the result have shape (n,). The time of evaluations and checkpoints is excluded.
    Return None if the run did not log step times.
    """
    if "perf/step_ms" not in run.metrics.columns:
        return None
    places, step_ms = run.metrics.columns["perf/step_ms"]
    # A line has the mean time of the steps since the line before.
    steps = np.diff(run.metrics.steps[places], prepend=0)
    seconds_of_lines = steps * step_ms / 1e3
    seconds = np.append(0, np.cumsum(seconds_of_lines))
    points = np.append(0, run.metrics.tokens[places])
    # NaN after the last line: the time of later steps is unknown.
    return np.interp(tokens, points, seconds, right=np.nan)


def total_tokens(run: Run) -> float:
    return run.planned_tokens


def total_flops(run: Run) -> float | None:
    """Return the FLOPs of all planned training steps; None if the FLOPs per token are unknown."""
    per_token, _ = flops_facts(run.facts)
    return None if per_token is None else run.planned_tokens * per_token


def total_seconds(run: Run) -> float | None:
    """Return the seconds of all training steps up to now; None if the run has no step times."""
    if run.train_seconds is not None:
        return run.train_seconds
    # Without times in steps.npy, use the logged step times.
    tokens = np.array([run.tokens_at(run.last_step)])
    seconds = seconds_spent(run, tokens)
    if seconds is None or not np.isfinite(seconds).all():
        return None
    return float(seconds[0])


class Budget(NamedTuple):
    """A cost in which runs can be equal.

    `spent` returns the costs (n,) after given numbers of tokens (n,), and `total` the cost of a
    run; None if unknown. `facts` are the entries of run.json that must be equal to compare costs.
    """

    unit: str
    meaning: str
    spent: Callable[[Run, Array], Array | None]
    total: Callable[[Run], float | None]
    facts: tuple[str, ...] = ()

    def equal_cost(self, arms: Iterable[Sequence[Run]]) -> float | None:
        """Return the mean cost per run of arms with equal costs.

        Return None if `inequality` returns a reason.
        """
        arms_with_runs = [runs for runs in arms if runs]
        if self.inequality(arms_with_runs):
            return None
        return mean_cost(self.mean(runs) for runs in arms_with_runs)

    def mean(self, runs: Sequence[Run]) -> float | None:
        """Return the mean cost per run; None if the cost of a run is unknown."""
        return mean_cost(self.total(run) for run in runs)

    def inequality(self, arms: Collection[Sequence[Run]]) -> str:
        """Return the reason why arms with runs do not have equal costs; "" if they are equal.

        The mean costs of the arms are compared, because the times of single runs vary. Costs are
        not equal if they differ by more than COST_TOLERANCE, or if the cost of a run is unknown.
        """
        means = []
        for runs in arms:
            mean = self.mean(runs)
            if mean is None:
                return f"the {self.unit} of a run are unknown"
            means.append(mean)
        if not means:
            return f"the {self.unit} of the runs are unknown"
        machines = set()
        for run in chain(*arms):
            machine = [run.facts.get(fact) for fact in self.facts]
            machines.add(str(machine))
        if len(machines) > 1:
            return f"the {self.unit} were measured on different machines ({', '.join(self.facts)})"
        lowest = min(means)
        highest = max(means)
        if highest > lowest * (1 + COST_TOLERANCE):
            excess = percent(highest / lowest - 1)
            costs = f"{compact(lowest)} to {compact(highest)}"
            limit = percent(COST_TOLERANCE)
            return f"the {self.unit} per run ({costs}) differ by {excess}; the limit is {limit}"
        return ""


def mean_cost(costs: Iterable[float | None]) -> float | None:
    """Return the mean cost of runs; None if the cost of a run is unknown, or without runs."""
    numbers = []
    for cost in costs:
        if not cost:
            return None
        numbers.append(cost)
    return fmean(numbers) if numbers else None


BUDGETS = {
    "tokens": Budget("tokens", "Tokens trained on", tokens_spent, total_tokens),
    "flops": Budget(
        "FLOPs", "Training FLOPs, forward and backward; attention counts visible keys only",
        flops_spent, total_flops,
    ),
    "seconds": Budget(
        "seconds", "Time of training steps, without evaluations and saves",
        seconds_spent, total_seconds, machine_facts(),
    ),
}  # fmt: skip


def plan_of(run: Run) -> str | None:
    """Name the plan that can make the costs of runs equal: the budget of a sweep, or a study."""
    flops = run.cfg.train.budget.flops
    if flops is not None:
        return f"{compact(flops)} FLOPs"
    if not run.cfg.run.study:
        return None
    # The key contains the hash of the study, the stage and the arm. The arms of a stage share a
    # plan, but the stages can have different lengths.
    digest, _, stage_and_arm = run.cfg.run.study.partition("/")
    stage, _, _ = stage_and_arm.partition("/")
    return f"study {digest[:8]} {stage}" if digest else None


def planned_budgets(runs: Sequence[Run]) -> list[str | None]:
    """Return for each run the plan by which its length differs from that of other runs.

    Runs of one plan have different steps, but equal FLOPs or seconds. None for other runs.
    """
    equal_plans = set()
    for plan, members in runs_of_different_steps(runs).items():
        if not budget_problem(members):
            equal_plans.add(plan)
    budgets = []
    for run in runs:
        plan_of_run = plan_of(run)
        budgets.append(plan_of_run if plan_of_run in equal_plans else None)
    return budgets


def budget_notes(runs: Sequence[Run]) -> list[str]:
    """Return a note about each budget whose runs have different steps and unequal costs."""
    notes = []
    for plan, members in runs_of_different_steps(runs).items():
        flops = members[0].cfg.train.budget.flops
        name = plan if flops is None else f"train.budget.flops={flops:g}"
        problem = budget_problem(members)
        if problem and (flops is not None or have_steps_by_variant(members)):
            notes.append(f"Runs of {name} with different steps are not compared: {problem}.")
    return notes


def have_steps_by_variant(runs: Sequence[Run]) -> bool:
    """Return whether no two variants have equal steps, as in a study with a budget."""
    variants: dict[int, set[str]] = {}
    for run in runs:
        names_of_steps = variants.setdefault(run.cfg.steps, set())
        names_of_steps.add(run.variant)
    return all(len(names) == 1 for names in variants.values())


def runs_of_different_steps(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each plan whose runs have different steps."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        plan = plan_of(run)
        if plan is not None:
            members.setdefault(plan, []).append(run)
    different = {}
    for plan, planned in members.items():
        distinct_steps = {run.cfg.steps for run in planned}
        if len(distinct_steps) > 1:
            different[plan] = planned
    return different


def budget_problem(runs: Sequence[Run]) -> str:
    """Return the reason why runs of one plan do not have equal costs and warm-up; "" if equal."""
    # Warm-up is an equal share of all runs, except for the rounding to whole steps.
    shares = []
    steps_of_runs = []
    for run in runs:
        shares.append(run.cfg.optim.warmup_steps / run.cfg.steps)
        steps_of_runs.append(run.cfg.steps)
    lowest = min(shares)
    highest = max(shares)
    if highest - lowest >= 1 / min(steps_of_runs):
        ends = f"{percent(lowest)} and {percent(highest)}"
        return f"optim.warmup_steps is {ends} of the steps, not an equal share"
    is_flops_budget = runs[0].cfg.train.budget.flops is not None
    compared_runs = []
    for run in runs:
        # The config determines the FLOPs of runs that have not started.
        is_unknown = is_flops_budget and total_flops(run) is None
        if not run.diverged and not is_unknown:
            compared_runs.append(run)
    if is_flops_budget and not compared_runs:
        return ""
    problem = BUDGETS["flops"].inequality(runs_by_arm(compared_runs))
    if is_flops_budget or not problem:
        return problem
    # The plan of a study is its hash, which does not say whether the budget is in FLOPs or seconds.
    # The FLOPs of a run follow from its plan, but its seconds are known only at its end.
    finished = [run for run in compared_runs if run.summary is not None]
    problem_of_seconds = BUDGETS["seconds"].inequality(runs_by_arm(finished))
    return f"{problem}, and {problem_of_seconds}" if problem_of_seconds else ""


def runs_by_arm(runs: Sequence[Run]) -> Collection[list[Run]]:
    """Group runs of one plan: runs of an arm have one variant and equal steps."""
    arms: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        arm = (run.variant, run.cfg.steps)
        arms.setdefault(arm, []).append(run)
    return arms.values()


def without_length(values: dict[str, Any], plan: str | None) -> dict[str, Any]:
    """Replace the keys of a run's length in `values`, by config key, by the plan of a budget."""
    if plan is None:
        return values
    others = {name: value for name, value in values.items() if name not in LENGTH_KEYS}
    return {**others, "budget": plan}
