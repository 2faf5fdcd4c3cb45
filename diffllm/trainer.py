"""build(), train_step(), train(), run(): a training run, one screen each."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.changes import Changes, described, is_allowed
from diffllm.checkpoint import Checkpointer, check_loop, check_parameters, load_tensors, read_state
from diffllm.choices import chosen_compile, chosen_precision
from diffllm.config import TrainConfig
from diffllm.data import TokenData, TrainLoader, heldout_batches
from diffllm.diagnostics import Due, expert_load, merge, probe_positions, reduce_stats
from diffllm.distributed.consistency import check_tensors
from diffllm.distributed.experts import Splits, exchanged_splits
from diffllm.distributed.fsdp import local, parallelize
from diffllm.distributed.gradients import average_experts, average_replicated, clip_, norms
from diffllm.distributed.mesh import Meshes, build_meshes
from diffllm.distributed.stop import Agreement, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.weights import OneRank, Sharded, Weights
from diffllm.errors import CheckpointError
from diffllm.evaluate import heldout_loss
from diffllm.model import Transformer
from diffllm.model.choice import Choice
from diffllm.model.documents import Documents, moved
from diffllm.model.stats import Stats
from diffllm.optim import (
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    set_learning_rate,
    step_unless,
)
from diffllm.protection import Guard, SkippedTooOften
from diffllm.recorder import Recorder, StepOutput
from diffllm.spikes import SpikeMonitor

NOTHING = Due()


@dataclass
class Training:
    """What a step needs."""

    cfg: TrainConfig
    device: torch.device
    meshes: Meshes
    model: Any  # a Transformer, on several ranks an FSDPModule too
    weights: Weights
    optimizer: torch.optim.AdamW
    document_end: int | None
    """The token that ends a document, where documents are masked."""
    guard: Guard
    choices: dict[str, Choice]
    """Settings that were left to the device or to the size of the model, by name."""

    @property
    def params(self) -> dict[str, Tensor]:
        """The float32 parameters by name: sharded, replicated or whole."""
        return self.weights.params

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the computation; parameters and their gradients are float32."""
        return self.choices["precision"].value

    def documents(self, inputs: Tensor) -> Documents | None:
        """Of a batch (b, T) on the CPU, on the device; None where a row is read as one document."""
        if self.document_end is None:
            return None
        return Documents.of(inputs, self.document_end).to(self.device)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds as tensors, by flat name."""
        optim = optimizer_tensors(self.optimizer, self.params)
        return {
            **{f"model.{name}": param.detach() for name, param in self.params.items()},
            **{f"model.{name}": buffer for name, buffer in self.model.router_state().items()},
            **{f"optim.{name}": value for name, value in optim.items()},
        }


def build(cfg: TrainConfig, device: torch.device, document_end: int | None = None) -> Training:
    """The sharded model and its optimizer, initialised; needs a process group.

    Args:
        document_end: the token behind which documents begin; masks them.
    """
    model, meshes = sharded_model(cfg, device)
    t = allocated(cfg, device, model, meshes, document_end)
    t.model.reset_parameters(t.weights.block)
    t.weights.changed()
    return t


def sharded_model(
    cfg: TrainConfig, device: torch.device, splits: Splits = exchanged_splits
) -> tuple[Transformer, Meshes]:
    """The model on the meta device, wrapped for training on `device`; needs a process group.

    Args:
        splits: how many rows experts get from other ranks.
    """
    meshes = build_meshes(cfg.parallel, device.type, dist.get_world_size())
    with torch.device("meta"):
        model = Transformer(cfg.model)
    dtype: torch.dtype = chosen_precision(cfg.precision, device).value
    compile: bool = chosen_compile(cfg.compile, device).value
    parallelize(model, meshes, dtype, compile, cfg.activation_checkpointing, splits)
    return model, meshes


def allocated(
    cfg: TrainConfig,
    device: torch.device,
    model: Transformer,
    meshes: Meshes,
    document_end: int | None = None,
) -> Training:
    """A model on `device`, its parameters still without values, and its optimizer."""
    model.to_empty(device=device)
    precision = chosen_precision(cfg.precision, device)
    compile = chosen_compile(cfg.compile, device)
    weights: Weights
    if meshes.one_rank:
        weights = OneRank(model, precision.value)
    else:
        weights = Sharded(model, cfg.parallel.reduce)
    optimizer = build_optimizer(weights.params, cfg.optim)
    guard = Guard(cfg.train.skip_step, device)
    choices = {"precision": precision, "compile": compile, **weights.choices}
    choices |= model.choices(device, precision.value, documents=document_end is not None)
    return Training(cfg, device, meshes, model, weights, optimizer, document_end, guard, choices)


def train_step(
    t: Training, batches: Iterator[tuple[Tensor, Tensor]], step: int, due: Due = NOTHING
) -> StepOutput:
    """One optimizer step over the global batch, unless the guard skips it; no host synchronisation.

    Args:
        batches: this rank's micro-batches, (inputs, targets) each (b, T) int64.
        step: from 0; decides the learning rate.
        due: what to measure.
    """
    cfg, count = t.cfg, t.cfg.micro_batches(dist.get_world_size())[1]
    tokens = cfg.global_batch_size * cfg.seq_len
    losses = torch.zeros((), device=t.device)
    counts = torch.zeros((), dtype=torch.int64, device=t.device)
    stats: Stats = {}
    probe = None
    compiled: bool = t.choices["compile"].value
    if due.probes or (due.diagnose and compiled):  # one compiled graph measures all there is
        probe = probe_positions(cfg.diagnostics, cfg.seq_len, cfg.seed, step)
        probe = None if probe is None else moved(probe, t.device)
    for i in range(count):
        batch = next(batches)
        documents = t.documents(batch[0])
        inputs, targets = (part.to(t.device, non_blocking=True) for part in batch)
        t.weights.begin_micro_batch(last=i == count - 1)
        out = t.model(inputs, targets, diagnose=due.diagnose, documents=documents, probe=probe)
        (out.objective * (dist.get_world_size() / tokens)).backward()  # ranks are averaged
        router_losses = (out.routed.balance, out.routed.z) if out.routed else ()
        losses = losses + torch.stack((*out.loss, *router_losses)).detach()
        counts = counts + out.routed.counts if out.routed else counts
        stats = merge(stats, due.chosen(out.stats))
    dist.all_reduce(losses)
    nll, *other_losses = (losses / tokens).unbind()
    average_replicated(t.params.values())
    average_experts(t.params.values())
    trained = {name: p for name, p in t.params.items() if p.grad is not None}
    grads = [local(p.grad) for p in trained.values() if p.grad is not None]
    grad_norms = norms(trained, grads, t.meshes.dense)
    if cfg.optim.clip_norm:
        clip_(grads, grad_norms.total, cfg.optim.clip_norm)
    skipped = t.guard.judge(nll, grad_norms.total)
    if t.meshes.dense.size(0) > 1:  # replicas sum norms of their own; rounding must not part them
        dist.all_reduce(skipped, dist.ReduceOp.MAX)
    before = [local(p).detach().clone() for p in t.params.values()] if due.update else None
    set_learning_rate(t.optimizer, learning_rate(cfg.optim, step, cfg.steps))
    step_unless(t.optimizer, skipped)
    t.weights.changed()
    t.optimizer.zero_grad(set_to_none=True)
    stats = reduce_stats(stats, count)
    if out.routed:
        dist.all_reduce(counts)
        t.model.rebalance(counts, skipped)
        if due.statistics:
            stats |= {**expert_load(counts), "router_bias_range": t.model.router_bias_range()}
    update_norm = None
    if before:
        torch._foreach_sub_(before, [local(p).detach() for p in t.params.values()])
        update_norm = norms(t.params, before, t.meshes.dense).total
    weighted = weighted_losses(cfg, other_losses)
    return StepOutput(nll, weighted, skipped, grad_norms, update_norm, stats)


def weighted_losses(cfg: TrainConfig, values: list[Tensor]) -> dict[str, Tensor]:
    """What the objective has besides the cross-entropy, by metric name.

    Args:
        values: unweighted, scalars: the z-loss, and with experts the router's two.
    """
    weights = {
        "train/z_loss": cfg.model.z_loss,
        "train/balance_loss": cfg.model.moe.balance_loss,
        "train/router_z_loss": cfg.model.moe.router_z_loss,
    }
    pairs = zip(weights.items(), values, strict=False)
    return {name: weight * value for (name, weight), value in pairs if weight}


@dataclass
class LoopState:
    """All of a run's state that is not a tensor; JSON in checkpoints."""

    step: int = 0
    data: dict[str, int] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)
    """What decides which samples a step reads; `data` counts in it."""
    spikes: SpikeMonitor = field(default_factory=SpikeMonitor)
    wandb_id: str | None = None
    heldout_loss: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "spikes": self.spikes.state_dict()}

    def changes(self, saved: dict[str, Any], allowed: list[str]) -> Changes:
        """How this run's order of data differs from that of a saved loop state.

        Raises:
            CheckpointError: it does, in keys that are not `allowed`.
        """
        there = saved["order"]
        keys = [key for key in self.order if there.get(key) != self.order[key]]
        changes = {key: (there.get(key), self.order[key]) for key in keys}
        if refused := [key for key in changes if not is_allowed(key, allowed)]:
            raise CheckpointError(
                f"the checkpoint belongs to another order of data ({described(changes)}); to go on "
                f"from it all the same: run.allow_changes=[{','.join([*allowed, *refused])}]"
            )
        return changes

    def load_state_dict(self, state: dict[str, Any], allowed: list[str]) -> None:
        """Continue from a saved state; another order of data begins at its first sample.

        Raises:
            CheckpointError: the order of data differs in keys that are not `allowed`.
        """
        changes = self.changes(state, allowed)
        self.spikes.load_state_dict(state["spikes"])
        for name in ("step", "data", "wandb_id", "heldout_loss"):
            setattr(self, name, state[name])
        if changes.keys() - {"global_batch_size"}:
            self.data = {}


