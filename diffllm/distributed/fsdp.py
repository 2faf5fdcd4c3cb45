"""Prepare a decoder for training: activation checkpointing, torch.compile and FSDP2.

Without expert parallelism, the three are applied in this order. With expert parallelism, the
experts are first divided between ranks; torch.compile then precedes activation checkpointing.

`Weights` contains the float32 parameters that the optimizer updates. On one rank, FSDP2 would cast
and copy all parameters twice per micro-batch; `OneRank` keeps copies in the compute dtype instead.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from diffllm.distributed.experts import Splits, exchanged_splits, expert_ranks, share_out
from diffllm.distributed.gradients import is_dtensor, local
from diffllm.distributed.mesh import Meshes, Reduce
from diffllm.distributed.recompute import ActivationCheckpointing, checkpointed
from diffllm.model.auto_setting import ASKED, AutoSetting
from diffllm.model.init import LocalBlock, unsharded
from diffllm.model.transformer import Transformer

INDUCTOR: dict[str, Any] = {"realize_reads_threshold": 8}
"""Options of torch.compile for decoder layers. By default, Inductor stores a reused value that
reads more than four tensors. In gated attention and DIFF V2, one such value is the gradient of the
layer's input, a float32 sum over four projections."""


def parallelize(
    model: Transformer,
    meshes: Meshes,
    param_dtype: torch.dtype,
    compile: bool,
    recompute: ActivationCheckpointing,
    splits: Splits = exchanged_splits,
) -> None:
    """Prepare a decoder for training; `model` is changed in place.

    Apply activation checkpointing, and torch.compile if `compile` is true, to each of
    `model.layers`. On several ranks, FSDP2 shards the parameters and averages gradients in float32.
    After the last backward pass of each step, `finish_gradients` must average the gradients that
    FSDP2 does not average.

    Args:
        param_dtype: dtype in which FSDP2 computes; not used on one rank.
        splits: function that computes how many rows ranks exchange; only for expert parallelism.
    """
    layers: Any = model.layers
    if compile:
        model.chunk_loss = torch.compile(model.chunk_loss, fullgraph=True)
    if meshes.one_rank:
        for layer in layers:
            wrap_forward(layer, compile, recompute, one_graph=True)
        return
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(fully_shard, mp_policy=policy, ignored_params=fp32_parameters(model))
    shard_dense = partial(shard, **over(meshes.dense, "fsdp"))
    for layer in layers:
        experts = experts_of(layer) if meshes.experts else None
        if experts is not None:
            assert meshes.experts is not None
            # Before the layer, because FSDP2 omits the parameters that a submodule has sharded.
            share_out(experts, meshes.experts["expert"], splits)
            shard(experts, **over(meshes.experts, "shard"), reshard_after_forward=True)
        wrap_forward(layer, compile, recompute, one_graph=experts is None)
        shard_dense(layer, reshard_after_forward=True)
    if meshes.experts:
        prefetch(layers)
    # The root last: FSDP2 omits the parameters that a layer has sharded. The backward pass
    # begins with the root's parameters, so keep them gathered.
    shard_dense(model, reshard_after_forward=False)
    for method in model.forward_methods:
        register_fsdp_forward_method(model, method)


def experts_of(layer: Any) -> nn.Module | None:
    return getattr(layer.ffn, "experts", None)


def prefetch(layers: Any) -> None:
    """Let FSDP2 gather the experts of a layer, and the next layer, while a layer computes."""
    # By default FSDP prefetches only up to the next exchange of row counts.
    next_layers = [*layers[1:], None]
    for layer, next_layer in zip(layers, next_layers, strict=True):
        modules = []
        for module in (experts_of(layer), next_layer):
            if module is not None:
                modules.append(module)
        layer.set_modules_to_forward_prefetch(modules)


def over(mesh: DeviceMesh, name: str) -> dict[str, Any]:
    """Return the `fully_shard` arguments that shard parameters over the mesh dimension `name`.

    If the mesh dimension "replicate" has several ranks, parameters are also replicated over that
    dimension (HSDP).
    """
    from torch.distributed.tensor import Shard

    def placement(param: nn.Parameter) -> Shard | None:
        ranks = mesh[name].size()
        dim = shard_dim(local(param).shape, ranks)
        # DTensor computes wrong offsets if it shards an uneven part of a shard.
        is_even = dim is not None or param.ndim != 3
        assert is_even or not is_dtensor(param), "TrainConfig.check_world rules this out"
        if dim is None:
            return None
        return Shard(dim)

    is_replicated = mesh["replicate"].size() > 1
    used_mesh = mesh["replicate", name] if is_replicated else mesh[name]
    return {"mesh": used_mesh, "shard_placement_fn": placement}


