"""Outputs of a run: run.json, metric sinks, checkpoints, generated text and summary."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffllm.config import TrainConfig
from diffllm.config.changes import changes_text
from diffllm.core.errors import AgreedByAll, UserError
from diffllm.core.run_files import RunFile, RunFolder
from diffllm.data.prepared import Prepared
from diffllm.distributed.stop import REQUEUE
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.metrics.events import Event, EventsFile
from diffllm.metrics.history import history
from diffllm.metrics.sinks import MetricsFile, Sinks, TensorBoardFiles
from diffllm.metrics.steps import StepsFile
from diffllm.metrics.wandb_config import with_variables
from diffllm.metrics.wandb_events import CANCEL_TAG
from diffllm.metrics.wandb_run import WandbRun
from diffllm.model.generate import generate
from diffllm.training.build import Training
from diffllm.training.checks import learning_rate_jump
from diffllm.training.claim import Claimed
from diffllm.training.loop import Outputs
from diffllm.training.process import Process
from diffllm.training.profiling import StepProfiler
from diffllm.training.provenance import provenance
from diffllm.training.run_directory import RunDirectory, request_requeue
from diffllm.training.stalls import alert_stall
from diffllm.training.state import LoopState
from diffllm.training.summary import summary_text
from diffllm.training.wandb_description import (
    online_entry,
    record_wandb,
    wandb_arguments,
    wandb_ending,
    with_labels,
)

CANCELLED = f"the tag {CANCEL_TAG!r} in wandb"
SETTLE_S = 60
"""Seconds to wait for an unfinished checkpoint when a run fails."""
Report = Callable[[Path], str]
"""Writes the report of a run directory; returns its path or the reason why it is missing."""


def open_outputs(
    cfg: TrainConfig, process: Process, claimed: Claimed, state: LoopState, facts: dict[str, Any]
) -> Outputs:
    """Write run.json, and make the objects that write metrics, checkpoints and profiles.

    run.json contains `facts` and the result of `provenance()`. Only rank 0 writes metrics. Every
    rank must call this.
    """
    from diffllm.checkpoint.writer import Checkpointer  # A slow import: loads DCP.

    _, sinks = process.world.broadcast_and_keep(
        "outputs", lambda: (None, open_sinks(cfg, process, claimed, state, facts))
    )
    if sinks:
        process.watch.alert_by(partial(alert_stall, sinks.wandb, state))
    path = claimed.path
    checkpoints = Checkpointer(path / RunFolder.CHECKPOINTS, cfg.checkpoint, state.step)
    profiler = StepProfiler(
        cfg.profile, path / RunFolder.PROFILE, dist.get_rank(), process.display.print
    )
    return Outputs(sinks, checkpoints, profiler)


def open_sinks(
    cfg: TrainConfig, process: Process, claimed: Claimed, state: LoopState, facts: dict[str, Any]
) -> Sinks:
    directory = claimed.directory
    path = claimed.path
    assert directory
    if directory.changes:
        process.display.print(f"changed: {changes_text(directory.changes)}")
        jump = learning_rate_jump(cfg, directory.changes, state.step)
        if jump:
            process.display.print(f"warning: {jump}")
    resumes = claimed.checkpoint is not None
    was_online = bool((directory.facts or {}).get("wandb_online"))
    wandb_config = with_labels(with_variables(cfg.wandb), cfg, directory.facts, os.environ)
    facts = {**facts, **provenance(), "wandb_group": wandb_config.group}
    directory.describe({**facts, **online_entry(was_online)}, resumes)
    is_restart = directory.has_run  # Before the files of this start exist.
    events = EventsFile(path / RunFile.EVENTS, state.step)
    if is_restart:
        events.write(restart(directory, state))
    file = MetricsFile(path / RunFile.METRICS, state.step)
    steps = StepsFile(path / RunFile.STEPS, state.step)
    cancel = partial(process.stop.cancel, CANCELLED) if cfg.wandb.cancel_tag else None
    wandb = WandbRun(
        wandb_config, **wandb_arguments(cfg, path, facts, os.environ), run_id=state.wandb_id,
        history=history(path, state.step), on_cancel=cancel, was_online=was_online,
    )  # fmt: skip
    record_wandb(directory, wandb.id)
    tensorboard = None
    if cfg.metrics.tensorboard:
        tensorboard = TensorBoardFiles(path / RunFolder.TENSORBOARD, state.step)
    return Sinks(file, steps, events, wandb, tensorboard)


def restart(directory: RunDirectory, state: LoopState) -> Event:
    """Return the event of a process that resumes the run from `state`."""
    ranks = dist.get_world_size()
    detail = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if directory.changes:
        detail += f"; changed: {changes_text(directory.changes)}"
    return Event("restart", state.step, state.tokens, detail=detail)


def close_wandb(
    claimed: Claimed, wandb: WandbRun, summary: dict[str, Any] | None = None, exit_code: int = 0
) -> None:
    """Finish the wandb run, see `WandbRun.finish`, and record its id."""
    wandb.finish(summary, exit_code)
    if claimed.directory:
        record_wandb(claimed.directory, wandb.id)


def give_up(claimed: Claimed, out: Outputs, error: UserError) -> None:
    # The newest checkpoint may still be written in the background: let the write end.
    pending = out.checkpoints.pending
    if pending:
        with suppress(Exception):
            pending.result(SETTLE_S)
    if out.sinks:
        out.sinks.close()
        with suppress(Exception):
            close_wandb(claimed, out.sinks.wandb, exit_code=1)
    if isinstance(error, AgreedByAll):
        dist.barrier()  # A launcher kills rank 0 as soon as another rank exits.


def say_stopped(
    cfg: TrainConfig,
    process: Process,
    claimed: Claimed,
    out: Outputs,
    step: int,
    number: signal.Signals,
) -> None:
    """Print that signal `number` stopped the run after step `step`; close metrics files and wandb.

    After SIGTERM or SIGUSR1, write the file `requeue`, to let the launch script requeue the job.
    A cancelled run has no such file, and its summary in wandb has the reason.
    """
    cancelled = process.stop.cancelled
    if claimed.directory and number in REQUEUE and not cancelled:
        request_requeue(claimed.path, number, step)
    condition = "after you remove the tag, " if cancelled else ""
    command = "the same command"
    if not (cfg.run.dir or cfg.run.name):
        command += f" with run.dir={claimed.path}"
    process.display.print(
        f"stopped by {cancelled or number.name} after step {step}, saved; "
        f"{condition}{command} resumes the run"
    )
    if out.sinks:
        out.sinks.close()
        summary = {}
        if cancelled:
            # The next start of the run clears these values of the summary.
            reason = f"{cancelled} stopped the run after step {step}"
            summary = {"state": "cancelled", "reason": reason}
        close_wandb(claimed, out.sinks.wandb, summary)


def finish(
    process: Process,
    claimed: Claimed,
    out: Outputs,
    summary: dict[str, Any],
    losses: DocumentLosses | None,
    report: Report | None,
) -> None:
    """Write summary.json, the losses of held-out documents and the report; print the results.

    Do nothing on ranks other than 0.
    """
    if not claimed.directory or not out.sinks:
        return
    if summary["diverged"]:
        end = Event("diverged", summary["steps"], summary["tokens"], detail=str(summary["reason"]))
        out.sinks.events.write_end(end)
        out.sinks.wandb.add_event(end)
    out.sinks.close()
    if losses:
        losses.save(claimed.path, summary["steps"])
    claimed.directory.finish(summary)
    # The report reads summary.json and the losses, which exist now.
    report_text = report(claimed.path) if report else "off (run.report)"
    process.display.print(summary_text(claimed.directory.cfg, summary, claimed.path, report_text))
    close_wandb(claimed, out.sinks.wandb, *wandb_ending(summary))


def sample(t: Training, data: Prepared) -> str:
    """Generate text that continues data.sample_prompt; return the prompt and the new text.

    Without data.sample_prompt, the prompt is the beginning of the held-out split.
    """
    tokenizer = data.tokenizer()
    if t.cfg.data.sample_prompt:
        prompt = tokenizer.encode(t.cfg.data.sample_prompt)
    else:
        prompt = data.split("heldout").tokens(0, 16).tolist()
    prompt = prompt[: max(1, t.cfg.seq_len // 2)]
    # Ranks that share experts must call the model equally often. Rounding may differ between
    # ranks, so ranks may draw the end of text at different positions: no rank stops there.
    stop_token = tokenizer.eos_id if dist.get_world_size() == 1 else None
    # Each new token makes the cached keys longer: a compiled model would be compiled again.
    with torch.compiler.set_stance("force_eager"):
        (tokens,) = generate(
            t.model,
            [prompt],
            max_new_tokens=128,
            temperature=0.8,
            top_p=0.95,
            seed=t.cfg.seed,
            vocab_size=tokenizer.vocab_size,
            stop_token=stop_token,
            dtype=t.compute_dtype,
        )
    # Several ranks did not stop there, so remove the tokens after the end of text.
    if tokenizer.eos_id in tokens[len(prompt) :]:
        del tokens[tokens.index(tokenizer.eos_id, len(prompt)) + 1 :]
    return tokenizer.decode(tokens)