def every(interval: int, step: int) -> bool:
    """Whether something of this interval is due after `step` steps; 0 is never."""
    return interval > 0 and step % interval == 0


def due(cfg: TrainConfig, step: int) -> Due:
    """What the step that makes `step` steps has to measure."""
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
    data: TokenData,
    recorder: Recorder,
    checkpointer: Checkpointer,
    stop: StopRequest,
    watch: Watch,
) -> signal.Signals | None:
    """Train until cfg.steps, or until a signal, which is returned.

    The last step is evaluated and saved whatever the intervals; the step at which the ranks agree
    on a signal is saved.

    Raises:
        SkippedTooOften: after saving.
    """
    cfg, agreement = t.cfg, Agreement(stop, t.cfg.distributed.timeout)
    loader = training_loader(t, data, state)
    stop.training = True
    batches = recorder.timed(iter(loader))
    recorder.start(state.step)
    stopping: signal.Signals | None = None
    stuck = 0
    while state.step < cfg.steps and not (stopping or stuck):
        step = state.step + 1
        watch.reached(f"step {step}")
        out = train_step(t, batches, state.step, due(cfg, step))
        recorder.add(step, out)
        state.step, last = step, step == cfg.steps
        stopping, timed = agreement.step(save=checkpointer.due())
        if every(cfg.distributed.check_interval, step):
            check_tensors(t.tensors(), t.meshes.dense.size(1))
        if every(cfg.eval.interval, step) or last:
            with recorder.paused():
                state.heldout_loss = evaluate(t, data)
                recorder.note("eval/loss", state.heldout_loss)
        if logged(cfg, step):
            params = [local(p).detach() for p in t.params.values()]
            lr = learning_rate(cfg.optim, step - 1, cfg.steps)
            recorder.log(step, lr, norms(t.params, params, t.meshes.dense).total)
            if state.spikes.longest_skip >= cfg.train.max_consecutive_skips:
                stuck = state.spikes.longest_skip
                state.spikes.forget_skips()
        final = bool(last or stopping or stuck)
        saving = timed or every(cfg.checkpoint.steps, step) or final
        if saving or recorder.line:
            recorder.end_line(step)
        if saving:
            state.data = loader.state_dict()
            with recorder.paused():
                save(t, state, checkpointer, final)
    watch.reached(f"the end, after step {state.step}")
    loader.close()
    agreement.close()
    checkpointer.close()
    if stuck:
        raise SkippedTooOften(
            f"stopped after step {state.step}, saved: {stuck} updates in a row were skipped "
            f"({recorder.last_values()}); a smaller optim.lr, other data or "
            "train.skip_step=off would go another way"
        )
    return stopping if state.step < cfg.steps else None


