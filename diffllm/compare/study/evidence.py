"""The ended runs of a study, from which its verdict is computed."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffllm.compare.arms.comparability import HASH
from diffllm.compare.arms.heldout import thin_note
from diffllm.compare.arms.run import EVAL_LOSS, Run, load_run, run_value
from diffllm.compare.study.arms import RateRun, StudyArm, StudyRun, Texts, value_of
from diffllm.compare.study.declared_differences import settings_of
from diffllm.compare.study.file import LR_SENSITIVITY, OF_THE_SUMMARY, TASKS, Study
from diffllm.compare.study.planned_runs import (
    Planned,
    deciding_runs,
    is_ended,
    planned_by_name,
    strayed,
)
from diffllm.compare.study.positions import position_losses
from diffllm.compare.study.rates import choose_rates, grid_directories, rate_runs
from diffllm.compare.study.study_hash import config_digest, is_hashed, planned_digests, study_hash
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.core.console import track
from diffllm.core.errors import ConfigError
from diffllm.core.run_facts import facts_of
from diffllm.core.run_files import RunFile, finite, read_facts
from diffllm.metrics.table import metric_of

LOSS_METRICS = (LR_SENSITIVITY, "heldout_loss")
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

    def arm(self, study: Study, name: str, lr: float | None) -> StudyArm:
        """Return an arm of the study; `lr` is the learning rate that the grid chose, if any."""
        runs: list[StudyRun] = []
        missing: list[str] = []
        values: dict[int, float | None] = {}
        for seed in study.seeds:
            ended: list[StudyRun] = []
            is_complete = True
            for planned in deciding_runs(study, name, seed, lr):
                run = self.runs.get(planned.name)
                if run is None:
                    is_complete = False
                    missing.append(planned.name)
                else:
                    ended.append(run)
            runs += ended
            # A mean over a part of the learning rates would not be the study's metric.
            if is_complete:
                values[seed] = value_of(ended, study)
        return StudyArm(name, values, lr, runs, missing)


def read_evidence(study: Study, out: Path) -> Evidence:
    """Read the ended runs of a study from the directory `out`.

    Raises CheckpointError if a run is damaged, and ConfigError if a run lacks the study's metric.
    """
    rates: dict[str, RateRun] = {}
    marks: dict[str, str] = {}
    if study.lr:
        rates = rate_runs(out)
        for name, path in grid_directories(out).items():
            marks[name] = load_run_config(path).run.study or ""
    # The grid decides the learning rates of the compared runs, so it is read first.
    choices = choose_rates(study, rates)
    chosen_rates = {choice.arm: choice.lr for choice in choices}
    planned_runs = planned_by_name(study, chosen_rates)
    runs: dict[str, StudyRun] = {}
    digests = planned_digests(study)
    with track("reading runs", len(planned_runs)) as advance:
        for name, planned in planned_runs.items():
            if is_ended(out / name):
                run = load_run(out / name)
                digests[name] = config_digest(run.cfg, study)
                runs[name] = read_run(run, study, planned)
            advance(1)
    # A run of the grid is compared with the corpora of the compared runs, which are known only now.
    for choice in choices:
        corpora = {run.facts.corpus for run in runs.values() if run.arm == choice.arm}
        for planned in choice.runs:
            rate = rates.get(planned.name)
            if rate is None:
                continue
            path = out / planned.name
            text = grid_differences(path, load_run_config(path), planned, corpora)
            rates[planned.name] = replace(rate, strayed=text)
    return Evidence(runs, rates, marks, digests)


def grid_differences(
    path: Path, cfg: TrainConfig, planned: Planned, corpora: set[str | None]
) -> str:
    """Describe the differences of a run in the learning rate grid from its plan; "" if none.

    Args:
        path: run directory.
        cfg: saved config of the run.
        corpora: corpus hashes of the compared runs of the same arm.
    """
    text = strayed(path, cfg, planned, is_hashed)
    corpus = facts_of(read_facts(path)).corpus
    if not text and corpus and corpora and corpus not in corpora:
        text = f"its corpus is {corpus[:HASH]}, which no compared run of the arm has"
    return text


def read_run(run: Run, study: Study, planned: Planned) -> StudyRun:
    """Extract the measured values of an ended run.

    `planned` is the run's entry in the study's plan. Raises ConfigError if the run did not log the
    study's metric.
    """
    # Runs measure the held-out loss of documents once at the end; during training they log the loss
    # of a sample.
    logged = EVAL_LOSS if study.metric in LOSS_METRICS else study.metric
    curve = run.series(logged)
    place = f"arm {planned.arm}, seed {planned.seed}: {run.path}"
    needs_curve = any(rule.needs_curve for rule in study.rules)
    if needs_curve and not len(curve.tokens):
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
        strayed=strayed(run.path, run.cfg, planned, is_hashed),
        thin=thin_note([run]),
        training_flops=run.training_flops,
        train_seconds=run.train_seconds if study.profile else None,
        **metric_fields(run, study, place),
    )
    # Stored in values.json for its readers; a verdict computes these numbers again.
    reached = {}
    for rule in study.rules:
        if rule.reaches is not None:
            tokens, is_reached = values.first_reach(rule.reaches)
            reached[f"{rule.reaches:g}"] = [float(tokens), float(is_reached)]
    return replace(values, reached=reached)


def metric_fields(run: Run, study: Study, place: str) -> dict[str, Any]:
    """Return the fields of `StudyRun` that follow from the study's metric, without its curve.

    Raises ConfigError, with the text `place` in front, if the run did not measure the metric.
    """
    measured: dict[str, Any] = {"value": run.final_loss}
    if study.metric.startswith(TASKS):
        name = f"tasks_chance/{study.metric.removeprefix(TASKS)}"
        measured["chance"] = finite(run.last_value(name))
    # A diverged run has no value of any metric, even if the metric itself is finite.
    if run.final_loss is None:
        return measured
    if study.octave:
        losses = position_losses(run)
        if study.octave not in losses.positions:
            raise ConfigError(
                f"{place} has no held-out document with more than {study.octave:,} tokens; choose "
                "another metric"
            )
        measured |= losses._asdict()
        place_of_octave = losses.positions.index(study.octave)
        measured["value"] = losses.position_losses[place_of_octave]
        return measured
    if study.metric in LOSS_METRICS:
        if run.documents is not None:
            measured["texts"] = Texts.of(run.documents)
            measured["nats"] = [finite(x) for x in run.documents.nats]
        return measured
    number = final_value(run, study.metric)
    if number is None:
        file = RunFile.SUMMARY if study.metric in OF_THE_SUMMARY else RunFile.METRICS
        raise ConfigError(f"{place}/{file} has no {study.metric}; choose another metric")
    measured["value"] = finite(number)
    return measured


def final_value(run: Run, name: str) -> float | None:
    """Return the final value of metric `name`: NaN if not finite, None if it was not logged."""
    if run.summary and name in run.summary:
        number = finite(run.summary[name])
        return math.nan if number is None else number
    metric = None if name in OF_THE_SUMMARY else metric_of(name)
    if metric and metric.column:
        # The same value as in report.csv.
        return run_value(run, metric)
    return run.last_value(name)
