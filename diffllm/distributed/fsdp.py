"""Sharding a decoder with FSDP2, from outside.

Order: activation checkpointing, torch.compile, fully_shard: each wraps what came before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    compile: bool,
    activation_checkpointing: bool,
) -> None:
    """Shard `model` in place over `mesh`: each of `model.layers`, then the rest.

    Gradients arrive averaged over all ranks, in float32. Parameters named in a module's
    `fp32_parameters` stay out: replicated, in float32, their gradients for `average_replicated`.

    Args:
        mesh: dimensions "replicate" and "shard".
        param_dtype: dtype of the all-gathered parameters and of the computation.
    """
    ignored = fp32_parameters(model)
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(
        fully_shard,
        mesh=mesh if mesh["replicate"].size() > 1 else mesh["shard"],
        mp_policy=policy,
        ignored_params=ignored,
    )
    layers: Any = model.layers
    for layer in layers:
        if activation_checkpointing:
            layer.forward = checkpointed(layer.forward)
        if compile:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
        shard(layer, reshard_after_forward=True)
    if compile:
        loss: Any = model.chunk_loss
        model.chunk_loss = torch.compile(loss, fullgraph=True)  # type: ignore[assignment]
    shard(model, reshard_after_forward=False)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, whose activations are computed again in the backward pass."""

    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return run


def fp32_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that modules ask to keep in float32."""
    return {
        getattr(module, name)
        for module in model.modules()
        for name in getattr(module, "fp32_parameters", ())
    }


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(param: Tensor) -> tuple[Tensor, int, torch.Size]:
    """(values held here, their first row, full shape) of a parameter sharded on dimension 0."""
    if not isinstance(param, DTensor):
        return param, 0, param.shape
    _, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return param.to_local(), offset[0] if offset else 0, param.shape
