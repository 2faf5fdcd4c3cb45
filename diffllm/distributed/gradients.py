"""Average gradients where FSDP2 does not, and compute gradient norms."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diffllm.distributed.experts import expert_ranks


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # Importing DTensor would take half a second.


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


class Norms(NamedTuple):
    """L2 norms of several tensors; the norm of a sharded tensor includes all shards.

    Norms may differ between ranks by rounding errors.
    """

    names: list[str]
    squares: Tensor
    """Squared norm of each tensor, (len(names),) float64."""
    total: Tensor
    """Norm of all tensors together, scalar float32."""


def finish_gradients(params: Mapping[str, Tensor], mesh: DeviceMesh) -> Norms:
    """Average the gradients of `params` that FSDP2 has not fully averaged; return gradient norms.

    FSDP2 does not average gradients of unsharded parameters. If experts are divided between ranks,
    FSDP2 averages the experts' gradients over only some ranks. Change gradients in place. The mesh
    dimension "fsdp" shards the parameters. The host does not wait for the device. Every rank must
    call this.
    """
    trained: dict[str, Tensor] = {}
    grads: list[Tensor] = []
    replicated: list[Tensor] = []
    for name, param in params.items():
        if param.grad is None:
            continue
        trained[name] = param
        grads.append(local(param.grad))
        if not is_dtensor(param.grad):
            replicated.append(param.grad)
    if dist.get_world_size() > 1:
        # Every rank has the same parameters without shards, so all ranks call it or none does.
        if replicated:
            average(replicated)
        for param, grad in zip(trained.values(), grads, strict=True):
            # An expert's gradient already sums over the ranks that share the experts; FSDP averages
            # only over the remaining ranks.
            ranks = expert_ranks(param)
            if ranks > 1:
                grad.div_(ranks)
    return norms(trained, grads, mesh)


def average(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over all ranks. Every rank must call this."""
    # One collective for all: these tensors are small, and each collective has a latency.
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(packed)
    packed /= dist.get_world_size()
    sizes = [tensor.numel() for tensor in tensors]
    parts = packed.split(sizes)
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def norms(params: Mapping[str, Tensor], tensors: list[Tensor], mesh: DeviceMesh) -> Norms:
    """Compute the L2 norms of whole tensors from their shards, with one collective.

    `tensors` contains this rank's shard of one tensor per parameter, for example of the gradients.
    The mesh dimension "fsdp" shards the parameters. The host does not wait for the device. Every
    rank must call this.
    """
    tensor_by_name = dict(zip(params, tensors, strict=True))
    sharded = []
    replicated = []
    for name, param in params.items():
        if is_dtensor(param):
            sharded.append(name)
        else:
            replicated.append(name)
    # Sharded tensors first: one all-reduce of a slice sums their squares over the shards.
    names = sharded + replicated
    ordered = [tensor_by_name[name] for name in names]
    norms_of_rank = torch.stack(torch._foreach_norm(ordered))
    # float64: squares of float32 norms overflow above 1.8e19.
    squares = norms_of_rank.double().square()
    shards = mesh.get_group("fsdp")
    if dist.get_world_size(shards) > 1:
        # Not over all ranks: replicas have the same values, and would count several times.
        dist.all_reduce(squares[: len(sharded)], group=shards)
    total = squares.sum().sqrt()
    return Norms(names, squares, total.float())


def parameter_norm(params: Mapping[str, Tensor], mesh: DeviceMesh) -> Tensor:
    """Compute the L2 norm of `params` over all shards. Every rank must call this."""
    values = [local(p).detach() for p in params.values()]
    return norms(params, values, mesh).total


def copies(params: Mapping[str, Tensor]) -> list[Tensor]:
    return [local(p).detach().clone() for p in params.values()]


def change_norm(params: Mapping[str, Tensor], before: list[Tensor], mesh: DeviceMesh) -> Tensor:
    """Compute the L2 norm of the change of `params` since the call `before = copies(params)`.

    The tensors in `before` are overwritten. The mesh dimension "fsdp" shards the parameters. Every
    rank must call this.
    """
    values = [local(p).detach() for p in params.values()]
    # In place: a difference in new tensors would need the memory of a third copy.
    torch._foreach_sub_(before, values)
    return norms(params, before, mesh).total