def shard_dim(shape: Sequence[int], ranks: int) -> int | None:
    """Return the dimension in which FSDP2 shards a parameter over `ranks`; None means dimension 0.

    For a parameter with three dimensions, such as expert weights, return the first dimension whose
    size is divisible by `ranks`. If there is no such dimension, or for any other parameter, return
    None.
    """
    if len(shape) != 3:
        return None
    for dim, size in enumerate(shape):
        if size % ranks == 0:
            return dim
    return None


def stored_values(
    model: Any, sizes: tuple[int, int, int], rank: int
) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter of `model` and the number of its values that `rank` stores.

    The numbers are those after `parallelize`, but need neither a process group nor storage.

    Args:
        model: a decoder that is not yet sharded.
        sizes: `ParallelConfig.sizes`, the numbers of replicas, shards and expert ranks.
    """
    replicate, shard, expert = sizes
    # `parallelize` excludes these from FSDP2, and shards nothing on one rank.
    replicated = fp32_parameters(model)
    if replicate * shard * expert == 1:
        replicated = set(model.parameters())
    divided: set[nn.Parameter] = set()
    if expert > 1:
        for mixture in model.mixtures:
            divided.update(mixture.experts.parameters())
    for param in model.parameters():
        if param in replicated:
            yield param, param.numel()
        elif param in divided:
            # The mesh of experts has the dimensions replicate, shard and expert; expert is last.
            experts_of_rank = (len(param) // expert, *param.shape[1:])
            index = rank // expert % shard
            yield param, shard_size(experts_of_rank, shard, index)
        else:
            ranks = shard * expert
            index = rank % ranks
            yield param, shard_size(param.shape, ranks, index)


def shard_size(shape: Sequence[int], ranks: int, index: int) -> int:
    """Return the number of values in shard `index` of `ranks` shards of a parameter."""
    dim = shard_dim(shape, ranks) or 0
    # As in `torch.chunk`: the last shards may have fewer rows, or none.
    rows = math.ceil(shape[dim] / ranks)
    rows_from_here = max(0, shape[dim] - index * rows)
    rows_of_shard = min(rows, rows_from_here)
    return rows_of_shard * math.prod(shape) // shape[dim]


def wrap_forward(
    layer: nn.Module, compile: bool, recompute: ActivationCheckpointing, one_graph: bool
) -> None:
    """Add checkpointing to `layer.forward`, and torch.compile if `compile` is true.

    If `one_graph` is true, torch.compile is added last and must produce a single graph. Otherwise,
    torch.compile is added first and may produce several graphs. `one_graph` must be false if the
    layer exchanges tokens between ranks.
    """
    if one_graph:
        layer.forward = checkpointed(layer.forward, recompute, one_graph)
    if compile and not one_graph:
        ffn: Any = layer.ffn
        # The number of rows differs from step to step.
        ffn.experts.activation = torch.compile(ffn.experts.activation, dynamic=True)
        if ffn.shared is not None:
            # A separate graph for shared experts need not wait for rows from other ranks.
            shared = torch.compile(ffn.shared.forward, fullgraph=True)
            ffn.shared.forward = torch.compiler.disable(shared)
    if compile:
        layer.forward = torch.compile(layer.forward, fullgraph=one_graph, options=INDUCTOR)
    if not one_graph:
        layer.forward = checkpointed(layer.forward, recompute, one_graph)


def fp32_parameters(model: nn.Module) -> set[nn.Parameter]:
    params = set()
    for module in model.modules():
        for name in getattr(module, "fp32_parameters", ()):
            params.add(getattr(module, name))
    return params


LAST_UP_TO = 8 * 2**30
"""Maximum bytes of a rank's float32 gradients for which `Reduce.last` is the default."""


class Weights:
    """Base class for the parameters of this rank; see the subclasses `OneRank` and `Sharded`."""

    choices: dict[str, AutoSetting]
    """Value of each automatic setting, with the reason."""
    params: dict[str, Tensor]
    """Float32 parameters that the optimizer updates, by name."""

    def block(self, param: Tensor) -> LocalBlock:
        """Return this rank's shard of a parameter, the shard's offset, and the full shape."""
        raise NotImplementedError

    def begin_micro_batch(self, last: bool) -> None:
        """Prepare a forward and backward pass; `last` marks the last micro-batch of a step."""

    def changed(self) -> None:
        """Copy the updated `params` to the tensors that the model computes with."""

    def reshard(self) -> None:
        """Free parameters gathered from other ranks, after a forward pass without backward pass."""


