"""The model of a run on its device, sharded over the ranks, with its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.config import TrainConfig
from diffllm.distributed.experts import Splits, exchanged_splits
from diffllm.distributed.fsdp import OneRank, Sharded, Weights, parallelize
from diffllm.distributed.mesh import Meshes, build_meshes
from diffllm.metrics.spikes import WINDOW128_SIGMAS, window128
from diffllm.model import Transformer, without_storage
from diffllm.model.attention.ops import Documents
from diffllm.model.auto_setting import AutoSetting
from diffllm.optim import Guard, build_optimizer, optimizer_tensors
from diffllm.training.choices import chosen_compile, chosen_precision


@dataclass(frozen=True)
class Training:
    """The model, the optimizer and the constants that a training step works with."""

    cfg: TrainConfig
    device: torch.device
    meshes: Meshes
    model: Any  # a Transformer, on several ranks an FSDPModule too
    weights: Weights
    params: dict[str, Tensor]
    """The float32 parameters by name: sharded, replicated or whole."""
    optimizer: torch.optim.AdamW
    guard: Guard
    choices: dict[str, AutoSetting]
    """Settings that may depend on device or model size, by name, each with its reason."""
    micro_batch_size: int
    """Sequences per micro-batch of this rank."""
    micro_batches: int
    """Micro-batches of this rank per step."""
    tokens: int
    """Tokens of the global batch, ignored targets included."""
    compiled: bool
    """Whether blocks and loss are compiled."""
    documents: Callable[[Tensor], Documents] | None = None
    """Finds the documents of a CPU batch (b, T) and moves their boundaries to the device; None if
    documents are not masked."""
    ignores_targets: bool = False
    """Whether some targets may be negative, so that a step must count the others."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the computation; parameters and their gradients are float32."""
        return self.choices["precision"].value

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds as tensors, by flat name."""
        optim = optimizer_tensors(self.optimizer, self.params)
        return {
            **{f"model.{name}": param.detach() for name, param in self.params.items()},
            **{f"model.{name}": buffer for name, buffer in self.model.router_state().items()},
            **{f"optim.{name}": value for name, value in optim.items()},
        }


class ShardedModel(NamedTuple):
    """A model that is wrapped for training but has no storage yet."""

    model: Transformer
    meshes: Meshes
    choices: dict[str, AutoSetting]
    """The choices of precision and compilation."""


def build(
    cfg: TrainConfig,
    device: torch.device,
    document_end: int | None = None,
    ignores_targets: bool = False,
    compile: AutoSetting | None = None,
) -> Training:
    """Build the sharded, initialised model and its optimizer; needs a process group.

    Args:
        document_end: the token that ends a document; None: documents are not masked.
        ignores_targets: whether some targets may be negative, which losses ignore.
        compile: whether to compile; chosen as for a short run by default.
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
    """Make the model on the meta device, wrapped for training on `device`; needs a process group.

    Args:
        splits: returns the number of rows that experts get from other ranks.
        compile: whether to compile; chosen as for a short run by default.
    """
    precision = chosen_precision(cfg.precision, device)
    compile = compile or chosen_compile(cfg.compile, device)
    meshes = build_meshes(cfg.parallel, device.type, dist.get_world_size())
    model = without_storage(cfg.model)
    checkpointing = cfg.activation_checkpointing
    parallelize(model, meshes, precision.value, compile.value, checkpointing, splits)
    return ShardedModel(model, meshes, {"precision": precision, "compile": compile})


def allocated(
    cfg: TrainConfig,
    device: torch.device,
    sharded: ShardedModel,
    document_end: int | None = None,
    ignores_targets: bool = False,
) -> Training:
    """Allocate the model on `device`, with uninitialised parameters, and its optimizer."""
    model, meshes, choices = sharded
    model.to_empty(device=device)
    dtype: torch.dtype = choices["precision"].value
    one = meshes.one_rank
    weights: Weights = OneRank(model, dtype) if one else Sharded(model, cfg.parallel.reduce)
    optimizer = build_optimizer(weights.params, cfg.optim)
    guard = Guard(cfg.train.skip_step, window128().window, WINDOW128_SIGMAS, device)
    of_model = model.choices(device, dtype, documents=document_end is not None)
    choices = {**choices, **weights.choices, **of_model}
    micro_batch_size, micro_batches = cfg.micro_batches(dist.get_world_size())
    documents = None
    if document_end is not None:
        documents = partial(masked_documents, document_end, device)
    return Training(
        cfg=cfg,
        device=device,
        meshes=meshes,
        model=model,
        weights=weights,
        params=weights.params,
        optimizer=optimizer,
        guard=guard,
        choices=choices,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        tokens=cfg.global_batch_size * cfg.seq_len,
        compiled=choices["compile"].value,
        documents=documents,
        ignores_targets=ignores_targets,
    )


def masked_documents(end: int, device: torch.device, inputs: Tensor) -> Documents:
    """Find the documents of a CPU batch (b, T), which end with the token `end`, on `device`."""
    return Documents.of(inputs, end).to(device)
