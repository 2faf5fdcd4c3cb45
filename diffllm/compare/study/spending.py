"""Planned and measured costs of the arms of a study with a budget in FLOPs or seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diffllm.compare.arms.budgets import TOLERANCE
from diffllm.compare.arms.comparable import exact_text
from diffllm.compare.arms.sentences import (
    MISSING,
    compact,
    percent,
    plural,
)
from diffllm.compare.study.arms import StudyArm, StudyRun
from diffllm.compare.study.file import TOKENS, Study
from diffllm.compare.study.planned_runs import config_of_planned, cost_of_step, first_runs
from diffllm.compare.study.training_budget import SecondsBudget
from diffllm.compare.timing_profile import time_settings
from diffllm.config import TrainConfig
from diffllm.core.errors import ConfigError, listed
from diffllm.core.printing import Table
from diffllm.metrics.facts import machine_facts

MACHINE = (*machine_facts(), "compute_dtype")
"""Facts of a run in which it must agree with the profile, to compare times."""


@dataclass(frozen=True)
class Spending:
    """Planned length of the runs of an arm, and their costs in FLOPs or seconds per run."""

    arm: str
    steps: int
    tokens: int
    planned: float
    measured: float | None
    """Mean over the arm's runs that did not diverge; None if unknown."""


def spendings(study: Study, arms: Sequence[StudyArm] = ()) -> list[Spending]:
    """Return the costs of each arm; [] if the budget is in tokens."""
    if study.budget == TOKENS:
        return []
    runs = {arm.name: [run for run in arm.runs if not run.diverged] for arm in arms}
    results = []
    for planned in first_runs(study):
        cfg = config_of_planned(planned)
        results.append(
            Spending(
                arm=planned.arm,
                steps=cfg.steps,
                tokens=cfg.steps * cfg.global_batch_size * cfg.seq_len,
                planned=cfg.steps * cost_of_step(study, planned.arm),
                measured=measured_cost(study, runs.get(planned.arm, [])),
            )
        )
    return results


def measured_cost(study: Study, runs: Sequence[StudyRun]) -> float | None:
    name = "train_seconds" if isinstance(study.budget, SecondsBudget) else "training_flops"
    costs = [getattr(run, name) for run in runs]
    return fmean(costs) if costs and None not in costs else None


def planned_problems(study: Study) -> list[str]:
    """Return a message if the rounding to whole steps makes the planned costs unequal."""
    costs = {spending.arm: spending.planned for spending in spendings(study)}
    return unequal_costs(f"planned {unit(study)}", costs, "; use more steps")


def spending_problems(study: Study, arms: Sequence[StudyArm]) -> list[str]:
    """Return the reasons why the runs do not have equal costs.

    Times of another machine than that of the profile are not compared.
    """
    if problems := planned_problems(study):
        return problems
    if machine_differences(study, arms):
        return []
    finite_arms = {arm.name for arm in arms if arm.diverged < len(arm.runs)}
    costs: dict[str, float] = {}
    unknown = []
    for spending in spendings(study, arms):
        if spending.measured is not None:
            costs[spending.arm] = spending.measured
        elif spending.arm in finite_arms:
            unknown.append(spending.arm)
    problems = unequal_costs(f"measured {unit(study)}", costs)
    if unknown:
        problems.append(f"budget: the {unit(study)} of {listed(unknown)} are not recorded")
    return problems


def unequal_costs(what: str, costs: Mapping[str, float], advice: str = "") -> list[str]:
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


def unit(study: Study) -> str:
    return "seconds of training steps" if study.profile else "training FLOPs"


def machine_differences(study: Study, arms: Sequence[StudyArm]) -> list[str]:
    """Return the facts in which runs differ from the profile; [] without a profile."""
    if study.profile is None:
        return []
    words = []
    for name in MACHINE:
        pairs = set()
        for arm in arms:
            timed = exact_text(name, getattr(study.profile.arm(arm.name).facts, name))
            pairs |= {(exact_text(name, getattr(run.facts, name)), timed) for run in arm.runs}
        for value, timed_value in sorted(pairs):
            if value != timed_value:
                words.append(f"{name} {value}, not {timed_value}")
    return words


