"""Build the sharded model and the optimizer of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.config import Precision, TrainConfig
from diffllm.distributed.experts import Splits, exchanged_splits
from diffllm.distributed.fsdp import OneRank, Sharded, Weights, parallelize
from diffllm.distributed.mesh import Meshes, build_meshes
from diffllm.metrics.spikes import WINDOW128_SIGMAS, window128
from diffllm.model import Transformer, without_storage
from diffllm.model.attention.masks import Documents
from diffllm.model.attention.slices import Slices
from diffllm.model.auto_setting import ASKED, AutoSetting, dtype_name
from diffllm.optim import Guard, build_optimizer, optimizer_tensors


@dataclass(frozen=True)
class Training:
    """The objects that a training step needs, such as model, optimizer and batch sizes."""

    cfg: TrainConfig
    device: torch.device
    meshes: Meshes
    model: Transformer
    """On several ranks also an FSDPModule."""
    weights: Weights
    params: dict[str, Tensor]
    """The float32 parameters by name: sharded, replicated or whole."""
    optimizer: torch.optim.AdamW
    guard: Guard
    """Decides which optimizer updates are skipped."""
    choices: dict[str, AutoSetting]
    """Settings that depend on the device or the model size, such as "precision"."""
    micro_batch_size: int
    """Sequences per micro-batch."""
    micro_batches: int
    """Micro-batches per rank and step."""
    tokens: int
    """Tokens per global batch, including ignored targets."""
    compiled: bool
    documents: Callable[[Tensor], Documents] | None = None
    """Finds the documents in inputs (b, T) on the CPU; None if documents are not masked."""
    ignores_targets: bool = False
    """Whether targets may be negative (ignored); a step then counts the remaining targets."""
    slices: Slices | None = None
    """The ranks that share each sequence; None without context parallelism."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.choices["precision"].value

    @property
    def group(self) -> tuple[int, int]:
        """Index of this rank's group of ranks that share sequences, and the number of groups."""
        context = self.cfg.parallel.context
        return dist.get_rank() // context, dist.get_world_size() // context

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint, with names `model.*` and `optim.*`."""
        tensors = {}
        for name, tensor in {**self.params, **self.model.router_state()}.items():
            tensors[f"model.{name}"] = tensor.detach()
        for name, tensor in optimizer_tensors(self.optimizer, self.params).items():
            tensors[f"optim.{name}"] = tensor
        return tensors


class ShardedModel(NamedTuple):
    """A sharded and compiled model whose parameters have no storage yet."""

    model: Transformer
    meshes: Meshes
    choices: dict[str, AutoSetting]


def build(
    cfg: TrainConfig,
    device: torch.device,
    document_end: int | None = None,
    ignores_targets: bool = False,
    compile: AutoSetting | None = None,
) -> Training:
    """Build the sharded model with initial parameters, and its optimizer.

    Every rank must call this function.

    Args:
        document_end: id of the token that ends documents; None allows attention across documents.
        ignores_targets: whether targets may be negative; the loss ignores negative targets.
        compile: whether to use torch.compile; if None, `chosen_compile` decides.
    """
    sharded = sharded_model(cfg, device, compile=compile)
    t = allocated(cfg, device, sharded, document_end, ignores_targets)
    t.model.reset_parameters(t.weights.block)
    t.weights.changed()
    return t


def sharded_model(
    cfg: TrainConfig,
    device: torch.device,
    splits: Splits = exchanged_splits,
    compile: AutoSetting | None = None,
) -> ShardedModel:
    """Create the model on the meta device, sharded and compiled for training on `device`.

    Every rank must call this function. If experts are divided between ranks, `splits` computes how
    many tokens the ranks exchange. If `compile` is None, `chosen_compile` decides.
    """
    precision = chosen_precision(cfg.precision, device)
    compile = compile or chosen_compile(cfg.compile, device)
    meshes = build_meshes(cfg.parallel, device.type, dist.get_world_size())
    model = without_storage(cfg.model)
    parallelize(model, meshes, precision.value, compile.value, cfg.activation_checkpointing, splits)
    return ShardedModel(model, meshes, {"precision": precision, "compile": compile})


def allocated(
    cfg: TrainConfig,
    device: torch.device,
    sharded: ShardedModel,
    document_end: int | None = None,
    ignores_targets: bool = False,
) -> Training:
    """Allocate the parameters of `sharded` on `device`, uninitialised, and create the optimizer.

    For `document_end` and `ignores_targets`, see `build`.
    """
    model, meshes, choices = sharded
    model.to_empty(device=device)
    dtype: torch.dtype = choices["precision"].value
    weights = OneRank(model, dtype) if meshes.one_rank else Sharded(model, cfg.parallel.reduce)
    model_choices = model.choices(device, dtype, documents=document_end is not None)
    choices = {**choices, **weights.choices, **model_choices}
    find_documents = None
    if document_end is not None:
        find_documents = partial(Documents.of, end=document_end)
    slices = None
    if meshes.context is not None:
        context = meshes.context
        slices = Slices(context.get_group().group_name, context.get_local_rank(), context.size())
    micro_batch_size, micro_batches = cfg.micro_batches(dist.get_world_size())
    return Training(
        cfg=cfg,
        device=device,
        meshes=meshes,
        model=model,
        weights=weights,
        params=weights.params,
        optimizer=build_optimizer(weights.params, cfg.optim),
        guard=Guard(cfg.train.skip_step, window128().window, WINDOW128_SIGMAS, device),
        choices=choices,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        tokens=cfg.global_batch_size * cfg.seq_len,
        compiled=choices["compile"].value,
        documents=find_documents,
        ignores_targets=ignores_targets,
        slices=slices,
    )


WORTH_COMPILING = 5e13
"""Training FLOPs of one rank above which compiling clearly saves time on a CPU."""
AS_IN_CHECKPOINT = "as in the checkpoint"


def chosen_precision(precision: Precision, device: torch.device) -> AutoSetting:
    """Return the compute dtype and the reason for this dtype.

    The precision "auto" selects bfloat16 if the device hardware supports it, otherwise float32.
    "bf16" and "fp32" select bfloat16 and float32 on every device.
    """
    if precision is not Precision.auto:
        dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
        return AutoSetting(dtype, ASKED)
    if device.type == "cuda":
        name = "this GPU"
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        name = "this CPU"
        has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if has_units:
        return AutoSetting(torch.bfloat16, f"{name} has bf16 units")
    return AutoSetting(torch.float32, f"{name} has no bf16 units")


def chosen_compile(
    compile: bool | None,
    device: torch.device,
    flops: float = 0.0,
    was_compiled: bool | None = None,
) -> AutoSetting:
    """Return whether to use torch.compile, and the reason.

    If `compile` is not None, return this value. Otherwise, a GPU run is compiled. A resumed CPU run
    is compiled if `was_compiled` is True, and a new CPU run if `flops` is at least 5e13. If
    torch.compile fails on this CPU, no CPU run is compiled.

    Args:
        compile: the value in the config.
        flops: training FLOPs of this rank in the whole run.
        was_compiled: whether the resumed checkpoint is from a compiled run; None for a new run.
    """
    if compile is not None:
        return AutoSetting(compile, ASKED)
    if device.type == "cuda":
        return AutoSetting(True, "a GPU runs long enough")
    if was_compiled is None and flops < WORTH_COMPILING:
        return AutoSetting(False, f"short run: {flops:.0e} training FLOPs per rank")
    if was_compiled is False:
        return AutoSetting(False, AS_IN_CHECKPOINT)
    # Test the compiler last: the test compiles a function.
    fault = compiler_fault()
    if fault:
        return AutoSetting(False, fault)
    if was_compiled:
        return AutoSetting(True, AS_IN_CHECKPOINT)
    return AutoSetting(True, f"long run: {flops:.0e} training FLOPs per rank")


def planned_compile(
    cfg: TrainConfig, device: torch.device, world_size: int, was_compiled: bool | None = None
) -> AutoSetting:
    """Return whether a run on `world_size` ranks uses torch.compile, and the reason.

    For `was_compiled`, see `chosen_compile`.
    """
    model = cfg.model
    # An estimate from the shape alone, so that all variants of the shape decide alike.
    weights = 12 * model.n_layers * model.dim**2 + model.vocab_size * model.dim
    flops = 6 * cfg.planned_tokens * weights / world_size
    return chosen_compile(cfg.compile, device, flops, was_compiled)


def agreed_compile(
    cfg: TrainConfig, device: torch.device, was_compiled: bool | None
) -> AutoSetting:
    """Decide for all ranks alike whether to use torch.compile; return the decision and the reason.

    Runs that differ only in the attention variant get the same decision, because it depends on an
    estimate of the model size without attention settings. For `was_compiled`, see
    `chosen_compile`. Every rank must call this function.
    """
    choice = planned_compile(cfg, device, dist.get_world_size(), was_compiled)
    # MIN: one rank without a working compiler decides for all ranks.
    everywhere = torch.tensor(int(choice.value), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if choice.value and not everywhere:
        return AutoSetting(False, "torch.compile fails on another rank")
    return choice


def compiler_fault() -> str:
    """Return why torch.compile fails on this CPU, in one line, or "" if torch.compile works."""
    try:
        torch.compile(torch.sin, fullgraph=True)(torch.ones(1))
    except Exception as error:  # For example a missing compiler, missing headers or a full disk.
        cause = str(error).strip().splitlines() or [repr(error)]
        return f"torch.compile fails: {cause[0]}"
    return ""


def for_json(choices: dict[str, AutoSetting]) -> dict[str, dict[str, Any]]:
    """Return, for each setting name, the JSON object {"value": ..., "reason": ...}."""
    entries = {}
    for name, (value, reason) in choices.items():
        if isinstance(value, torch.dtype):
            value = dtype_name(value)
        elif isinstance(value, Enum):
            value = value.value
        if not isinstance(value, (bool, int)):
            value = str(value)
        entries[name] = {"value": value, "reason": reason}
    return entries