class OneRank(Weights):
    """Float32 parameters on a single rank, and their copies in the compute dtype for the model.

    The backward pass adds the gradient of each copy to the float32 gradient of the parameter.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.choices: dict[str, AutoSetting] = {}
        self.params: dict[str, Tensor] = dict(model.named_parameters())
        self.origins: dict[Tensor, Tensor] = {}
        fp32_only = fp32_parameters(model)
        for module in model.modules():
            origins: dict[str, nn.Parameter] = {}
            for name, param in module.named_parameters(recurse=False):
                if param not in fp32_only and param.dtype != dtype:
                    origins[name] = param
            adjacent = getattr(module, "adjacent", ())
            copies = empty_copies(origins, adjacent, dtype)
            for name, empty in copies.items():
                origin = origins[name]
                copy = nn.Parameter(empty)
                # The gradient moves to the float32 parameter at once, so that micro-batches are
                # added in float32 and only one gradient exists per parameter.
                copy.register_post_accumulate_grad_hook(partial(hand_over, origin))
                self.origins[copy] = origin
                setattr(module, name, copy)

    def block(self, param: Tensor) -> LocalBlock:
        return unsharded(self.origins.get(param, param))

    @torch.no_grad()
    def changed(self) -> None:
        if self.origins:
            copies = list(self.origins)
            params = list(self.origins.values())
            torch._foreach_copy_(copies, params)


def empty_copies(
    params: dict[str, nn.Parameter], adjacent: tuple[str, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Allocate an uninitialised tensor of type `dtype` for each parameter; return tensors by name.

    Args:
        params: parameters of one module by name.
        adjacent: names of three-dimensional parameters whose shapes may differ only in dimension 1.
            Their new tensors are slices of one tensor along dimension 1.
    """
    copies = {}
    for name, param in params.items():
        if name not in adjacent:
            copies[name] = torch.empty_like(param, dtype=dtype)
    neighbours = [name for name in adjacent if name in params]
    if not neighbours:
        return copies
    sizes = [params[name].shape[1] for name in neighbours]
    first = params[neighbours[0]]
    n_experts, _, width = first.shape
    together = first.new_empty((n_experts, sum(sizes), width), dtype=dtype)
    slices = together.split(sizes, dim=1)
    return copies | dict(zip(neighbours, slices, strict=True))


def hand_over(param: Tensor, copy: Tensor) -> None:
    assert copy.grad is not None
    if param.grad is None:
        param.grad = copy.grad.to(param.dtype)
    else:
        param.grad += copy.grad
    copy.grad = None


class Sharded(Weights):
    """Parameters sharded over ranks by FSDP2, which casts and gathers them for computation."""

    def __init__(self, model: Any, reduce: Reduce | None):
        self.model = model
        self.params: dict[str, Tensor] = dict(model.named_parameters())
        self.choices = {"reduce": chosen_reduce(reduce, self.params.values())}
        self.reduce: Reduce = self.choices["reduce"].value

    def block(self, param: Tensor) -> LocalBlock:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if not isinstance(param, DTensor):
            return unsharded(param)
        _, offset = compute_local_shape_and_global_offset(
            param.shape, param.device_mesh, param.placements
        )
        return param.to_local(), offset, param.shape

    def begin_micro_batch(self, last: bool) -> None:
        is_reducing = last or self.reduce is Reduce.every
        self.model.set_requires_gradient_sync(is_reducing)
        self.model.set_requires_all_reduce(last)  # HSDP: once per step.

    def reshard(self) -> None:
        self.model.reshard()


def chosen_reduce(setting: Reduce | None, params: Iterable[Tensor]) -> AutoSetting:
    """Choose whether ranks sum gradients once per step or after each micro-batch.

    The result also contains the reason. If the config value `setting` is not None, use it.
    Otherwise, sum once per step if the float32 gradients of a rank have at most 8 GiB, and after
    each micro-batch if they have more.
    """
    if setting is not None:
        return AutoSetting(setting, ASKED)
    size = 0
    for param in params:
        # Each rank has gradients only for its share of the experts; float32 has 4 bytes.
        size += 4 * (param.numel() // expert_ranks(param))
    value = Reduce.last if size <= LAST_UP_TO else Reduce.every
    return AutoSetting(value, f"a float32 gradient of {size / 2**30:.2g} GiB on every rank")
