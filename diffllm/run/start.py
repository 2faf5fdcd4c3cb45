"""One run, from a typed config to a summary."""

import contextlib
import hashlib
import os
import platform
import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diffllm.build import Training, build
from diffllm.checkpoint import Checkpointer
from diffllm.choices import WORTH_COMPILING, chosen_compile
from diffllm.config import TrainConfig
from diffllm.config.changes import described
from diffllm.config.saved import yaml_dict
from diffllm.data import Prepared, ignores_targets
from diffllm.distributed.consistency import check_tensors
from diffllm.distributed.launcher import environment, keep_memory
from diffllm.distributed.stop import REQUEUE, StoppedEarly, StopRequest
from diffllm.distributed.world import join
from diffllm.errors import AgreedByAll, UserError
from diffllm.evaluation.while_training import TasksWhileTraining, wanted
from diffllm.metrics.file import MetricsFile
from diffllm.metrics.profiling import StepProfiler
from diffllm.metrics.streams import unfailing
from diffllm.metrics.tensorboard import EventFiles, check_installed
from diffllm.metrics.wandb_run import WandbRun
from diffllm.model.choice import Choice
from diffllm.model.generate import generate
from diffllm.printing import echo
from diffllm.recorder import Outputs, Recorder
from diffllm.report import write_report
from diffllm.run.checks import check_named, learning_rate_jump
from diffllm.run.directory import choose_path, request_requeue
from diffllm.run.heldout import measure_documents
from diffllm.run.initial import match_initial_values
from diffllm.run.provenance import provenance
from diffllm.run.session import Session
from diffllm.run.summary import describe, headline, summarise, summary_text
from diffllm.run.weights import start_from
from diffllm.state import LoopState, restore
from diffllm.torch_versions import CPU
from diffllm.trainer import SkippedTooOften, train

SETTLE_S = 60
"""Seconds that a run which ends with an error waits for the checkpoint that is being written."""


class Outcome(NamedTuple):
    """The end of a start: one of both."""

    summary: dict[str, Any] | None = None
    """The content of summary.json, the same on all ranks, if the run is finished, or has stopped
    because it had diverged."""
    stopped: signal.Signals | None = None
    """The signal that stopped it."""


def run(cfg: TrainConfig) -> Outcome:
    """Prepare, build, train, report; in every process of a launch. Raises UserError if something
    outside the code is wrong; then nothing that was there is changed."""
    _, world_size, _ = environment()
    cfg.check_world(world_size)
    check_named(cfg)
    check_installed(cfg.metrics)
    wanted(cfg)
    world = join(cfg.distributed)  # no handler of ours could run while this waits
    stop = StopRequest()
    try:
        with unfailing(), Session(cfg, world, stop) as session:
            if not session.claim():
                return Outcome(session.summary)
            session.prepare()
            session.meet()
            return train_and_report(session)
    except StoppedEarly as early:
        (number,) = early.args
        if world.rank == 0:
            echo(f"stopped by {number.name} before the first step", flush=True)
            if number in REQUEUE and (cfg.run.dir or cfg.run.name):  # else nobody would find it
                choose_path(cfg).mkdir(parents=True, exist_ok=True)
                request_requeue(choose_path(cfg), number, None)
        return Outcome(stopped=number)
    finally:
        stop.close()


def train_and_report(session: Session) -> Outcome:
    """Build the model, train it to the end or to a signal, and tell what came of it."""
    cfg, state, data, watch = session.cfg, session.state, session.data, session.watch
    watch.reached("the building of the model")
    document_end = data.manifest.eos_id if cfg.data.mask_documents else None
    if session.device.type == "cpu":
        keep_memory()
    compile = compiling(cfg, session.device, state)
    t = build(cfg, session.device, document_end, ignores_targets(data, cfg.data), compile)
    factors = weights = None
    if session.checkpoint:
        watch.reached(f"the reading of {session.checkpoint.name}")
        restore(t, state, session.checkpoint, session.saved_ranks)
    elif session.weights:
        watch.reached(f"the reading of {session.weights}")
        weights = start_from(t, session.weights)
    else:
        factors = match_initial_values(t, data, session.world)
    check_tensors(t.tensors(), t.meshes.dense.size(1))
    tasks = TasksWhileTraining(cfg, data.tokenizer()) if cfg.eval.suites else None
    facts = describe(cfg, t, data)
    if factors:
        facts["init_match"] = factors
    if weights:
        facts["weights"] = weights
    session.display.print(headline(cfg, facts, data, session.path, state.step))
    _, outputs = session.world.broadcast_and_keep(
        "outputs", lambda: (None, open_outputs(session, facts))
    )
    recorder = Recorder(t, state.spikes, session.display, outputs)
    checkpointer = Checkpointer(session.path / "checkpoints", cfg.checkpoint, state.step)
    stopped = losses = diverged = None
    try:
        profiler = StepProfiler(
            cfg.profile, session.path / "profile", dist.get_rank(), session.display.print
        )
        stopped = train(
            t, state, data, recorder, checkpointer, profiler, session.stop, watch, tasks
        )
        if not stopped:
            losses, stopped = measure_documents(session, t)
    except SkippedTooOften as skipped:
        (diverged,) = skipped.args
        session.display.print(
            f"diverged: stopped after step {state.step}, saved: {diverged}; a smaller optim.lr, "
            "other data or train.skip_step=off would go another way"
        )
    except UserError as error:
        checkpointer.settle(SETTLE_S)
        if outputs:
            outputs.close()
            outputs.wandb.finish(exit_code=1)
        if isinstance(error, AgreedByAll):
            dist.barrier()  # a launcher ends rank 0 as soon as another rank has ended
        raise
    finally:
        session.display.stop()
    if stopped:
        say_stopped(session, stopped, outputs)
        return Outcome(stopped=stopped)
    text = sample(t, data)
    summary = session.world.broadcast_from_rank0(
        "summary", lambda: summarise(cfg, state, data, recorder, losses, diverged)
    )
    finished = {**summary, "sample": text}
    if session.directory and outputs:
        outputs.close()
        if losses:
            losses.save(session.path, state.step)
        session.directory.finish(finished)
        report = report_on(session.path) if cfg.run.report else "off (run.report)"
        session.display.print(summary_text(cfg, summary, session.path, text, report))
        outputs.wandb.finish(summary)
    return Outcome(finished)