def training_loader(t: Training, data: TokenData, state: LoopState) -> TrainLoader:
    """This rank's batches, from where `state` stands."""
    cfg = t.cfg
    loader = TrainLoader(
        data.split("train"),
        seq_len=cfg.seq_len,
        seed=cfg.seed,
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


def evaluate(t: Training, data: TokenData) -> float:
    """Held-out loss in nats a token; every rank calls it."""
    cfg, rank, world_size = t.cfg, dist.get_rank(), dist.get_world_size()
    stream = data.split("heldout")
    sequences = min(cfg.eval.sequences, (len(stream) - 1) // cfg.seq_len)
    batch = cfg.micro_batches(world_size)[0]
    batches = heldout_batches(stream, cfg.seq_len, batch, sequences, rank, world_size)
    rounds = -(-sequences // (batch * world_size))
    loss = heldout_loss(t.model, batches, (batch, cfg.seq_len), rounds, t.device, t.documents)
    t.weights.rest()
    return loss


def save(t: Training, state: LoopState, checkpointer: Checkpointer, final: bool = False) -> None:
    """Start an asynchronous checkpoint; every rank calls it.

    Args:
        final: nothing is trained behind it, so that its failure ends the run.
    """
    rng = rng_tensors(t.device)
    shapes = {name: list(param.shape) for name, param in t.params.items()}
    meta = {"parameters": shapes, "ranks": dist.get_world_size(), "loop": state.state_dict()}
    checkpointer.save(state.step, {**t.tensors(), **rng}, meta, final)


def restore(t: Training, state: LoopState, path: Path) -> None:
    """Continue from a checkpoint, whatever mesh wrote it; raises CheckpointError."""
    check_parameters(path, t.params)
    saved = read_state(path)
    check_loop(path, saved)
    try:
        state.load_state_dict(saved["loop"], t.cfg.run.allow_changes)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: state.json lacks {error}") from error
    rng = rng_tensors(t.device) if dist.get_rank() < saved["ranks"] else {}
    load_tensors(path, {**t.tensors(), **rng})
    t.weights.changed()
    t.guard.load(state.spikes)
    try:
        for name, value in rng.items():
            if name.startswith("rng.cuda"):
                torch.cuda.set_rng_state(value, t.device)
            else:
                torch.set_rng_state(value)
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds no state of a random generator: {error}") from error


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """This rank's random number generators, uint8."""
    rng = {f"rng.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        rng[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state(device)
    return rng
