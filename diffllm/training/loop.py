"""The training loop: steps, evaluation, logging, saving, stopping."""

import signal
import statistics
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from diffllm.core.errors import AgreedByAll, DataError
from diffllm.data.loader import TrainLoader
from diffllm.data.prepared import Prepared
from diffllm.distributed.consistency import check_tensors
from diffllm.distributed.stop import Agreed, Agreement, raise_together
from diffllm.distributed.watch import Watch
from diffllm.metrics.sinks import Sinks
from diffllm.training.build import Training
from diffllm.training.clock import Clock
from diffllm.training.measure import Evaluation
from diffllm.training.process import Process
from diffllm.training.profiling import StepProfiler
from diffllm.training.record import Record
from diffllm.training.state import LoopState, samples_of, save
from diffllm.training.step import due, train_step

if TYPE_CHECKING:
    from diffllm.checkpoint.writer import Checkpointer


class Outputs(NamedTuple):
    sinks: Sinks | None
    """None except on rank 0."""
    checkpoints: "Checkpointer"
    profiler: StepProfiler


class Trained(NamedTuple):
    stopped: signal.Signals | None
    """The signal that stopped training before the last step."""
    diverged: str | None
    speed: float | None
    """Median of the logged speeds in tokens per second."""


def train_loop(
    t: Training,
    state: LoopState,
    data: Prepared,
    process: Process,
    out: Outputs,
    evaluation: Evaluation,
) -> Trained:
    """Train until the last step, a stop signal, divergence or a read error; then save a checkpoint.

    `state` is updated in place. `process.stop` receives the stop signals. Raises AgreedByAll on
    every rank if a rank cannot read a batch or a held-out sample.
    """
    cfg = t.cfg
    watch = process.watch
    clock = Clock(t.device, state.seconds, state.train_seconds)
    loader = training_loader(t, data, state)
    process.display.start(state.step)
    record = Record(t, state, clock, process.display, out.sinks)
    agreement = Agreement(process.stop, cfg.distributed.timeout)
    # From now on, the loop saves a checkpoint before it stops. A second Ctrl-C still stops at once.
    process.stop.defer()
    # Every rank must reach each collective below at the same step. Conditions around collectives
    # may only depend on the config, on the step and on values that the ranks have agreed on.
    raise_together(read_ahead(loader, min(1, cfg.steps - state.step), watch))
    if agreement.delay:  # Fill the pipeline: flags arrive one step later.
        exchange(agreement, out.checkpoints, loader, cfg.steps - state.step, watch)
    agreed = Agreed(None, False, False)
    failure = None
    diverged = None
    while state.step < cfg.steps and not (agreed.stopping or agreed.failed or failure or diverged):
        step = state.step + 1
        watch.reached(f"step {step}")
        now = due(cfg, step)
        with out.profiler.step(step) if now.profile else nullcontext():
            result = train_step(t, loader, state.step, now)
        record.add(step, result)
        state.step = step
        state.tokens += t.tokens
        agreed = exchange(agreement, out.checkpoints, loader, cfg.steps - step, watch)
        if now.check:
            check_tensors(t.tensors(), t.meshes.dense.size(1))
        values: dict[str, float] = {}
        if now.sample or now.tasks:
            with clock.paused():
                values, failure = evaluation.measure(now)
        ends = bool(now.last or agreed.stopping or agreed.failed or failure)
        saves = ends or now.save or agreed.save
        # `write` updates the spike counts and the FLOPs, which a checkpoint contains.
        if values or now.log or saves:
            record.write(step, values, loader, now.log)
        if now.log and state.spikes.longest_skip >= cfg.train.max_consecutive_skips:
            diverged = skips_text(state, record)
            # The checkpoint contains the count: a resumed run would stop again at its first log.
            state.spikes.forget_skips()
        if saves or diverged:
            state.data = loader.state_dict()
            state.seconds = clock.wall_seconds
            state.train_seconds = clock.train_seconds
            with clock.paused():
                save(t, state, out.checkpoints, final=bool(ends or diverged))
    out.profiler.close()
    watch.reached(f"the end, after step {state.step}")
    loader.close()
    agreement.close()
    out.checkpoints.close()
    saved = f"; stopped after step {state.step}, saved"
    if failure:
        raise AgreedByAll(f"{failure}{saved}")
    if agreed.failed:
        raise_together(loader.failed, saved)
    # A signal during the last step stops the evaluation that follows, see `measure_documents`.
    stopped = None if diverged or state.step == cfg.steps else agreed.stopping
    speed = statistics.median(record.speeds) if record.speeds else None
    return Trained(stopped, diverged, speed)


def skips_text(state: LoopState, record: Record) -> str:
    """Return why a run with too many skipped updates diverged."""
    loss = record.latest["train/loss"]
    norm = record.latest["train/grad_norm"]
    return (
        f"{state.spikes.longest_skip} updates in a row were skipped "
        f"(the last at loss {loss:.4g}, gradient norm {norm:.4g})"
    )


def read_ahead(loader: TrainLoader, steps: int, watch: Watch) -> DataError | None:
    with watch.waiting("a batch of the data loader"):
        return loader.read_ahead(steps)


def exchange(
    agreement: Agreement,
    checkpoints: "Checkpointer",
    loader: TrainLoader,
    remaining_steps: int,
    watch: Watch,
) -> Agreed:
    """Load the batches of the next steps, and combine the flags of all ranks.

    Return the combined flags. With a world size above 1, the flags are those of the previous call.
    The flag `stopping` reports a stop signal, `save` a due checkpoint, and `failed` a failure to
    load batches. `remaining_steps` is the number of steps to train. Every rank must call this.
    """
    # The flags arrive `delay` steps later, and until then, steps must not fail: load their batches.
    error = read_ahead(loader, min(1 + agreement.delay, remaining_steps), watch)
    return agreement.all_reduce_flags(save=checkpoints.due(), failed=error is not None)


def training_loader(t: Training, data: Prepared, state: LoopState) -> TrainLoader:
    cfg = t.cfg
    group, groups = t.group
    loader = TrainLoader(
        samples_of(cfg, data, state.stage),
        global_batch_size=cfg.global_batch_size,
        micro_batch_size=t.micro_batch_size,
        rank=group,
        world_size=groups,
        num_workers=cfg.data.num_workers,
        prefetch_factor=cfg.data.prefetch_factor,
        pin_memory=t.device.type == "cuda",
    )
    if state.data:
        loader.load_state_dict(state.data)
    return loader