def compiling(cfg: TrainConfig, device: torch.device, state: LoopState) -> Choice:
    """Decide whether the run compiles, and record it in `state`. Every rank must call it.

    All variants of one shape get the same choice, also where their FLOPs differ.
    """
    model, tokens = cfg.model, cfg.steps * cfg.global_batch_size * cfg.seq_len
    weights = 12 * model.n_layers * model.dim**2 + model.vocab_size * model.dim  # about
    flops = 6 * tokens * weights / dist.get_world_size()
    if device.type == "cpu" and (cfg.compile or state.compiled or flops >= WORTH_COMPILING):
        keep_compiled_code()
    choice = chosen_compile(cfg.compile, device, flops, state.compiled)
    everywhere = torch.tensor(int(choice.value), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if choice.value and not everywhere:
        choice = Choice(False, "torch.compile fails on another rank")
    if cfg.compile is not None or state.compiled is None:
        state.compiled = choice.value
    return choice


def keep_compiled_code() -> None:
    """Let Inductor keep compiled code in the user's cache, which survives a restart of the machine.

    Other users may share data.cache_dir, and Inductor runs the code that it finds. Nodes that share
    a home directory may have different CPUs, so the code of each CPU type has its own folder.
    """
    # The home directory may be missing or not writable.
    with contextlib.suppress(OSError, RuntimeError):
        cpu = hashlib.sha256(f"{platform.machine()} {sorted(CPU.items())}".encode()).hexdigest()
        folder = Path("~/.cache/diffllm").expanduser() / f"inductor-{cpu[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def open_outputs(session: Session, facts: dict[str, Any]) -> Outputs:
    """Describe the run on disk and in wandb, and open what its metrics go to; on rank 0 alone.

    Raises CheckpointError where a file cannot be written.
    """
    cfg, directory, state = session.cfg, session.directory, session.state
    assert directory
    if directory.changes:
        session.display.print(f"changed: {described(directory.changes)}")
        if jump := learning_rate_jump(cfg, directory.changes, state.step):
            session.display.print(f"warning: {jump}")
    facts = {**facts, **provenance()}
    directory.describe(facts, continues=session.checkpoint is not None)
    config = {**yaml_dict(cfg), **facts}
    file = MetricsFile(session.path / "metrics.jsonl", state.step)
    wandb = WandbRun(
        cfg.wandb, session.path, cfg.run.choices, cfg.run.sweep, config, state.wandb_id
    )
    state.wandb_id = wandb.id
    events = None
    if cfg.metrics.tensorboard:
        events = EventFiles(session.path / "tensorboard", state.step)
    return Outputs(file, wandb, events)


def say_stopped(session: Session, number: signal.Signals, outputs: Outputs | None) -> None:
    """End a run that a signal has stopped: it is saved, and a scheduler may requeue it."""
    step, path = session.state.step, session.path
    if session.directory and number in REQUEUE:
        request_requeue(path, number, step)
    named = session.cfg.run.dir or session.cfg.run.name
    with_name = "" if named else f" with run.dir={path}"
    session.display.print(
        f"stopped by {number.name} after step {step}, saved; the same command{with_name} continues"
    )
    if outputs:
        outputs.close()
        outputs.wandb.finish({})


def report_on(path: Path) -> str:
    """Write the run's report; return its path, or the reason why there is none. Never raises."""
    try:
        return str(write_report([path])[0])
    except Exception as error:
        return f"not written: {error!r}"


def sample(t: Training, data: Prepared) -> str:
    """A continuation of data.sample_prompt, or of the held-out split's first tokens."""
    tokenizer = data.tokenizer()
    if t.cfg.data.sample_prompt:
        prompt = tokenizer.encode(t.cfg.data.sample_prompt)
    else:
        prompt = data.split("heldout").tokens(0, 16).tolist()
    prompt = prompt[: max(1, t.cfg.seq_len // 2)]
    # Ranks that share out experts call the model together. Rounding may differ with what else is in
    # a product, so one could draw the end of text before another: none stops there.
    together = dist.get_world_size() > 1
    with torch.compiler.set_stance("force_eager"):
        (tokens,) = generate(
            t.model,
            [prompt],
            max_new_tokens=128,
            temperature=0.8,
            top_p=0.95,
            seed=t.cfg.seed,
            vocab_size=tokenizer.vocab_size,
            stop_token=None if together else tokenizer.eos_id,
            dtype=t.compute_dtype,
        )
    if tokenizer.eos_id in tokens[len(prompt) :]:
        del tokens[tokens.index(tokenizer.eos_id, len(prompt)) + 1 :]
    return tokenizer.decode(tokens)
