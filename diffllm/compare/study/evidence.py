"""The ended runs of a study, from which its verdict is computed."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffllm.compare.arms.comparable import HASH
from diffllm.compare.arms.heldout import thin_note
from diffllm.compare.arms.run import EVAL_LOSS, Run, load_run, run_value
from diffllm.compare.study.arms import RateRun, StudyArm, StudyRun, Texts, value_of
from diffllm.compare.study.file import LR_SENSITIVITY, OF_THE_SUMMARY, TASKS, Study
from diffllm.compare.study.planned_runs import (
    RATES,
    ChosenRate,
    Planned,
    choose_rates,
    config_of_planned,
    deciding_runs,
    is_ended,
    rate_runs,
    strayed,
)
from diffllm.compare.study.positions import position_losses
from diffllm.compare.study.study_hash import config_digest, is_hashed, planned_digests, study_hash
from diffllm.compare.study.unequal import settings_of
from diffllm.config.similar import SimilarConfigs
from diffllm.core.errors import ConfigError
from diffllm.data.progress import track
from diffllm.metrics.facts import facts_of
from diffllm.metrics.records import finite, read_record
from diffllm.metrics.table import metric_of

LOSSES = (LR_SENSITIVITY, "heldout_loss")
"""Metrics whose value for a run is the held-out loss."""


@dataclass(frozen=True)
class Evidence:
    """Measured values of a study's ended runs; all dictionaries have run names as keys."""

    runs: dict[str, StudyRun]
    """The ended runs that the rules compare."""
    rates: dict[str, RateRun]
    """The ended runs in the learning rate grid."""
    rate_marks: dict[str, str]
    """`run.study` in the saved configs of the learning rate grid: study hash, stage and arm."""
    digests: dict[str, str]
    """`config_digest` of all runs that the rules compare, in the order of the study.

    The planned config is used for runs that have not ended, the saved config for ended runs.
    """

    def hash_of(self, study: Study) -> str:
        return study_hash(study, self.digests)

    def choices(self, study: Study) -> list[ChosenRate]:
        return choose_rates(study, self.rates)

    def arms(self, study: Study, choices: list[ChosenRate]) -> list[StudyArm]:
        rates = {choice.arm: choice.lr for choice in choices}
        return [self.arm(study, name, rates.get(name)) for name in study.arms]

    def arm(self, study: Study, name: str, lr: float | None) -> StudyArm:
        runs: list[StudyRun] = []
        missing: list[str] = []
        values: dict[int, float | None] = {}
        for seed in study.seeds:
            ended: list[StudyRun] = []
            planned_runs = deciding_runs(study, name, seed, lr)
            for planned in planned_runs:
                if planned.name in self.runs:
                    ended.append(self.runs[planned.name])
                else:
                    missing.append(planned.name)
            runs += ended
            if len(ended) == len(planned_runs):
                values[seed] = value_of(ended, study)
        return StudyArm(name, values, lr, runs, missing)


def read_evidence(study: Study, out: Path) -> Evidence:
    """Read the ended runs of a study from the directory `out`.

    Raises CheckpointError if a run is damaged, and ConfigError if a run lacks the study's metric.
    """
    configs = SimilarConfigs()
    rates: dict[str, RateRun] = {}
    marks: dict[str, str] = {}
    if study.lr:
        rates = rate_runs(out)
        for file in sorted((out / RATES).glob("*/config.yaml")):
            marks[f"{RATES}/{file.parent.name}"] = configs.load(file.parent).run.study or ""
    choices = choose_rates(study, rates)
    chosen_lr = {choice.arm: choice.lr for choice in choices}
    runs: dict[str, StudyRun] = {}
    digests = planned_digests(study)
    with track("reading runs", len(study.arms) * len(study.seeds)) as advance:
        for arm in study.arms:
            for seed in study.seeds:
                for planned in deciding_runs(study, arm, seed, chosen_lr.get(arm)):
                    if is_ended(out / planned.name):
                        run = load_run(out / planned.name, configs.load)
                        digests[planned.name] = config_digest(run.cfg, study)
                        runs[planned.name] = read_run(run, study, planned)
                advance(1)
    for planned in [run for choice in choices for run in choice.runs if run.name in rates]:
        path = out / planned.name
        text = strayed(path, configs.load(path), config_of_planned(planned), is_hashed)
        corpus = facts_of(read_record(path / "run.json") or {}).corpus
        corpora = {run.facts.corpus for run in runs.values() if run.arm == planned.arm}
        if not text and corpus and corpora and corpus not in corpora:
            text = f"its corpus is {corpus[:HASH]}, which no compared run of the arm has"
        rates[planned.name] = replace(rates[planned.name], strayed=text)
    return Evidence(runs, rates, marks, digests)


