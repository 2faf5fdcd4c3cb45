"""Measure the step times of several arms in turns.

Each turn is a normal run of `diffllm train`, because a second training loop could have other costs.
The speed of a busy or throttled machine changes. The runs of the arms alternate, so that all arms
meet fast and slow times: A, B, C in odd rounds and C, B, A in even rounds.
"""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from diffllm.compare.arms.sentences import short
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import config_of_planned, errors_of_arm, first_runs
from diffllm.compare.sweep.cluster import ranks_of_runs
from diffllm.compare.sweep.command import join_ranks, run_here
from diffllm.compare.sweep.job import Ending, Job
from diffllm.compare.sweep.names import name_run
from diffllm.compare.sweep.runs import (
    ConfiguredRun,
    configured_runs,
    experiment_words,
    keys_of_sweep,
    split_overrides,
)
from diffllm.compare.timing_profile import (
    PROFILE_FORMAT,
    ArmTiming,
    Blocks,
    TimingProfile,
    time_settings,
)
from diffllm.config.compose import LENGTHS
from diffllm.config.words import typed_override
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.keys import declaration_of, declarations
from diffllm.core.printing import echo
from diffllm.core.run_facts import RunFacts, facts_of
from diffllm.core.run_files import RunFile, read_ending, read_facts, stopped_text
from diffllm.distributed.launcher import stopped_status
from diffllm.metrics.steps import read_steps
from diffllm.training.build import planned_compile
from diffllm.training.memory import check_memory

BLOCK_STEPS = 5
"""Most steps of a block, which has one measured time."""


class Turns(NamedTuple):
    """Number of rounds, each with one turn per arm, and of training steps in a turn.

    The steps form blocks, because the time of a single step is only known if it is logged, and
    logging adds time. The blocks of the warm-up are not timed.
    """

    rounds: int
    warmup_blocks: int
    timed_blocks: int
    block_steps: int

    @classmethod
    def of(cls, rounds: int, warmup_steps: int, timed_steps: int) -> "Turns":
        """Round both numbers of steps up to whole blocks."""
        block = min(BLOCK_STEPS, timed_steps)
        return cls(
            rounds=rounds,
            warmup_blocks=math.ceil(warmup_steps / block),
            timed_blocks=math.ceil(timed_steps / block),
            block_steps=block,
        )

    @property
    def warmup_steps(self) -> int:
        return self.warmup_blocks * self.block_steps

    @property
    def timed_steps(self) -> int:
        return self.timed_blocks * self.block_steps

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.timed_steps


class Measurement(NamedTuple):
    """Result of one turn: its blocks, facts of the run, and CPU threads per rank."""

    blocks: Blocks
    facts: RunFacts
    threads: int


def arms_of_study(study: Study) -> dict[str, ConfiguredRun]:
    """Return the arms of a study, each with its first seed and learning rate."""
    return {run.arm: ConfiguredRun(run.words, config_of_planned(run)) for run in first_runs(study)}


def arms_of_sweep(words: list[str]) -> dict[str, ConfiguredRun]:
    """Return the runs of the sweep with the overrides `words`, each with its first seed, by name.

    Raises ConfigError if the overrides or a config are invalid.
    """
    overrides, launcher = split_overrides([*experiment_words(words), *words])
    if launcher:
        raise ConfigError(f"{launcher[0]}: timing measures the machine of this command; remove it")
    swept_runs = configured_runs(overrides)
    declared = declarations(swept_runs[0].cfg)
    keys = []
    for key in keys_of_sweep(overrides):
        if "seed" not in declaration_of(key, declared).kinds:
            keys.append(key)
    arms: dict[str, ConfiguredRun] = {}
    for run in swept_runs:
        arms.setdefault(name_run(run.cfg, keys or ["attention"]), run)
    return arms


