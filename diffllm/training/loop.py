"""The optimizer step, and the loop around it: evaluation, logging, saving, stopping."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.checkpoint import Checkpointer
from diffllm.config import TrainConfig
from diffllm.data import Prepared, TrainLoader, heldout_batches, training_samples
from diffllm.data.sequences import Batch
from diffllm.distributed.consistency import check_tensors
from diffllm.distributed.failures import DataFailed, raise_together
from diffllm.distributed.fsdp import local
from diffllm.distributed.gradients import finish_gradients, norms
from diffllm.distributed.stop import Agreed, Agreement
from diffllm.distributed.watch import Watch
from diffllm.errors import DataError
from diffllm.evaluate import heldout_loss
from diffllm.metrics.diagnostics import chosen, expert_load, merge, probe_positions, reduce_stats
from diffllm.metrics.profiling import StepProfiler
from diffllm.metrics.sinks import Sinks
from diffllm.model.documents import moved
from diffllm.model.stats import Stats
from diffllm.model.transformer import TrainOutput, Transformer
from diffllm.optim import learning_rate, update
from diffllm.training.build import Training
from diffllm.training.record import Log, Record, StepResult
from diffllm.training.schedule import Due, due
from diffllm.training.state import LoopState, save

NOTHING = Due()
Tasks = Callable[[Transformer], dict[str, float]]
"""Measures a model on tasks and returns values by metric name. Every rank must call it."""
OVER_TARGETS = ("nll", "train/z_loss")
"""Losses that are means over targets; the others are over tokens."""


def train_step(t: Training, batches: Iterator[Batch], step: int, due: Due = NOTHING) -> StepResult:
    """Make one optimizer step over the global batch, unless the guard skips it.

    The host does not wait for the device. Every rank must call this.

    Args:
        batches: this rank's micro-batches, (inputs, targets) each (b, T) int64 on the CPU.
        step: optimizer steps made so far; decides the learning rate.
        due: the statistics to take in this step.
    """
    cfg, mesh, counted = t.cfg, t.meshes.dense, None
    if t.ignores_targets:
        own = list(islice(batches, t.micro_batches))
        batches, counted = iter(own), count_targets(own, t.device)
    done = forward_backward(t, batches, due, probe(t, step, due), counted)
    dist.all_reduce(done.losses)
    means = mean_losses(done, t.tokens, counted)
    grad_norms = finish_gradients(t.params, mesh, cfg.optim.clip_norm)
    skipped = t.guard.judge(means["nll"], grad_norms.total)
    if mesh.size(0) > 1:  # replicas sum norms of their own; rounding must not part them
        dist.all_reduce(skipped, dist.ReduceOp.MAX)
    before = [local(p).detach().clone() for p in t.params.values()] if due.update else None
    update(t.optimizer, learning_rate(cfg.optim, step, cfg.steps), skipped)
    t.weights.changed()
    t.optimizer.zero_grad(set_to_none=True)
    stats = reduce_stats(done.stats, t.micro_batches)
    if done.routed is not None:
        dist.all_reduce(done.routed)
        t.model.rebalance(done.routed, skipped)
        if due.statistics:
            stats |= {**expert_load(done.routed), "router_bias_range": t.model.router_bias_range()}
    update_norm = None
    if before is not None:
        torch._foreach_sub_(before, [local(p).detach() for p in t.params.values()])
        update_norm = norms(t.params, before, mesh).total
    share = None if counted is None else counted / t.tokens
    losses = weighted_losses(cfg, means)
    return StepResult(means["nll"], losses, skipped, grad_norms, update_norm, stats, share)


class Passed(NamedTuple):
    """Sums over a rank's micro-batches of one step, on the device."""

    names: tuple[str, ...]
    """Names of the losses."""
    losses: Tensor
    """Sum of each loss, (n,) float32."""
    routed: Tensor | None
    """Tokens that each expert got, (L, E) int64; None without experts."""
    stats: Stats
    """The statistics that are due, merged."""


