"""Gradient reductions that FSDP2 does not do."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from diffllm.distributed.fsdp import local


def average_replicated(params: Iterable[Tensor]) -> None:
    """Average the gradients of replicated parameters over all ranks, in one packed collective."""
    grads = [p.grad for p in params if p.grad is not None and not isinstance(p.grad, DTensor)]
    if not grads or dist.get_world_size() == 1:
        return
    packed = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(packed)
    packed /= dist.get_world_size()
    for grad, part in zip(grads, packed.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def global_norm(grads: list[Tensor], mesh: DeviceMesh) -> Tensor:
    """L2 norm of all gradients, a float32 scalar equal on every rank; no host synchronisation."""
    sharded = [local(g) for g in grads if isinstance(g, DTensor)]
    replicated = [g for g in grads if not isinstance(g, DTensor)]
    total = sum_of_squares(sharded)
    if mesh["shard"].size() > 1:
        dist.all_reduce(total, group=mesh["shard"].get_group())
    if replicated:
        total = total + sum_of_squares(replicated)
    return total.sqrt()


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Float32 scalar."""
    return torch.stack(torch._foreach_norm(tensors)).square().sum()


def clip_(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their norm does not exceed `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(g) for g in grads], scale)
