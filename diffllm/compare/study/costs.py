"""Costs of a study: planned and measured costs of its arms, and hours to complete its runs."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from diffllm.compare.arms.arm import runs_of
from diffllm.compare.arms.budget import COST_TOLERANCE, mean_cost
from diffllm.compare.arms.run_search import find_runs
from diffllm.compare.arms.sentences import MISSING, compact, percent, plural
from diffllm.compare.study.arms import StudyArm, StudyRun
from diffllm.compare.study.file import TOKENS, Study
from diffllm.compare.study.planned_runs import (
    Planned,
    config_of_planned,
    cost_of_step,
    deciding_runs,
    first_runs,
    is_ended,
)
from diffllm.compare.study.rates import choose_rate
from diffllm.compare.timing_profile import MACHINE
from diffllm.config.matching import totals
from diffllm.config.saved import load_run_config
from diffllm.core.errors import listed
from diffllm.core.printing import Table
from diffllm.core.run_files import finite, read_summary

START_S = 20.0
"""Seconds from the launch of a run to its first step; an assumption for GPUs, not measured."""


@dataclass(frozen=True)
class Cost:
    """Planned tokens, FLOPs and time of one arm in one stage of a study.

    `stage` is "rates" (grid of learning rates) or "deciding" (runs that the rules compare). `runs`
    is the number of planned runs, and `ended` is the number of these that have ended. `tokens`,
    `flops` and `seconds` refer to a single run. `seconds` is None if the speed is unknown.
    `by_profile`: whether `seconds` follows from the step times of the study's profile.
    """

    stage: str
    arm: str
    runs: int
    ended: int
    tokens: int
    flops: float
    seconds: float | None
    by_profile: bool = False

    @property
    def remaining(self) -> int:
        """Number of planned runs that have not ended."""
        return self.runs - self.ended

    @property
    def hours(self) -> float | None:
        """Hours to complete all runs that have not ended, one after another; None if unknown."""
        return None if self.seconds is None else self.remaining * self.seconds / 3600


def costs(study: Study, out: Path, pilot: list[Path], assumed: float | None = None) -> list[Cost]:
    """Estimate the cost of each arm in each stage of a study.

    The time is the planned FLOPs divided by the median speed of the study's finished runs in `out`.
    If no run in `out` is finished, use the finished runs in `pilot` (directories or globs), or else
    the step times of the study's profile, without evaluations and checkpoints. With `assumed`
    FLOP/s, ignore finished runs and the profile, and add START_S per run. With data.mask_documents,
    FLOPs depend on the mean number of keys per attention query. If the config does not determine
    this number, use its median over the same finished runs.
    """
    stages = planned_stages(study)
    speed, visible_keys = measured_speed(out / run.name for run in chain(*stages))
    if speed is None and pilot:
        speed, visible_keys = measured_speed(find_runs(pilot).runs)
    by_profile = not assumed and speed is None and study.profile is not None
    results = []
    for runs in stages:
        first = runs[0]
        cfg = config_of_planned(first)
        keys = cfg.visible_keys
        if keys is None and cfg.data.mask_documents and visible_keys:
            # Other runs can have longer sequences; a causal mask limits the mean of this arm.
            keys = min(visible_keys, (cfg.seq_len + 1) / 2)
        tokens = cfg.planned_tokens
        flops = tokens * totals(cfg.model, keys)["flops"]
        seconds = None
        if assumed:
            seconds = START_S + flops / assumed
        elif by_profile:
            seconds = cfg.steps * cost_of_step(study, first.arm)
        elif speed is not None:
            seconds = flops / speed
        ended = sum(is_ended(out / run.name) for run in runs)
        cost = Cost(
            stage=first.stage,
            arm=first.arm,
            runs=len(runs),
            ended=ended,
            tokens=tokens,
            flops=flops,
            seconds=seconds,
            by_profile=by_profile,
        )
        results.append(cost)
    return results


def planned_stages(study: Study) -> list[list[Planned]]:
    """Return the planned runs of each arm in each stage of a study."""
    stages = []
    for first in first_runs(study):
        if study.lr:
            # Without ended runs, the choice lists the grid of the study, without added rates.
            stages.append(choose_rate(study, first.arm, {}).runs)
        deciding: list[Planned] = []
        for seed in study.seeds:
            deciding += deciding_runs(study, first.arm, seed, first.lr)
        stages.append(deciding)
    return stages


def measured_speed(paths: Iterable[Path]) -> tuple[float | None, float | None]:
    """Return medians over finished runs: training FLOPs per second, and visible keys.

    The measured times include evaluations and checkpoints. Visible keys are the mean number of keys
    per attention query, of the runs that recorded this number. A median is None without values.
    """
    speeds = []
    visible_keys = []
    for path in paths:
        summary = read_summary(path) or {}
        seconds = finite(summary.get("seconds"))
        tokens = finite(summary.get("tokens"))
        if not seconds or not tokens:
            continue
        cfg = load_run_config(path)
        keys = finite(summary.get("visible_keys"))
        flops_per_token = totals(cfg.model, keys or cfg.visible_keys)["flops"]
        speeds.append(tokens * flops_per_token / seconds)
        if keys:
            visible_keys.append(keys)
    return (
        statistics.median(speeds) if speeds else None,
        statistics.median(visible_keys) if visible_keys else None,
    )


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
    results = []
    runs_by_arm = {arm.label: arm.runs for arm in arms}
    for planned in first_runs(study):
        cfg = config_of_planned(planned)
        cost = cfg.steps * cost_of_step(study, planned.arm)
        spending = Spending(
            arm=planned.arm,
            steps=cfg.steps,
            tokens=cfg.planned_tokens,
            planned=cost,
            measured=measured_cost(study, runs_by_arm.get(planned.arm, ())),
        )
        results.append(spending)
    return results


def measured_cost(study: Study, runs: Sequence[StudyRun]) -> float | None:
    """Return the mean FLOPs or seconds of the runs that did not diverge; None if unknown."""
    measured = []
    for run in runs:
        # A diverged run can have stopped before its last step.
        if not run.diverged:
            measured.append(run.train_seconds if study.profile else run.training_flops)
    return mean_cost(measured)


def spending_problems(study: Study, arms: Sequence[StudyArm] = ()) -> list[str]:
    """Return the reasons why the planned or measured costs of arms are unequal.

    Rounding to whole steps can make planned costs unequal. Times of another machine than that of
    the profile are not compared.
    """
    if study.budget == TOKENS:
        return []
    unit = "seconds of training steps" if study.profile else "training FLOPs"
    planned = {spending.arm: spending.planned for spending in spendings(study)}
    problems = unequal_costs(f"planned {unit}", planned, "; use more steps")
    if problems:
        return problems
    measured = {}
    unknown = []
    for arm in arms:
        runs = [run for run in arm.runs if not other_machine(study, [run])]
        mean = measured_cost(study, runs)
        has_values = any(not run.diverged for run in runs)
        if mean is not None:
            measured[arm.label] = mean
        elif has_values:
            unknown.append(arm.label)
    problems = unequal_costs(f"measured {unit}", measured)
    if unknown:
        problems.append(f"budget: the {unit} of {listed(unknown)} are not recorded")
    return problems


def unequal_costs(quantity: str, cost_by_arm: Mapping[str, float], advice: str = "") -> list[str]:
    """Return a message if the costs of arms differ by more than COST_TOLERANCE."""
    if len(cost_by_arm) < 2:
        return []
    excess = max(cost_by_arm.values()) / min(cost_by_arm.values()) - 1
    if excess <= COST_TOLERANCE:
        return []
    texts = [f"{compact(cost)} in {arm}" for arm, cost in cost_by_arm.items()]
    limit = percent(COST_TOLERANCE)
    return [
        f"budget: {quantity} per run differ by {percent(excess)}, more than {limit}: "
        f"{listed(texts)}{advice}"
    ]


def other_machine(study: Study, runs: Iterable[StudyRun]) -> list[str]:
    """Return the facts in which runs differ from the machine of the profile, if there is one."""
    texts = []
    if study.profile:
        for run in runs:
            timing = study.profile.arm(run.arm)
            texts += timing.machine_differences(run.facts)
    return list(dict.fromkeys(texts))


def spending_numbers(study: Study, arms: Sequence[StudyArm] = ()) -> dict[str, Any]:
    """Return the budget and the costs of each arm as plain values, for JSON."""
    numbers: dict[str, Any] = {
        "unit": study.budget if isinstance(study.budget, str) else "seconds",
        "arms": [vars(spending) for spending in spendings(study, arms)],
    }
    if study.profile and not isinstance(study.budget, str):
        baseline = study.profile.arms[study.profile.baseline]
        profile: dict[str, Any] = {
            "file": study.budget.profile,
            "date": study.profile.date,
        }
        for name in MACHINE:
            profile[name] = getattr(baseline.facts, name)
        spreads = {}
        for name in study.arms:
            spreads[name] = study.profile.arm(name).spread
        profile["spread"] = spreads
        numbers["seconds"] = study.budget.seconds
        numbers["profile"] = profile
        numbers["other_machine"] = other_machine(study, runs_of(arms))
    return numbers


def spending_table(study: Study, arms: Sequence[StudyArm] = ()) -> Table:
    def amount(cost: float | None) -> str:
        if cost is None:
            return MISSING
        return f"{cost:,.2f} s" if study.profile else compact(cost)

    unit = "time" if study.profile else "FLOPs"
    heads = ["arm", "steps", "tokens per run", f"planned {unit}"]
    has_runs = any(arm.runs for arm in arms)
    if has_runs:
        heads.append("measured")
    rows = []
    for spending in spendings(study, arms):
        length = [f"{spending.steps:,}", compact(spending.tokens)]
        row = [spending.arm, *length, amount(spending.planned)]
        if has_runs:
            row.append(amount(spending.measured))
        rows.append(row)
    return Table.of(heads, rows)


def budget_sentences(study: Study, arms: Sequence[StudyArm] = ()) -> list[str]:
    """Describe the budget, and its profile and machine; [] if the budget is in tokens."""
    if study.budget == TOKENS:
        return []
    if study.profile is None or isinstance(study.budget, str):
        return [
            f"Budget: the training FLOPs of the runs of {study.baseline}. The steps of each arm "
            "were computed before training."
        ]
    spreads = {}
    for name in study.arms:
        spreads[name] = study.profile.arm(name).spread
    noisiest = max(spreads, key=spreads.__getitem__)
    sentences = [
        f"Budget: {study.budget.seconds:g} seconds of training steps per run. The steps of each "
        f"arm were computed before training, by the step times in {study.budget.profile}.",
        f"Profile of {study.profile.date}: {study.profile.machine(study.arms)}; step times "
        f"of rounds differ by at most {percent(spreads[noisiest])} ({noisiest}).",
    ]
    runs = runs_of(arms)
    differences = other_machine(study, runs)
    if differences:
        count = 0
        for run in runs:
            count += bool(other_machine(study, [run]))
        sentences.append(
            f"{count} of {plural(len(runs), 'run')} used another machine ({listed(differences)}). "
            "The machine of the profile decides: the measured seconds of these runs are not "
            "compared."
        )
    return sentences
