"""The actions that are due at a step, and one optimizer step over the global batch."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.config import TrainConfig
from diffllm.core.targets import PADDING_TARGET
from diffllm.data.sequences import Batch
from diffllm.distributed.gradients import Norms, change_norm, copies, finish_gradients
from diffllm.metrics.diagnostics import (
    Stats,
    due_stats,
    expert_load,
    merge,
    probe_positions,
    reduce_stats,
)
from diffllm.model.attention.masks import moved
from diffllm.model.attention.slices import Slices
from diffllm.model.loss import Term
from diffllm.model.transformer import TrainOutput
from diffllm.optim import learning_rate, update
from diffllm.training.build import Training


class Due(NamedTuple):
    """Actions to take at one training step; a field is True if the action is due."""

    statistics: bool = False
    probes: bool = False
    """Measure attention at some query positions."""
    update: bool = False
    """Compute the norm of the parameter change; needs a copy of this rank's parameters."""
    log: bool = False
    check: bool = False
    """Compare tensors between ranks."""
    sample: bool = False
    """Compute the loss of a held-out sample."""
    tasks: bool = False
    save: bool = False
    profile: bool = False
    """Trace this step, or warm up the profiler for the next step."""
    last: bool = False

    @property
    def diagnose(self) -> bool:
        return self.statistics or self.probes


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def due(cfg: TrainConfig, step: int) -> Due:
    """Return the actions that are due at training step `step`, counted from 1.

    The last step is always logged, evaluated and saved.
    """
    last = step == cfg.steps
    log = every(cfg.log_interval, step) or step == 1 or last
    tasks = every(cfg.eval.suites_interval, step) or last
    interval = cfg.checkpoint.interval
    # An interval of time, such as 30min, is not counted in steps.
    save = isinstance(interval, int) and every(interval, step)
    first, final = cfg.profile.steps or (0, -1)
    return Due(
        statistics=every(cfg.diagnostics.interval, step),
        probes=every(cfg.diagnostics.probe_interval, step),
        update=log,
        log=log,
        check=every(cfg.distributed.check_interval, step),
        sample=every(cfg.eval.interval, step) or last,
        tasks=bool(cfg.eval.suites) and tasks,
        save=save or last,
        profile=first - 1 <= step <= final,
        last=last,
    )


NOTHING = Due()


class Counts(NamedTuple):
    """Numbers over which the losses of a step are means, each () int64 on the device, at least 1.

    The numbers are sums over the global batch.
    """

    targets: Tensor
    """Targets that the loss does not ignore."""
    tokens: Tensor
    """Positions that are not padding."""


class StepResult(NamedTuple):
    """Results of one optimizer step as tensors.

    Except `visible_keys`, results are equal on all ranks up to rounding, and are on the device.
    """

    nll: Tensor
    """Mean cross-entropy in nats per token."""
    losses: dict[str, Tensor]
    """Other terms of the objective by metric name, multiplied by their weights."""
    skipped: Tensor
    """1.0 if the update was skipped, else 0.0."""
    grad_norms: Norms
    """Gradient norms of every parameter, before clipping."""
    update_norm: Tensor | None
    """Norm of the change of all parameters; None unless due."""
    stats: Stats
    """Due statistics over the global batch by name; each (L,) or (L, heads)."""
    target_share: Tensor | None = None
    """Share of targets that are not ignored; None if no target can be ignored."""
    visible_keys: Tensor | None = None
    """Sum over this rank's queries of visible keys, () int64 on the CPU; None without masks."""