def read_run(run: Run, study: Study, planned: Planned) -> StudyRun:
    """Extract the measured values of an ended run.

    `planned` is the run's entry in the study's plan. Raises ConfigError if the run did not log the
    study's metric.
    """
    logged = EVAL_LOSS if study.metric in LOSSES else study.metric
    curve = run.series(logged)
    place = f"arm {planned.arm}, seed {planned.seed}: {run.path}"
    if any(rule.needs_curve for rule in study.rules) and not len(curve.tokens):
        raise ConfigError(f"{place}/metrics.jsonl has no values of {logged}; choose another metric")
    values = StudyRun(
        name=planned.name,
        arm=planned.arm,
        seed=planned.seed,
        lr=run.cfg.optim.lr,
        loss=run.final_loss,
        planned_tokens=run.planned_tokens,
        vocab_size=run.cfg.model.vocab_size,
        variant=run.variant,
        mark=run.cfg.run.study or "",
        facts=facts_of(run.facts),
        settings=settings_of(run.cfg, study.sets_rates, run.facts.get("previous")),
        tokens=curve.tokens.tolist(),
        values=[finite(number) for number in curve.values],
        plugin_code=run.plugin_code,
        strayed=strayed(run.path, run.cfg, config_of_planned(planned), is_hashed),
        thin=thin_note([run]),
        training_flops=run.training_flops,
        train_seconds=run.train_seconds if study.profile else None,
        **metric_fields(run, study, place),
    )
    levels = [rule.reaches for rule in study.rules if rule.reaches is not None]
    reached = {f"{level:g}": [*map(float, values.first_reach(level))] for level in levels}
    return replace(values, reached=reached)


def metric_fields(run: Run, study: Study, place: str) -> dict[str, Any]:
    """Return the fields of `StudyRun` that follow from the study's metric, without its curve.

    Raises ConfigError, with the text `place` in front, if the run did not measure the metric.
    """
    measured: dict[str, Any] = {"value": run.final_loss}
    if study.metric.startswith(TASKS):
        name = f"tasks_chance/{study.metric.removeprefix(TASKS)}"
        measured["chance"] = finite(run.last_value(name))
    if run.final_loss is None:
        return measured
    if study.octave:
        losses = position_losses(run)
        if study.octave not in losses.positions:
            raise ConfigError(
                f"{place} has no held-out document with more than {study.octave:,} tokens; choose "
                "another metric"
            )
        value = losses.position_losses[losses.positions.index(study.octave)]
        return {"value": value, **losses._asdict()}
    if study.metric in LOSSES:
        return {**measured, **losses_by_text(run)}
    number = final_value(run, study.metric)
    if number is None:
        file = "summary.json" if study.metric in OF_THE_SUMMARY else "metrics.jsonl"
        raise ConfigError(f"{place}/{file} has no {study.metric}; choose another metric")
    return {**measured, "value": finite(number)}


def losses_by_text(run: Run) -> dict[str, Any]:
    """Return the fields `texts` and `nats` of `StudyRun`, if the run has losses of documents."""
    if run.documents is None:
        return {}
    nats = [finite(x) for x in run.documents.nats]
    return {"texts": Texts.of(run.documents), "nats": nats}


def final_value(run: Run, name: str) -> float | None:
    """Return the final value of metric `name`: NaN if not finite, None if it was not logged."""
    if run.summary and name in run.summary:
        number = finite(run.summary[name])
        return math.nan if number is None else number
    metric = None if name in OF_THE_SUMMARY else metric_of(name)
    if metric and metric.column:
        return run_value(run, metric)
    return run.last_value(name)