def turn_words(arm: ConfiguredRun, turns: Turns, world_size: int) -> list[str]:
    """Return the overrides of a turn: the arm's overrides, with few steps and little other work.

    The length of the arm's config decides about torch.compile, because a turn is a short run. Steps
    are logged at the end of the warm-up and of each block.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compiles = planned_compile(arm.cfg, device, world_size).value
    settings = {
        "steps": turns.steps,
        "log_interval": turns.block_steps,
        "optim.warmup_steps": turns.steps,
        "diagnostics.interval": 0,
        "diagnostics.probe_interval": 0,
        "eval.interval": turns.steps,
        "eval.sequences": 1,
        "eval.tokens": 1,
        "eval.suites": "[]",
        "checkpoint.interval": turns.steps,
        "profile.steps": "[]",
        "metrics.tensorboard": "false",
        "wandb.mode": "disabled",
        "run.report": "false",
        "compile": str(compiles).lower(),
    }
    words = []
    for word in arm.words:
        key = word.partition("=")[0].lstrip("+~")
        if key not in (*settings, *LENGTHS) and not key.startswith("run."):
            words.append(word)
    return [*words, *(f"{key}={value}" for key, value in settings.items())]


def time_arms(
    choose: Callable[[], dict[str, ConfiguredRun]], turns: Turns, out: Path, added: list[str]
) -> tuple[int, TimingProfile | None]:
    """Train the arms in turns and return their step times. Every rank must call this.

    The runs are in a temporary directory next to `out`, and are deleted after each turn. Print one
    line per turn. Raises ConfigError if a config is invalid or a run fails.

    Args:
        choose: returns the arms by name; called on rank 0.
        out: path of the profile, which the caller writes.
        added: plugins and --config-dir options for the command lines of the runs.

    Returns:
        The exit status and, on rank 0, the profile. If a signal stopped the runs, the status is the
        result of `stopped_status`, and there is no profile.
    """
    world = join_ranks()
    measurements: defaultdict[str, list[Measurement]] = defaultdict(list)
    with ExitStack() as stack:

        def begin() -> tuple[list[dict[str, Any]], dict[str, ConfiguredRun]]:
            arms = choose()
            check_arms(arms, world.size)
            words = {}
            for name, arm in arms.items():
                words[name] = turn_words(arm, turns, world.size)
            # Only rank 0 calls this function, so only rank 0 deletes the directory at the end.
            directory = Path(stack.enter_context(directory_for_runs(out)))
            return plan_turns(words, turns.rounds, directory, added), arms

        planned, arms = world.broadcast_and_keep("timing", begin)
        for job_fields in planned:
            job = Job(**job_fields)
            if world.rank == 0:
                echo(f"turn {job.number} of {job.total}: {job.name}: ", end="", flush=True)
            stopped, endings = run_here([job], world)
            # Rank 0 decides for all ranks: a signal may have reached only some of the ranks. A rank
            # that left the loop alone would make the others wait.
            result = partial(measure_turn, job, endings[job.name], turns, stopped)
            stopped, measurement = world.broadcast_and_keep(f"turn/{job.number}", result)
            if stopped:
                return stopped_status(stopped), None
            if measurement:
                measurements[job.group].append(measurement)
    return 0, profile_of(arms, measurements, turns) if arms else None


def check_arms(arms: Mapping[str, ConfiguredRun], world_size: int) -> None:
    _, ranks_here = ranks_of_runs(None, world_size)
    for name, arm in arms.items():
        with errors_of_arm(name):
            arm.cfg.check_world(world_size)
            check_memory(arm.cfg, world_size, ranks_here)


def directory_for_runs(out: Path) -> "TemporaryDirectory[str]":
    """Create a directory next to `out`; raises ConfigError if `out` cannot be written later."""
    if out.is_dir():
        raise ConfigError(f"out={out} is a directory; choose another out=FILE")
    try:
        return TemporaryDirectory(prefix=".timing-", dir=out.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"out={out} cannot be written: {error.strerror}; choose another out=FILE"
        ) from None


def plan_turns(
    words: Mapping[str, list[str]], rounds: int, directory: Path, added: list[str]
) -> list[dict[str, Any]]:
    """Return the keyword arguments of `Job` for each turn.

    `words` are the overrides of a turn by arm. The field `group` of a job is its arm.
    """
    planned: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        names = list(words)
        # The order of even rounds is reversed, so that a machine that slows down steadily affects
        # all arms equally.
        if number % 2 == 0:
            names.reverse()
        for name in names:
            index = len(planned) + 1
            path = directory / f"turn-{index}"
            run_dir = typed_override("run.dir", str(path))
            job = Job(
                number=index,
                total=len(words) * rounds,
                name=f"{name}, round {number}",
                path=str(path),
                steps=0,  # No remaining time is estimated.
                flops_of_step=0.0,
                words=[*added, *words[name], run_dir],
                finished=False,
                group=name,
                quiet=True,
            )
            planned.append(vars(job))
    return planned


def measure_turn(
    job: Job, ending: Ending, turns: Turns, stopped: int
) -> tuple[int, Measurement | None]:
    """Print and return the result of a turn, and `stopped`, the signal that stopped it (0: none).

    A stopped turn has no result.
    """
    if stopped:
        echo("stopped", flush=True)
        return stopped, None
    measurement = measure(job, ending, turns)
    echo(f"{short(1e3 * min(measurement.blocks), 4)} ms per step", flush=True)
    return 0, measurement


def measure(job: Job, ending: Ending, turns: Turns) -> Measurement:
    """Read the result of a finished turn, and delete its run.

    Raises ConfigError if the run failed or diverged.
    """
    run = Path(job.path)
    try:
        summary = read_ending(run)
        if ending.state != "finished" or summary is None:
            raise ConfigError(f"{job.name}: {ending.state}, {ending.reason}")
        if summary.get("stopped"):
            raise ConfigError(f"{job.name}: diverged, {stopped_text(summary)}")
        seconds = read_steps(run / RunFile.STEPS)["train_seconds"]
        if len(seconds) < turns.steps:  # for example, after the disk was full
            raise CheckpointError(
                f"{run / RunFile.STEPS} has {len(seconds)} of {turns.steps} steps"
            )
        record = read_facts(run)
    except CheckpointError as error:
        raise ConfigError(f"{job.name}: {error}") from error
    # The device has finished its work only at logged steps, which end the blocks.
    ends = seconds[turns.warmup_steps - 1 :: turns.block_steps]
    blocks = np.diff(ends) / turns.block_steps
    threads = record["environment"]["threads"]
    shutil.rmtree(run, ignore_errors=True)
    return Measurement(blocks.tolist(), facts_of(record), threads)


def profile_of(
    arms: Mapping[str, ConfiguredRun], measurements: Mapping[str, list[Measurement]], turns: Turns
) -> TimingProfile:
    timings = {}
    for name, arm in arms.items():
        timings[name] = ArmTiming(
            variant=arm.cfg.resolved.choices["attention"],
            overrides=arm.words,
            settings=time_settings(arm.cfg),
            facts=measurements[name][-1].facts,
            tokens_per_step=arm.cfg.global_batch_size * arm.cfg.seq_len,
            block_seconds=[measurement.blocks for measurement in measurements[name]],
        )
    return TimingProfile(
        format=PROFILE_FORMAT,
        date=time.strftime("%Y-%m-%d"),
        threads=max(results[-1].threads for results in measurements.values()),
        warmup_steps=turns.warmup_steps,
        timed_steps=turns.timed_steps,
        arms=timings,
    )
