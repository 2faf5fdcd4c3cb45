"""Expert parallelism from outside: experts stay on their ranks, tokens travel to them and back.

Shapes: M rows (a token once for each expert it goes to), R rows received, D model width,
E experts, n ranks that share them out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh

Sizes = tuple[list[int], list[int], Tensor]
"""Rows to send to each rank, rows to receive from each rank, and how many of the latter go to each
of this rank's experts: (n, E/n) int64, one line a rank."""

Splits = Callable[[Tensor, int, DeviceMesh], Sizes]
"""A function of (rows of each expert (E,) int64, M, mesh) that sizes the exchange."""


def exchanged_splits(counts: Tensor, rows: int, mesh: DeviceMesh) -> Sizes:
    """Exchange the ranks' row counts; the host waits for them, since they size the collectives."""
    sent = counts.view(mesh.size(), -1)
    received = all_to_all_single(sent, None, None, mesh)
    send, receive = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return send, receive, received


def balanced_splits(counts: Tensor, rows: int, mesh: DeviceMesh) -> Sizes:
    """Return sizes for equally many rows per rank and expert, for tensors without data."""
    n = mesh.size()
    send = even_parts(rows, n)
    own = send[mesh.get_local_rank()]
    received = torch.tensor([even_parts(own, len(counts) // n)] * n, device=counts.device)
    return send, [own] * n, received


def even_parts(total: int, n: int) -> list[int]:
    return [total // n + (i < total % n) for i in range(n)]


def share_out(experts: nn.Module, mesh: DeviceMesh, splits: Splits) -> None:
    """Keep this rank's E/n experts in `experts`, and have its forward pass send tokens to theirs.

    The parameters, each (E, ...), become DTensors over the one-dimensional `mesh`. The forward pass
    still takes the tokens of this rank for all E experts: rows (M, D) sorted by expert, weights
    (M,) and counts (E,) to (M, D).
    """
    from torch.distributed.tensor import DTensor, Shard  # half a second

    for name, param in list(experts.named_parameters(recurse=False)):
        own = param.detach().chunk(mesh.size())[mesh.get_local_rank()]
        whole = DTensor.from_local(own.clone(), mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(whole))
    compute = experts.forward

    def forward(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        send, receive, received = splits(counts, len(x), mesh)
        rows = all_to_all_single_autograd(x, receive, send, mesh)
        weights = all_to_all_single_autograd(weights, receive, send, mesh)
        # Rows arrive by rank, then by expert; `order` sorts them by expert, `back` undoes it.
        expert = torch.arange(received.shape[1], device=received.device).repeat(len(received))
        expert = torch.repeat_interleave(expert, received.flatten(), output_size=sum(receive))
        order = expert.argsort(stable=True)
        back = order.argsort()
        rows, weights = _Reorder.apply(rows, order, back), _Reorder.apply(weights, order, back)
        # `torch.func.functional_call` does the same, but would run the module's hooks once more.
        params: dict[str, Any] = experts._parameters
        whole = dict(params)
        params.update({name: param.to_local() for name, param in whole.items()})
        try:
            y = compute(rows, weights, received.sum(0))
        finally:
            params.update(whole)
        return all_to_all_single_autograd(_Reorder.apply(y, back, order), send, receive, mesh)

    # A graph cannot hold what waits for the host.
    experts.forward = torch.compiler.disable(forward)


def expert_ranks(param: Tensor) -> int:
    mesh = getattr(param, "device_mesh", None)
    if mesh is None or "expert" not in (mesh.mesh_dim_names or ()):
        return 1
    return mesh["expert"].size()


class _Reorder(torch.autograd.Function):
    """Reorders rows; the gradient is gathered too, where indexing would scatter it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
