"""The optimizer step, and the loop around it: evaluation, logging, saving, stopping."""

import signal
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.build import Training
from diffllm.checkpoint import Checkpointer
from diffllm.config import TrainConfig
from diffllm.data import Prepared, TrainLoader, heldout_batches, training_samples
from diffllm.data.bits import bits_a_nat
from diffllm.data.sequences import Batch
from diffllm.diagnostics import Due, expert_load, merge, probe_positions, reduce_stats
from diffllm.distributed.consistency import check_tensors
from diffllm.distributed.failures import DataFailed, raise_together
from diffllm.distributed.fsdp import local
from diffllm.distributed.gradients import finish_gradients, norms
from diffllm.distributed.stop import Agreed, Agreement, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.errors import DataError
from diffllm.evaluate import heldout_loss
from diffllm.evaluation.while_training import TasksWhileTraining
from diffllm.metrics.profiling import StepProfiler
from diffllm.model.documents import moved
from diffllm.model.stats import Stats
from diffllm.model.transformer import TrainOutput
from diffllm.optim import learning_rate, update
from diffllm.recorder import Recorder, StepResult
from diffllm.state import LoopState, save

NOTHING = Due()


class SkippedTooOften(Exception):
    """So many updates in a row were skipped that the run has diverged; it is saved, and the
    argument says how many. Every rank raises it at the same step."""


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
        stats = merge(stats, due.chosen(out.stats))
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


def every(interval: int, step: int) -> bool:
    """Whether something with this interval is due after `step` steps; 0 is never."""
    return interval > 0 and step % interval == 0


def due(cfg: TrainConfig, step: int) -> Due:
    """The statistics that are due in the step with which `step` steps are made."""
    return Due(
        statistics=every(cfg.diagnostics.interval, step),
        probes=every(cfg.diagnostics.probe_interval, step),
        update=logged(cfg, step),
    )


def logged(cfg: TrainConfig, step: int) -> bool:
    """Whether a line is due after `step` steps: the first and the last always are."""
    return every(cfg.log_interval, step) or step in (1, cfg.steps)


def train(
    t: Training,
    state: LoopState,
    data: Prepared,
    recorder: Recorder,
    checkpointer: Checkpointer,
    profiler: StepProfiler,
    stop: StopRequest,
    watch: Watch,
    tasks: TasksWhileTraining | None = None,
) -> signal.Signals | None:
    """Train until cfg.steps, or until a signal, which is returned.

    The last step is evaluated, by `tasks` too, and saved whatever the intervals; the step at which
    the ranks agree on a signal is saved. Raises SkippedTooOften where the run has diverged, and
    DataFailed where a rank cannot read what comes next, after saving.
    """
    cfg, began = t.cfg, time.perf_counter() - state.seconds
    loader = training_loader(t, data, state)
    batches = iter(loader)
    recorder.start(state.step)
    agreement = Agreement(stop, cfg.distributed.timeout)
    stop.defer()
    stopping: signal.Signals | None = None
    unmeasured: DataFailed | None = None
    failed, stuck = False, 0

    def exchange() -> Agreed:
        """Read ahead as far as it takes all ranks to hear of what cannot be read."""
        error = read_ahead(1 + agreement.delay)
        return agreement.all_reduce_flags(save=checkpointer.due(), failed=error is not None)

    def read_ahead(steps: int) -> DataError | None:
        """Read what so many steps take, unless the run ends before."""
        with recorder.waiting(), watch.waiting("a batch of the data loader"):
            return loader.read_ahead(min(steps, cfg.steps - state.step))

    raise_together(read_ahead(1))
    if agreement.delay:
        exchange()
    while state.step < cfg.steps and not (stopping or stuck or failed):
        step = state.step + 1
        watch.reached(f"step {step}")
        with profiler.step(step):
            out = train_step(t, batches, state.step, due(cfg, step))
        recorder.add(step, out)
        state.step, last = step, step == cfg.steps
        stopping, timed, failed = exchange()
        if every(cfg.distributed.check_interval, step):
            check_tensors(t.tensors(), t.meshes.dense.size(1))
        if every(cfg.eval.interval, step) or last:
            try:
                with recorder.paused():
                    for name, value in evaluations(t, data).items():
                        recorder.note(name, value)
            except DataFailed as error:
                unmeasured, failed = error, True
        if tasks and (every(cfg.eval.suites_interval, step) or last):
            with recorder.paused():
                for name, value in tasks.measure(t.model).items():
                    recorder.note(name, value)
                t.weights.reshard()
        if logged(cfg, step):
            read = loader.consumed()
            for name, value in read.items():
                recorder.note(name, value)
            params = [local(p).detach() for p in t.params.values()]
            lr = learning_rate(cfg.optim, step - 1, cfg.steps)
            param_norm = norms(t.params, params, t.meshes.dense).total
            recorder.log(step, lr, param_norm, bits_a_nat(data, read))
            if state.spikes.longest_skip >= cfg.train.max_consecutive_skips:
                stuck = state.spikes.longest_skip
                state.spikes.forget_skips()
        final = bool(last or stopping or stuck or failed)
        saving = timed or every(cfg.checkpoint.steps, step) or final
        if saving or recorder.line:
            recorder.end_line(step)
        if saving:
            state.data, state.seconds = loader.state_dict(), time.perf_counter() - began
            with recorder.paused():
                save(t, state, checkpointer, final)
    profiler.close()
    watch.reached(f"the end, after step {state.step}")
    loader.close()
    agreement.close()
    checkpointer.close()
    if failed:
        saved = f"; stopped after step {state.step}, saved"
        if unmeasured:
            raise DataFailed(f"{unmeasured}{saved}")
        raise_together(loader.failed, saved)
    if stuck:
        raise SkippedTooOften(f"{stuck} updates in a row were skipped ({recorder.last_values()})")
    return stopping if state.step < cfg.steps else None


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


def evaluations(t: Training, data: Prepared) -> dict[str, float]:
    """`eval/loss` of the held-out sample, `eval.sequences`, in nats a token, and in bits a byte of
    text where that is known; for a mixture also of each source, `eval/loss/<source>`, of as many
    sequences together. Every rank calls it."""
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