def forward_backward(
    t: Training, batches: Iterator[Batch], due: Due, probe: Tensor | None, counted: Tensor | None
) -> Passed:
    """Run both passes of this rank's micro-batches; gradients are added up in the parameters.

    Args:
        probe: query positions of explicit maps, (N,) int64 on the device; None without a probe.
        counted: targets of the global batch that the loss is a mean over; None for all.
    """
    losses = torch.zeros((), device=t.device)
    routed = torch.zeros((), dtype=torch.int64, device=t.device)
    stats: Stats = {}
    for i in range(t.micro_batches):
        batch = next(batches)
        documents = t.documents(batch[0])
        inputs, targets = (part.to(t.device, non_blocking=True) for part in batch)
        t.weights.begin_micro_batch(last=i == t.micro_batches - 1)
        out = t.model(inputs, targets, diagnose=due.diagnose, documents=documents, probe=probe)
        scaled(t.cfg, out, counted).backward()
        parts = loss_parts(out)
        losses = losses + torch.stack(list(parts.values())).detach()
        routed = routed + out.routed.counts if out.routed else routed
        stats = merge(stats, chosen(out.stats, due.statistics, due.probes))
    return Passed(tuple(parts), losses, routed if out.routed else None, stats)


def probe(t: Training, step: int, due: Due) -> Tensor | None:
    """Draw the query positions of a probe, (N,) int64 on the device; None if none is due.

    A compiled model also probes when only statistics are due, so that one graph serves both.
    """
    if not (due.probes or (due.diagnose and t.compiled)):
        return None
    positions = probe_positions(t.cfg.diagnostics, t.cfg.seq_len, t.cfg.seed, step)
    return None if positions is None else moved(positions, t.device)


def count_targets(batches: Iterable[Batch], device: torch.device) -> Tensor:
    """Count the targets of the global batch that are not negative: an int64 scalar, at least 1.

    Every rank must call this, with its micro-batches of one step.
    """
    own = torch.stack([(targets >= 0).sum() for _, targets in batches]).sum()
    counted = moved(own, device)
    dist.all_reduce(counted)
    return counted.clamp_min(1)  # losses of no targets are 0, and 0 / 0 would be NaN


def scaled(cfg: TrainConfig, out: TrainOutput, counted: Tensor | None) -> Tensor:
    """Return a micro-batch's part of the step's objective, whose gradients ranks average.

    Args:
        counted: targets of the global batch that the loss is a mean over; None for all. The
            router's losses are means over all tokens, because all of them are routed.
    """
    over_tokens = dist.get_world_size() / (cfg.global_batch_size * cfg.seq_len)
    if counted is None:
        return out.objective * over_tokens
    over_counted = dist.get_world_size() / counted
    objective = out.objective * over_counted
    if out.routed:
        moe = cfg.model.moe
        routing = moe.balance_loss * out.routed.balance + moe.router_z_loss * out.routed.z
        objective = objective + routing * (over_tokens - over_counted)
    return objective


def loss_parts(out: TrainOutput) -> dict[str, Tensor]:
    """Return the unweighted losses of a micro-batch by name, each a sum."""
    parts = {"nll": out.loss.nll, "train/z_loss": out.loss.z}
    if out.routed:
        parts["train/balance_loss"] = out.routed.balance
        parts["train/router_z_loss"] = out.routed.z
    return parts


def mean_losses(done: Passed, tokens: int, counted: Tensor | None) -> dict[str, Tensor]:
    """Return the mean losses of the global batch by name, from sums over all ranks."""
    over: Tensor | int = tokens
    if counted is not None:
        whole = torch.full_like(counted, tokens)
        over = torch.stack([counted if name in OVER_TARGETS else whole for name in done.names])
    return dict(zip(done.names, (done.losses / over).unbind(), strict=True))