def check_profile_settings(study: Study, configs: Mapping[str, TrainConfig]) -> None:
    """Raise ConfigError if the profile was measured with other settings than those of an arm.

    Args:
        configs: config of a run, by arm.
    """
    if study.profile is None or isinstance(study.budget, str):
        return
    for arm, cfg in configs.items():
        timed = study.profile.arm(arm).settings
        for name, value in time_settings(cfg).items():
            # Older profiles do not have the keys of newer versions.
            if timed.get(name, value) != value:
                raise ConfigError(
                    f"arm {arm}: {name} is {value}, but budget.profile={study.budget.profile} was "
                    f"measured with {timed[name]}; measure the profile again with diffllm timing"
                )


def spending_numbers(study: Study, arms: Sequence[StudyArm] = ()) -> dict[str, Any]:
    """Return the budget and the costs of each arm as plain values, for JSON."""
    numbers: dict[str, Any] = {
        "unit": study.budget if isinstance(study.budget, str) else "seconds",
        "arms": [vars(spending) for spending in spendings(study, arms)],
    }
    if study.profile and not isinstance(study.budget, str):
        baseline = study.profile.arms[study.profile.baseline]
        numbers["seconds"] = study.budget.seconds
        numbers["profile"] = {
            "file": study.budget.profile,
            "date": study.profile.date,
            **{name: getattr(baseline.facts, name) for name in MACHINE},
            "spread": {name: study.profile.arm(name).spread for name in study.arms},
        }
        numbers["other_machine"] = machine_differences(study, arms)
    return numbers


def spending_table(study: Study, arms: Sequence[StudyArm] = ()) -> Table:
    heads = ["arm", "steps", "tokens per run", f"planned {short_unit(study)}"]
    results = spendings(study, arms)
    has_runs = any(arm.runs for arm in arms)
    if has_runs:
        heads.append("measured")
    rows = []
    for each in results:
        row = [each.arm, f"{each.steps:,}", compact(each.tokens), amount(study, each.planned)]
        if has_runs:
            row.append(amount(study, each.measured))
        rows.append(row)
    return Table.of(heads, rows)


def short_unit(study: Study) -> str:
    return "time" if study.profile else "FLOPs"


def amount(study: Study, cost: float | None) -> str:
    if cost is None:
        return MISSING
    return f"{cost:,.2f} s" if study.profile else compact(cost)


def budget_sentences(study: Study, arms: Sequence[StudyArm] = ()) -> list[str]:
    """Describe the budget, and its profile and machine; [] if the budget is in tokens."""
    if study.budget == TOKENS:
        return []
    if study.profile is None or isinstance(study.budget, str):
        return [
            f"Budget: the training FLOPs of the runs of {study.baseline}. The steps of each arm "
            "were computed before training."
        ]
    sentences = [
        f"Budget: {study.budget.seconds:g} seconds of training steps per run. The steps of each "
        f"arm were computed before training, by the step times in {study.budget.profile}.",
        f"Profile of {study.profile.date}: {profile_words(study)}.",
    ]
    if words := machine_differences(study, arms):
        sentences.append(
            f"The runs used another machine ({listed(words)}). The machine of the profile decides: "
            "only the planned seconds are compared, not the measured ones."
        )
    return sentences


def profile_words(study: Study) -> str:
    """Return the machine of the profile, and the largest spread between rounds over the arms."""
    profile = study.profile
    assert profile
    facts = profile.arms[profile.baseline].facts
    arms = {name: profile.arm(name) for name in study.arms}
    noisiest = max(arms, key=lambda name: arms[name].spread)
    ranks = plural(int(facts.ranks), "rank") if facts.ranks else "unknown world size"
    return (
        f"{facts.device or 'unknown device'}, {ranks}, "
        f"{plural(profile.threads, 'CPU thread')} per rank, "
        f"{facts.compute_dtype or 'unknown precision'}, "
        f"{'compiled' if facts.compiled else 'eager'}, torch {facts.torch or 'unknown'}; step "
        f"times of rounds differ by at most {percent(arms[noisiest].spread)} ({noisiest})"
    )