def train_step(t: Training, batches: Iterator[Batch], step: int, due: Due = NOTHING) -> StepResult:
    """Make one optimizer step over the global batch.

    The update is skipped after a bad loss or gradient, as `train.skip_step` specifies. The host
    does not wait for the device. Every rank must call this.

    Args:
        batches: this rank's micro-batches, (inputs, targets) each (b, T) int64 on the CPU.
        step: number of optimizer steps before this step; decides the learning rate.
        due: actions that are due at this step, such as statistics.
    """
    cfg = t.cfg
    mesh = t.meshes.dense
    counts = None
    if t.ignores_targets:
        # Each gradient is divided by the counts of the global batch, so count before the first
        # forward pass.
        step_batches = list(islice(batches, t.micro_batches))
        batches = iter(step_batches)
        counts = global_counts(t, [targets for _, targets in step_batches])
    sums = forward_backward(t, batches, due, probe(t, step, due), counts)
    means = mean_losses(t, sums, counts)
    grad_norms = finish_gradients(t.params, mesh)
    skipped = t.guard.judge(means[Term.cross_entropy], grad_norms.total)
    # Norms of replicas may differ by rounding, but all ranks must decide alike.
    if mesh.size(0) > 1:
        dist.all_reduce(skipped, dist.ReduceOp.MAX)
    former_params = copies(t.params) if due.update else None
    lr = learning_rate(cfg.optim, step, cfg.steps)
    # `skipped` stays on the device: a conditional update would make the host wait.
    update(t.optimizer, lr, cfg.optim.clip_norm, grad_norms.total, skipped)
    t.weights.changed()
    t.optimizer.zero_grad(set_to_none=True)
    stats = reduced_stats(t, sums, counts)
    if sums.expert_counts is not None:
        dist.all_reduce(sums.expert_counts)
        t.model.rebalance(sums.expert_counts, skipped)
        if due.statistics:
            stats |= expert_load(sums.expert_counts)
            stats["router_bias_range"] = t.model.router_bias_range()
    update_norm = None
    if former_params is not None:
        update_norm = change_norm(t.params, former_params, mesh)
    target_share = None if counts is None else counts.targets / t.tokens
    return StepResult(
        nll=means[Term.cross_entropy],
        losses=weighted_losses(cfg, means),
        skipped=skipped,
        grad_norms=grad_norms,
        update_norm=update_norm,
        stats=stats,
        target_share=target_share,
        visible_keys=sums.visible_keys,
    )


class BatchSums(NamedTuple):
    """Sums over the micro-batches of this rank in one step."""

    terms: tuple[Term, ...]
    losses: Tensor
    """One sum for each element of `terms`, (n,)."""
    expert_counts: Tensor | None
    """Number of tokens per layer and expert, without padding, (L, E); None without experts."""
    stats: Stats
    visible_keys: Tensor | None


def mean_losses(t: Training, sums: BatchSums, counts: Counts | None) -> dict[Term, Tensor]:
    """Return the mean of each term over the global batch. Every rank must call this."""
    # One collective for all losses, because each collective has a latency.
    dist.all_reduce(sums.losses)
    if counts is None:
        means = sums.losses / t.tokens
    else:
        divisors = [getattr(counts, term.divisor) for term in sums.terms]
        means = sums.losses / torch.stack(divisors)
    return dict(zip(sums.terms, means.unbind(), strict=True))


def weighted_losses(cfg: TrainConfig, means: dict[Term, Tensor]) -> dict[str, Tensor]:
    """Return the terms of the objective with a weight, by metric name, multiplied by the weight."""
    losses = {}
    for term, mean in means.items():
        weight = term.weight(cfg.model)
        if weight and term is not Term.cross_entropy:
            losses[term.metric] = weight * mean
    return losses


def reduced_stats(t: Training, sums: BatchSums, counts: Counts | None) -> Stats:
    """Return the statistics over the global batch, by name. Every rank must call this."""
    stats = reduce_stats(sums.stats, t.micro_batches)
    if counts is not None and "router_entropy" in stats:
        # The entropy of padding is 0, but the mean is over all positions.
        stats["router_entropy"] = stats["router_entropy"] * (t.tokens / counts.tokens)
    return stats


def sliced(x: Tensor, slices: Slices | None) -> Tensor:
    """Return this rank's slice of the sequences x (b, T), or x if ranks have whole sequences."""
    return x if slices is None else slices.cut(x)