def weighted_losses(cfg: TrainConfig, means: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weighted terms of the objective besides the cross-entropy, by metric name.

    Args:
        means: unweighted scalars by metric name; those of the router only with experts.
    """
    weights = {
        "train/z_loss": cfg.model.z_loss,
        "train/balance_loss": cfg.model.moe.balance_loss,
        "train/router_z_loss": cfg.model.moe.router_z_loss,
    }
    return {name: w * means[name] for name, w in weights.items() if w and name in means}


class Outputs(NamedTuple):
    """Where a run writes."""

    sinks: Sinks | None
    """None on other ranks than 0."""
    checkpoints: Checkpointer
    profiler: StepProfiler


class Trained(NamedTuple):
    """How training ended."""

    stopped: signal.Signals | None
    """The signal that stopped it before the last step."""
    diverged: str | None
    """Why it counts as diverged."""
    speed: float | None
    """Median of the logged speeds in tokens per second."""


def train(
    t: Training,
    state: LoopState,
    data: Prepared,
    here: Any,
    out: Outputs,
    tasks: Tasks | None = None,
) -> Trained:
    """Train until cfg.steps, a signal, divergence, or data that cannot be read.

    However it ends, the last step is saved. Raises DataFailed on every rank if one of them cannot
    read its next batch, after saving.
    """
    cfg, watch, began = t.cfg, here.watch, time.perf_counter() - state.seconds
    loader = training_loader(t, data, state)
    here.display.start(state.step)
    record = Record(t, state, here.display, out.sinks)
    agreement = Agreement(here.stop, cfg.distributed.timeout)
    here.stop.defer()
    raise_together(read_ahead(loader, min(1, cfg.steps - state.step), watch))
    if agreement.delay:  # flags of this exchange are heard one step later
        exchange(agreement, out.checkpoints, loader, cfg.steps - state.step, watch)
    agreed, failure, diverged = Agreed(None, False, False), None, None
    while state.step < cfg.steps and not (agreed.stopping or agreed.failed or failure or diverged):
        step = state.step + 1
        now = due(cfg, step)
        watch.reached(f"step {step}")
        with out.profiler.step(step):
            result = train_step(t, loader, state.step, now)
        record.add(step, result)
        state.step = step
        agreed = exchange(agreement, out.checkpoints, loader, cfg.steps - step, watch)
        if now.check:
            check_tensors(t.tensors(), t.meshes.dense.size(1))
        values: dict[str, float] = {}
        if now.sample or now.tasks:
            with record.paused():
                values, failure = measure(t, data, tasks, now)
        log = to_log(t, loader, data, step) if now.log else None
        ends = bool(now.last or agreed.stopping or agreed.failed or failure)
        saves = ends or now.save or agreed.save
        if values or log or saves:  # a checkpoint holds the spike counts up to its step
            record.write(step, values, log)
        if log and state.spikes.longest_skip >= cfg.train.max_consecutive_skips:
            skips = state.spikes.longest_skip
            diverged = f"{skips} updates in a row were skipped ({record.last_values()})"
            state.spikes.forget_skips()
        if saves or diverged:
            state.data, state.seconds = loader.state_dict(), time.perf_counter() - began
            with record.paused():
                save(t, state, out.checkpoints, final=bool(ends or diverged))
    out.profiler.close()
    watch.reached(f"the end, after step {state.step}")
    loader.close()
    agreement.close()
    out.checkpoints.close()
    saved = f"; stopped after step {state.step}, saved"
    if failure:
        raise DataFailed(f"{failure}{saved}")
    if agreed.failed:
        raise_together(loader.failed, saved)
    stopped = None if diverged or state.step == cfg.steps else agreed.stopping
    return Trained(stopped, diverged, record.median_speed())


def read_ahead(loader: TrainLoader, steps: int, watch: Watch) -> DataError | None:
    """Read the batches of the next steps; return the error if one cannot be read."""
    with watch.waiting("a batch of the data loader"):
        return loader.read_ahead(steps)


def exchange(
    agreement: Agreement, checkpoints: Checkpointer, loader: TrainLoader, left: int, watch: Watch
) -> Agreed:
    """Read ahead, and agree with the other ranks on stopping, saving and failing.

    A failure to read is heard `agreement.delay` steps later, so read that many steps further.

    Args:
        left: the steps that are left to train.
    """
    error = read_ahead(loader, min(1 + agreement.delay, left), watch)
    return agreement.all_reduce_flags(save=checkpoints.due(), failed=error is not None)


def to_log(t: Training, loader: TrainLoader, data: Prepared, step: int) -> Log:
    """Collect what a logged step reports besides its result. Every rank must call this."""
    read = loader.consumed()
    params = [local(p).detach() for p in t.params.values()]
    lr = learning_rate(t.cfg.optim, step - 1, t.cfg.steps)
    param_norm = norms(t.params, params, t.meshes.dense).total
    return Log(lr, param_norm, read, data.bits_per_nat(read), loader.waited_s)


def training_loader(t: Training, data: Prepared, state: LoopState) -> TrainLoader:
    """This rank's batches, from where `state` stands."""
    cfg = t.cfg
    total = cfg.steps * cfg.global_batch_size
    loader = TrainLoader(
        training_samples(data, cfg.data, cfg.seq_len, cfg.seed, total),
        global_batch_size=cfg.global_batch_size,
        micro_batch_size=cfg.micro_batches(dist.get_world_size())[0],
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        num_workers=cfg.data.num_workers,
        prefetch_factor=cfg.data.prefetch_factor,
        pin_memory=t.device.type == "cuda",
    )
    if state.data:
        loader.load_state_dict(state.data)
    return loader


def measure(
    t: Training, data: Prepared, tasks: Tasks | None, due: Due
) -> tuple[dict[str, float], DataFailed | None]:
    """Measure the model on the held-out sample and on tasks, as far as they are due.

    Every rank must call this. Returns values by metric name, and the error, the same on every rank,
    if one of them cannot read its part of the sample.
    """
    values, failure = {}, None
    if due.sample:
        try:
            values = sample_losses(t, data)
        except DataFailed as error:
            failure = error
    if due.tasks and tasks:
        values |= tasks(t.model)
        t.weights.reshard()
    return values, failure


def sample_losses(t: Training, data: Prepared) -> dict[str, float]:
    """Compute `eval/loss` of the held-out sample in nats per token, and `eval/bits_per_byte` if the
    text is known; of a mixture also those of each source. Every rank must call this.

    The samples of all sources together have `eval.sequences` sequences.
    """
    found = {}
    for name, part, sequences in heldout_samples(t.cfg, data):
        end = f"/{name}" if name else ""
        found[f"eval/loss{end}"] = loss = sample_loss(t, part, sequences)
        if (bits := part.manifest.splits["heldout"].bits_per_byte(loss)) is not None:
            found[f"eval/bits_per_byte{end}"] = bits
    return found


def heldout_samples(cfg: TrainConfig, data: Prepared) -> list[tuple[str, Prepared, int]]:
    """List the samples that are evaluated during training: of all data under no name, then of each
    source of a mixture under its own, with how many sequences they have."""
    wanted = cfg.eval.sequences
    share = -(-wanted // max(1, len(data.sources)))
    return [("", data, wanted), *((name, of, share) for name, of in data.sources.items())]


def sample_loss(t: Training, data: Prepared, sequences: int) -> float:
    """Compute the loss of a held-out sample, in nats per token. Every rank must call this.

    Raises DataFailed on every rank if one cannot read its part.

    Args:
        sequences: at most this many, spread evenly over the split.
    """
    cfg = t.cfg
    tokens = data.manifest.splits["heldout"].tokens
    sequences = min(sequences, (tokens - 1) // cfg.seq_len)
    micro = cfg.micro_batches(dist.get_world_size())[0]
    rounds, shape = -(-sequences // (micro * dist.get_world_size())), (micro, cfg.seq_len)
    batches = sample_batches(cfg, data, sequences)
    loss, failure = heldout_loss(t.model, batches, shape, rounds, t.device, t.documents)
    t.weights.reshard()
    raise_together(failure)
    return loss


def sample_batches(cfg: TrainConfig, data: Prepared, sequences: int) -> Iterator[Batch]:
    """Yield this rank's micro-batches of a held-out sample; raises DataError while iterating."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro = cfg.micro_batches(world_size)[0]
    eos_id = data.manifest.eos_id if cfg.data.whole_documents else None
    stream = data.split("heldout")
    yield from heldout_batches(stream, cfg.seq_len, micro, sequences, rank, world_size, eos_id)
