"""Train one run, from a typed config to a summary."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.checkpoint.run_checkpoints import newest_text
from diffllm.config import TrainConfig
from diffllm.core.errors import UserError
from diffllm.core.printing import echo
from diffllm.core.run_files import RunFolder
from diffllm.core.standard_streams import unfailing
from diffllm.data.sequences import ignores_targets
from diffllm.data.tokenizer import Tokenizer
from diffllm.distributed.launcher import environment, keep_memory
from diffllm.distributed.stop import REQUEUE, StoppedEarly, StopRequest
from diffllm.distributed.world import join
from diffllm.metrics.sinks import check_installed
from diffllm.metrics.wandb_config import check_wandb
from diffllm.training.build import build
from diffllm.training.checks import check_named
from diffllm.training.claim import Claimed, claim
from diffllm.training.initial_values import fill
from diffllm.training.loop import train_loop
from diffllm.training.measure import Evaluation, Tasks, measure_documents
from diffllm.training.outputs import (
    Report,
    finish,
    give_up,
    open_outputs,
    sample,
    say_stopped,
)
from diffllm.training.preparation import prepare_data
from diffllm.training.process import Process, enter, leave, meet
from diffllm.training.run_directory import RunDirectory, choose_path, request_requeue
from diffllm.training.start import begin
from diffllm.training.state import decide_compile
from diffllm.training.summary import describe, headline, summarise

MakeTasks = Callable[[Tokenizer], Tasks]
"""Makes the run's tasks for a tokenizer; raises ConfigError if a task does not fit."""


class Outcome(NamedTuple):
    """Result of a launch: the summary of the run, or the signal that stopped the run.

    Exactly one of `summary` and `stopped` is set.
    """

    path: Path | None
    """The run directory; None if a signal came before the directory was chosen."""
    summary: dict[str, Any] | None = None
    """The content of summary.json; only "sample" may differ between ranks."""
    stopped: signal.Signals | None = None


def run(cfg: TrainConfig, make_tasks: MakeTasks | None, report: Report | None) -> Outcome:
    """Train, evaluate and save one run as `cfg` describes. Every process must call this.

    Without `make_tasks`, evaluation tasks are skipped. Without `report`, no report is written.
    Raises UserError if the run cannot start or fails.
    """
    cfg.check_world(environment()[1])
    check_named(cfg)
    check_installed(cfg.metrics)
    check_wandb(cfg.wandb)
    # Install signal handlers after `join`: Python handlers cannot run while `join` waits.
    world = join(cfg.distributed)
    stop = StopRequest()
    try:
        with unfailing():
            return in_process(cfg, enter(cfg, world, stop), make_tasks, report)
    except StoppedEarly as early:
        number: signal.Signals = early.args[0]
        if world.rank == 0:
            echo(f"stopped by {number.name} before the first step", flush=True)
            # A requeued run without a name would get a new directory.
            if number in REQUEUE and (cfg.run.dir or cfg.run.name):
                path = choose_path(cfg)
                path.mkdir(parents=True, exist_ok=True)
                request_requeue(path, number, None)
        return Outcome(None, stopped=number)
    finally:
        stop.close()


def in_process(
    cfg: TrainConfig, process: Process, make_tasks: MakeTasks | None, report: Report | None
) -> Outcome:
    directory: RunDirectory | None = None
    try:
        claimed = claim(cfg, process)
        directory = claimed.directory
        checkpoints = claimed.path / RunFolder.CHECKPOINTS
        process.stop.report_saved(partial(newest_text, checkpoints))
        if claimed.ended:
            outcome = Outcome(claimed.path, claimed.ended)
        else:
            outcome = train_claimed(cfg, process, claimed, make_tasks, report)
    except BaseException as error:
        leave(process, error, directory)
        raise
    leave(process, None, directory)
    return outcome


def train_claimed(
    cfg: TrainConfig,
    process: Process,
    claimed: Claimed,
    make_tasks: MakeTasks | None,
    report: Report | None,
) -> Outcome:
    device, data = prepare_data(cfg, process, claimed)
    state = begin(cfg, process, claimed, data)
    meet(cfg, process, device, claimed.path, state)
    process.watch.reached("the construction of the model")
    if device.type == "cpu":
        keep_memory()
    compile = decide_compile(cfg, device, state)
    document_end = data.manifest.eos_id if cfg.data.mask_documents else None
    t = build(cfg, device, document_end, ignores_targets(data, cfg.data), compile)
    origin = fill(t, process, claimed, data, state)
    tasks = make_tasks(data.tokenizer()) if make_tasks else None
    process.watch.reached("the text of the held-out sample")
    evaluation = Evaluation(t, data, tasks)
    facts = describe(cfg, t, data) | origin | {"wandb_id": state.wandb_id}
    process.display.print(headline(cfg, facts, data, claimed.path, state.step))
    out = open_outputs(cfg, process, claimed, state, facts)
    losses = None
    late_stop = None
    try:
        trained = train_loop(t, state, data, process, out, evaluation)
        if trained.diverged:
            process.display.print(
                f"diverged: {trained.diverged}; stopped after step {state.step}, saved; "
                "try a smaller optim.lr"
            )
        elif not trained.stopped:
            losses, late_stop = measure_documents(t, data, process)
    except UserError as error:
        give_up(claimed, out, error)
        raise
    finally:
        process.display.stop()
    stopped = trained.stopped or late_stop
    if stopped:
        say_stopped(cfg, process, claimed, out, state.step, stopped)
        return Outcome(claimed.path, stopped=stopped)
    text = sample(t, data)  # Every rank must call this: the model may be sharded.
    numbers = process.world.broadcast_from_rank0(
        "summary", lambda: summarise(t, state, data, trained, losses)
    )
    summary = {**numbers, "sample": text}
    finish(process, claimed, out, summary, losses, report)
    return Outcome(claimed.path, summary)
