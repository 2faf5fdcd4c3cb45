"""Costs of a study: planned and measured costs of its arms, and hours to complete its runs."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from diffllm.compare.arms.budget import TOLERANCE
from diffllm.compare.arms.comparable import exact_text
from diffllm.compare.arms.directories import find_runs
from diffllm.compare.arms.sentences import MISSING, compact, percent, plural
from diffllm.compare.study.arms import StudyArm, StudyRun, runs_of
from diffllm.compare.study.file import TOKENS, Study
from diffllm.compare.study.planned_runs import (
    choose_from,
    config_of_planned,
    cost_of_step,
    deciding_runs,
    first_runs,
    is_ended,
)
from diffllm.compare.timing_profile import MACHINE, time_settings
from diffllm.config import TrainConfig
from diffllm.config.matching import totals
from diffllm.config.saved import load_run_config
from diffllm.core.errors import ConfigError, listed
from diffllm.core.printing import Table
from diffllm.metrics.records import finite, read_summary

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
    def hours(self) -> float | None:
        """Hours to complete all runs that have not ended, one after another; None if unknown."""
        return None if self.seconds is None else (self.runs - self.ended) * self.seconds / 3600


def costs(study: Study, out: Path, pilot: list[Path], assumed: float | None = None) -> list[Cost]:
    """Estimate the cost of each arm in each stage of a study.

    The time is the planned FLOPs divided by the median speed of the study's finished runs in `out`.
    If no run in `out` is finished, use the finished runs in `pilot` (directories or globs), or else
    the step times of the study's profile, without evaluations and checkpoints. With `assumed`
    FLOP/s, ignore finished runs and the profile, and add START_S per run. With data.mask_documents,
    FLOPs depend on the mean number of keys per attention query. If the config does not determine
    this number, use its median over the same finished runs.
    """
    stages = []
    for first in first_runs(study):
        if study.lr:
            stages.append(choose_from(study, first.arm, {}).runs)
        deciding = [deciding_runs(study, first.arm, seed, first.lr) for seed in study.seeds]
        stages.append([run for runs in deciding for run in runs])
    measured = speeds_of(out / run.name for run in chain.from_iterable(stages))
    if not measured and pilot:
        measured = speeds_of(find_runs(pilot).runs)
    visible_keys = [keys for _, keys in measured if keys]
    by_profile = not assumed and not measured and study.profile is not None
    results = []
    for runs in stages:
        first, cfg = runs[0], config_of_planned(runs[0])
        tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
        keys = cfg.visible_keys
        if keys is None and cfg.data.mask_documents and visible_keys:
            keys = min(statistics.median(visible_keys), (cfg.seq_len + 1) / 2)
        flops = tokens * totals(cfg.model, keys)["flops"]
        seconds = None
        if assumed:
            seconds = START_S + flops / assumed
        elif by_profile:
            seconds = cfg.steps * cost_of_step(study, first.arm)
        elif measured:
            seconds = flops / statistics.median([speed for speed, _ in measured])
        ended = sum(is_ended(out / run.name) for run in runs)
        results.append(
            Cost(first.stage, first.arm, len(runs), ended, tokens, flops, seconds, by_profile)
        )
    return results


def speeds_of(paths: Iterable[Path]) -> list[tuple[float, float | None]]:
    """Return the results of `speed_of` for the finished runs of `paths`."""
    speeds = []
    for path in paths:
        speed = speed_of(path)
        if speed is not None:
            speeds.append(speed)
    return speeds


def speed_of(path: Path) -> tuple[float, float | None] | None:
    """Return a run's training FLOPs per second, and the mean number of keys per attention query.

    The measured time includes evaluations and checkpoints. The number of keys is None if the run
    did not record it. Return None instead of a tuple if the run has not finished.
    """
    summary = read_summary(path) or {}
    seconds, tokens = finite(summary.get("seconds")), finite(summary.get("tokens"))
    if not seconds or not tokens:
        return None
    cfg, keys = load_run_config(path), finite(summary.get("visible_keys"))
    return tokens * totals(cfg.model, keys or cfg.visible_keys)["flops"] / seconds, keys


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
    results: list[Spending] = []
    if study.budget == TOKENS:
        return results
    for planned in first_runs(study):
        runs = [run for arm in arms if arm.label == planned.arm for run in arm.runs]
        mean = mean_cost(study, runs)
        cfg = config_of_planned(planned)
        tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
        cost = cfg.steps * cost_of_step(study, planned.arm)
        results.append(Spending(planned.arm, cfg.steps, tokens, cost, mean))
    return results


def spending_problems(study: Study, arms: Sequence[StudyArm] = ()) -> list[str]:
    """Return the reasons why the planned or measured costs of arms are unequal.

    Rounding to whole steps can make planned costs unequal. Times of another machine than that of
    the profile are not compared.
    """
    results = spendings(study)
    unit = "seconds of training steps" if study.profile else "training FLOPs"
    planned = {spending.arm: spending.planned for spending in results}
    problems = unequal_costs(f"planned {unit}", planned, "; use more steps")
    if problems or not results:
        return problems
    measured = {}
    unknown = []
    for arm in arms:
        runs = [run for run in arm.runs if not other_facts(study, run)]
        mean = mean_cost(study, runs)
        if mean is not None:
            measured[arm.label] = mean
        elif not all(run.diverged for run in runs):
            unknown.append(arm.label)
    problems = unequal_costs(f"measured {unit}", measured)
    if unknown:
        problems.append(f"budget: the {unit} of {listed(unknown)} are not recorded")
    return problems


def mean_cost(study: Study, runs: Sequence[StudyRun]) -> float | None:
    """Return the mean measured FLOPs or seconds of the runs that did not diverge.

    Return None if the cost of a run is unknown, or if all runs diverged.
    """
    field = "train_seconds" if study.profile else "training_flops"
    costs = []
    for run in runs:
        if not run.diverged:
            cost = getattr(run, field)
            if cost is None:
                return None
            costs.append(cost)
    return statistics.fmean(costs) if costs else None


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


def other_facts(study: Study, run: StudyRun) -> list[str]:
    """Return the facts in which a run differs from the machine of the profile, if there is one."""
    if study.profile is None:
        return []
    timed = study.profile.arm(run.arm).facts
    texts = []
    for name in MACHINE:
        value = exact_text(name, getattr(run.facts, name))
        timed_value = exact_text(name, getattr(timed, name))
        if value != timed_value:
            texts.append(f"{name} {value}, not {timed_value}")
    return texts


def machine_differences(study: Study, arms: Sequence[StudyArm]) -> list[str]:
    """Return the facts in which runs differ from the machine of the profile."""
    texts: dict[str, None] = {}
    for run in runs_of(arms):
        texts |= dict.fromkeys(other_facts(study, run))
    return list(texts)


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
    def amount(cost: float | None) -> str:
        if cost is None:
            return MISSING
        return f"{cost:,.2f} s" if study.profile else compact(cost)

    heads = ["arm", "steps", "tokens per run", f"planned {'time' if study.profile else 'FLOPs'}"]
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
    sentences = [
        f"Budget: {study.budget.seconds:g} seconds of training steps per run. The steps of each "
        f"arm were computed before training, by the step times in {study.budget.profile}.",
        f"Profile of {study.profile.date}: {profile_words(study)}.",
    ]
    if words := machine_differences(study, arms):
        runs = runs_of(arms)
        count = sum(bool(other_facts(study, run)) for run in runs)
        sentences.append(
            f"{count} of {plural(len(runs), 'run')} used another machine ({listed(words)}). The "
            "machine of the profile decides: the measured seconds of these runs are not compared."
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
