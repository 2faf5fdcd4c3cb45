"""Preparation of a decoder for training from outside: checkpointed, compiled, sharded with FSDP2.

Order: activation checkpointing, torch.compile, fully_shard; each wraps what came before. Where
ranks share out experts, these are shared out and sharded first, and checkpointing is outside of
what is compiled.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from diffllm.distributed.experts import Splits, exchanged_splits, share_out
from diffllm.distributed.gradients import local
from diffllm.distributed.mesh import Meshes
from diffllm.model.init import LocalBlock, whole


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    param_dtype: torch.dtype,
    compile: bool,
    activation_checkpointing: bool,
    splits: Splits = exchanged_splits,
) -> None:
    """Wrap `model` in place: each of `model.layers`, then the rest; several ranks shard it.

    One rank would only copy what it gathers from itself: it keeps its parameters whole, and casting
    them is for `weights.OneRank`. From several, gradients arrive averaged over all ranks, in
    float32; those of experts that ranks share out are for `average_experts`. Parameters named in
    a module's `fp32_parameters` stay out: replicated, in float32, their gradients for
    `average_replicated`. All-gathered parameters and the computation are in `param_dtype`.
    """
    layers: Any = model.layers
    if compile:
        loss: Any = model.chunk_loss
        model.chunk_loss = torch.compile(loss, fullgraph=True)  # type: ignore[assignment]
    if meshes.one_rank:
        for layer in layers:
            wrap_forward(layer, compile, activation_checkpointing, one_graph=True)
        return
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(fully_shard, mp_policy=policy, ignored_params=fp32_parameters(model))
    shard_dense = partial(shard, **over(meshes.dense, "fsdp"))
    for layer in layers:
        experts = getattr(layer.ffn, "experts", None) if meshes.experts else None
        if experts is not None:
            assert meshes.experts is not None
            share_out(experts, meshes.experts["expert"], splits)
            shard(experts, **over(meshes.experts, "shard"), reshard_after_forward=True)
        wrap_forward(layer, compile, activation_checkpointing, one_graph=experts is None)
        shard_dense(layer, reshard_after_forward=True)
    if meshes.experts:
        prefetch(layers)
    shard_dense(model, reshard_after_forward=False)


def over(mesh: DeviceMesh, name: str) -> dict[str, Any]:
    """Return arguments of `fully_shard` for one dimension, with replicas where there are any."""
    return {
        "mesh": mesh["replicate", name] if mesh["replicate"].size() > 1 else mesh[name],
        "shard_placement_fn": partial(placement, mesh[name].size()),
    }


def placement(ranks: int, param: nn.Parameter) -> Shard | None:
    """Return the dimension of experts (E, out, in) that FSDP shards; None for its default, 0.

    The first that `ranks` divides: there can be more ranks than experts.
    """
    if param.ndim != 3:
        return None
    shape = local(param).shape
    even = [dim for dim, size in enumerate(shape) if size % ranks == 0]
    # DTensor misplaces a rank's part of another's part where they do not come out even.
    assert even or not isinstance(param, DTensor), "TrainConfig.check_world rules this out"
    return Shard(even[0]) if even else None


def prefetch(layers: Any) -> None:
    """Make each layer gather its experts, and the layer behind it, as soon as it starts.

    By itself, FSDP gathers ahead of the device as far as the host runs ahead, which here is up to
    the next exchange of counts. In the backward pass the host waits only where activations are
    computed again, and FSDP gathers what comes next by itself.
    """
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        experts = getattr(layer.ffn, "experts", None)
        layer.set_modules_to_forward_prefetch([m for m in (experts, following) if m is not None])


def wrap_forward(
    layer: nn.Module, compile: bool, activation_checkpointing: bool, one_graph: bool
) -> None:
    """Checkpoint and compile the forward pass of a layer; `one_graph` if it is one graph.

    Checkpointing inside a graph leaves it to the compiler what to keep. A layer that exchanges rows
    is several graphs, which only checkpointing outside of them can hold together.
    """
    if activation_checkpointing and one_graph:
        layer.forward = checkpointed(layer.forward)
    if compile:
        if not one_graph:
            compile_between_exchanges(layer.ffn)
        layer.forward = torch.compile(layer.forward, fullgraph=one_graph)
    if activation_checkpointing and not one_graph:
        layer.forward = checkpointed(layer.forward)


def compile_between_exchanges(ffn: Any) -> None:
    """Compile what the graphs of a layer that exchanges rows leave out, in graphs of its own.

    Each step has another number of rows. The shared expert stays apart: a graph waits for all of
    its inputs, so one that also took the rows on their way would begin when they have arrived.
    """
    ffn.experts.activation = torch.compile(ffn.experts.activation, dynamic=True)
    if ffn.shared is not None:
        shared = torch.compile(ffn.shared.forward, fullgraph=True)
        ffn.shared.forward = torch.compiler.disable(shared)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with activations that are computed again in the backward pass."""

    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return run


def fp32_parameters(model: nn.Module) -> set[nn.Parameter]:
    """List the parameters that modules ask to keep in float32."""
    return {
        getattr(module, name)
        for module in model.modules()
        for name in getattr(module, "fp32_parameters", ())
    }


def local_block(param: Tensor) -> LocalBlock:
    """Return the block of a parameter, sharded or not, that this rank holds."""
    if not isinstance(param, DTensor):
        return whole(param)
    _, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return param.to_local(), offset, param.shape