def global_counts(t: Training, targets: list[Tensor]) -> Counts:
    """Count targets and tokens of the global batch. Every rank must call this.

    `targets` contains the targets of this rank's micro-batches, (b, T) int64 each on the CPU.
    """
    rows = []
    for part in targets:
        part = sliced(part, t.slices)
        n_targets = (part >= 0).sum()
        n_tokens = (part != PADDING_TARGET).sum()
        rows.append(torch.stack([n_targets, n_tokens]))
    # Counted on the CPU, where the targets are, and copied to the device for the collective.
    counts = moved(torch.stack(rows).sum(0), t.device)
    dist.all_reduce(counts)
    # Without targets the losses are 0: avoid 0 / 0 = NaN.
    return Counts(*counts.clamp_min(1).unbind())


def forward_backward(
    t: Training, batches: Iterator[Batch], due: Due, probe: Tensor | None, counts: Counts | None
) -> BatchSums:
    """Run forward and backward passes of this rank's micro-batches; accumulate the gradients.

    Args:
        batches: micro-batches, (inputs, targets) each (b, T) int64 on the CPU.
        due: the statistics that are due at this step.
        probe: query positions at which attention is measured, (N,) int64; None measures nothing.
        counts: numbers of targets and tokens in the global batch; None if no target can be ignored.
    """
    losses = torch.zeros((), device=t.device)
    expert_counts = torch.zeros((), dtype=torch.int64, device=t.device)
    keys: list[Tensor] = []
    stats: Stats = {}
    for i in range(t.micro_batches):
        cpu_inputs, cpu_targets = next(batches)
        documents = t.documents(cpu_inputs) if t.documents else None
        if documents is not None:  # Count on the CPU: reading the device would make the host wait.
            visible_keys = documents.visible_keys()
            # One rank of each group counts the keys of its sequences.
            is_counting = t.slices is None or t.slices.rank == 0
            keys.append(visible_keys if is_counting else torch.zeros_like(visible_keys))
            documents = documents.to(t.device)
        # Cut on the device: a slice of pinned memory is not contiguous, so its copy would block.
        inputs = sliced(cpu_inputs.to(t.device, non_blocking=True), t.slices)
        targets = sliced(cpu_targets.to(t.device, non_blocking=True), t.slices)
        t.weights.begin_micro_batch(last=i == t.micro_batches - 1)
        out = t.model.loss(
            inputs,
            targets,
            documents=documents,
            slices=t.slices,
            diagnose=due.diagnose,
            probe=probe,
        )
        scaled(t, out, counts).backward()
        if out.expert_counts is not None:
            expert_counts = expert_counts + out.expert_counts
        # Detached: the sum would keep the graphs of all micro-batches.
        losses = losses + torch.stack(list(out.losses.values())).detach()
        stats = merge(stats, due_stats(out.stats, due.statistics, due.probes))
    return BatchSums(
        terms=tuple(out.losses),
        losses=losses,
        expert_counts=None if out.expert_counts is None else expert_counts,
        stats=stats,
        visible_keys=torch.stack(keys).sum() if keys else None,
    )


def probe(t: Training, step: int, due: Due) -> Tensor | None:
    """Draw the query positions at which this step measures attention, (N,) int64 on the device.

    Return None if no measurement is due.
    """
    # One compiled graph measures everything, also if only the other statistics are due.
    is_measured = due.probes or (due.diagnose and t.compiled)
    if not is_measured:
        return None
    positions = probe_positions(t.cfg.diagnostics, t.cfg.seq_len, t.cfg.seed, step)
    return None if positions is None else moved(positions, t.device)


def scaled(t: Training, out: TrainOutput, counts: Counts | None) -> Tensor:
    """Scale the objective of a micro-batch to its part of the mean over the global batch.

    Each term is divided by its divisor, a field of `counts`. If `counts` is None, all terms are
    divided by the number of tokens in the global batch. The result is multiplied by the world size,
    because FSDP2 averages over ranks.
    """
    ranks = dist.get_world_size()
    if counts is None:
        return out.objective * (ranks / t.tokens)
    over_targets = ranks / counts.targets
    objective = out.objective * over_targets
    token_losses = []
    for term, loss in out.losses.items():
        if term.divisor == "tokens":
            token_losses.append(term.weight(t.cfg.model) * loss)
    if token_losses:
        # `out.objective` contains these losses, which are means over tokens.
        correction = ranks / counts.tokens - over_targets
        objective = objective + sum(token_losses) * correction
    return objective
