"""build(), train_step(), train(), run(): a training run, one screen each."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diffllm.checkpoint import Checkpointer, check_parameters, load_tensors, read_state
from diffllm.config import Precision, TrainConfig
from diffllm.data import TokenData, TrainLoader, heldout_batches
from diffllm.diagnostics import merge, reduce_stats
from diffllm.distributed.fsdp import local_rows, parallelize
from diffllm.distributed.gradients import average_replicated, clip_, global_norm
from diffllm.distributed.mesh import build_mesh
from diffllm.distributed.stop import StopFlag
from diffllm.errors import CheckpointError
from diffllm.evaluate import heldout_loss
from diffllm.model import Transformer
from diffllm.model.documents import Documents
from diffllm.model.stats import Stats
from diffllm.optim import build_optimizer, learning_rate, optimizer_tensors, set_learning_rate
from diffllm.recorder import Recorder
from diffllm.spikes import SpikeMonitor


@dataclass
class Training:
    """What a step needs."""

    cfg: TrainConfig
    device: torch.device
    mesh: DeviceMesh
    model: Any  # a Transformer, and an FSDPModule
    params: dict[str, Tensor]
    """Sharded and replicated parameters by name, float32."""
    optimizer: torch.optim.AdamW
    compute_dtype: torch.dtype
    document_end: int | None
    """The token that ends a document, where documents are masked."""

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
            **{f"optim.{name}": value for name, value in optim.items()},
        }


@dataclass
class StepOutput:
    """Device tensors of one optimizer step; nothing has waited for them."""

    nll: Tensor
    """Cross-entropy of this rank's tokens over the global batch's token count."""
    z: Tensor
    """The same for logsumexp^2."""
    grad_norm: Tensor
    """Of all parameters over all ranks, before clipping."""
    stats: Stats
    """Each (L,), over the global batch; empty unless diagnosing."""


def build(cfg: TrainConfig, device: torch.device, document_end: int | None = None) -> Training:
    """The sharded model and its optimizer, initialised; needs a process group.

    Args:
        document_end: the token behind which documents begin; masks them.
    """
    dtype = compute_dtype(cfg.precision, device)
    mesh = build_mesh(cfg.parallel, device.type, dist.get_world_size())
    with torch.device("meta"):
        model = Transformer(cfg.model)
    compile = device.type == "cuda" if cfg.compile is None else cfg.compile
    parallelize(model, mesh, dtype, compile, cfg.activation_checkpointing)
    model.to_empty(device=device)
    model.reset_parameters(local_rows)
    params: dict[str, Tensor] = dict(model.named_parameters())
    optimizer = build_optimizer(params, cfg.optim)
    return Training(cfg, device, mesh, model, params, optimizer, dtype, document_end)


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """bfloat16 where asked for, or where the device has matrix units for it."""
    if precision is not Precision.auto:
        return torch.bfloat16 if precision is Precision.bf16 else torch.float32
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def train_step(
    t: Training, batches: Iterator[tuple[Tensor, Tensor]], step: int, diagnose: bool
) -> StepOutput:
    """One optimizer step over the global batch; no host synchronisation.

    Args:
        batches: this rank's micro-batches, (inputs, targets) each (b, T) int64.
        step: from 0; decides the learning rate.
        diagnose: take in-block statistics.
    """
    cfg, count = t.cfg, t.cfg.micro_batches(dist.get_world_size())[1]
    tokens = cfg.global_batch_size * cfg.seq_len
    nll = z = torch.zeros((), device=t.device)
    stats: Stats = {}
    for i in range(count):
        batch = next(batches)
        documents = t.documents(batch[0])
        inputs, targets = (part.to(t.device, non_blocking=True) for part in batch)
        t.model.set_requires_all_reduce(i == count - 1)  # HSDP: once a step
        out = t.model(inputs, targets, diagnose=diagnose, documents=documents)
        (out.objective * (dist.get_world_size() / tokens)).backward()  # ranks are averaged
        nll, z = nll + out.loss.nll, z + out.loss.z
        stats = merge(stats, out.stats) if diagnose else stats
    average_replicated(t.params.values())
    grads = [p.grad for p in t.params.values() if p.grad is not None]
    norm = global_norm(grads, t.mesh)
    if cfg.optim.clip_norm:
        clip_(grads, norm, cfg.optim.clip_norm)
    set_learning_rate(t.optimizer, learning_rate(cfg.optim, step, cfg.steps))
    t.optimizer.step()
    t.optimizer.zero_grad(set_to_none=True)
    return StepOutput(nll / tokens, z / tokens, norm, reduce_stats(stats, count))


@dataclass
class LoopState:
    """All of a run's state that is not a tensor; JSON in checkpoints."""

    step: int = 0
    data: dict[str, int] = field(default_factory=dict)
    corpus: str = ""
    """Hashes of the corpus and of the tokenizer's pieces, which `data` counts in."""
    spikes: SpikeMonitor = field(default_factory=SpikeMonitor)
    wandb_id: str | None = None
    heldout_loss: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "spikes": self.spikes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spikes.load_state_dict(state["spikes"])
        if state["corpus"] != self.corpus:
            raise CheckpointError("the checkpoint is of another corpus or tokenizer")
        for name in ("step", "data", "wandb_id", "heldout_loss"):
            setattr(self, name, state[name])


def every(interval: int, step: int) -> bool:
    """Whether something of this interval is due after `step` steps; 0 is never."""
    return interval > 0 and step % interval == 0


def train(
    t: Training, state: LoopState, data: TokenData, recorder: Recorder, checkpointer: Checkpointer
) -> str | None:
    """Train until cfg.steps, or until a signal, whose name is returned.

    The first step is logged, the last one logged, evaluated and saved whatever the intervals; the
    step at which the ranks agree on a signal is saved.
    """
    cfg, stop, loader = t.cfg, StopFlag(), training_loader(t, data, state)
    batches = recorder.timed(iter(loader))
    recorder.start(state.step)
    stopping: str | None = None
    while state.step < cfg.steps and not stopping:
        step = state.step + 1
        out = train_step(t, batches, state.step, every(cfg.diagnostics.interval, step))
        recorder.add(step, out.nll, out.z, out.grad_norm, out.stats)
        state.step, last, stopping = step, step == cfg.steps, stop.agreed()
        if every(cfg.eval.interval, step) or last:
            with recorder.paused():
                state.heldout_loss = evaluate(t, data)
                recorder.note("eval/loss", state.heldout_loss)
        if every(cfg.log_interval, step) or step == 1 or last:
            params = [p.detach() for p in t.params.values()]
            lr = learning_rate(cfg.optim, step - 1, cfg.steps)
            recorder.log(step, lr, global_norm(params, t.mesh))
        saving = every(cfg.checkpoint.interval, step) or last or stopping
        if saving or recorder.line:
            recorder.end_line(step)
        if saving:
            state.data = loader.state_dict()
            with recorder.paused():
                save(t, state, checkpointer)
    checkpointer.close()
    loader.close()
    stop.close()
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
    t.model.reshard()
    return loss


def save(t: Training, state: LoopState, checkpointer: Checkpointer) -> None:
    """Start an asynchronous checkpoint; every rank calls it."""
    rng = rng_tensors(t.device)
    shapes = {name: list(param.shape) for name, param in t.params.items()}
    meta = {"parameters": shapes, "ranks": dist.get_world_size(), "loop": state.state_dict()}
    checkpointer.save(state.step, {**t.tensors(), **rng}, meta)


def restore(t: Training, state: LoopState, path: Path) -> None:
    """Continue from a checkpoint, whatever mesh wrote it; raises CheckpointError."""
    check_parameters(path, t.params)
    saved = read_state(path)
    try:
        state.load_state_dict(saved["loop"])
        rng = rng_tensors(t.device) if dist.get_rank() < saved["ranks"] else {}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: state.json lacks {error}") from error
    load_tensors(path, {**t.tensors(), **rng})
    for name, value in rng.items():
        if name.startswith("rng.cuda"):
            torch.cuda.set_rng_state(value, t.device)
        else:
            torch.set_rng_state(value)


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """This rank's random number generators, uint8."""
    rng = {f"rng.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        rng[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state(device)
    return rng
