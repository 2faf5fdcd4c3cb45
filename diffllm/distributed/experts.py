"""Expert parallelism: ranks divide the experts of a layer, and exchange tokens.

A token has one row for each expert that the router selects. Shapes: M rows of a rank before the
exchange, R rows after the exchange, D model width, E experts, n ranks that share the experts.
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
"""Number of rows to send to each rank, number of rows to receive from each rank, and number of
received rows per sending rank and expert of this rank, (n, E/n) int64."""

Splits = Callable[[Tensor, int, DeviceMesh], Sizes]
"""Computes the sizes of an exchange from (number of rows per expert (E,) int64, M, mesh)."""


def exchanged_splits(counts: Tensor, rows: int, mesh: DeviceMesh) -> Sizes:
    """Exchange row counts between ranks; return the sizes of the following exchange of rows.

    Returns (send, receive, table). `send` and `receive` are lists: the number of rows to send to
    each rank, and to receive from each rank. `table` is a tensor (n, E/n): the number of rows to
    receive from each rank for each expert of this rank. The host waits for the device, because the
    exchange of rows needs the lists on the host.

    Args:
        counts: number of this rank's rows for each of the E experts, (E,) int64.
        rows: not used, but part of the signature `Splits`.
        mesh: the n ranks between which the experts are divided.
    """
    sent_counts = counts.view(mesh.size(), -1)
    received_counts = all_to_all_single(sent_counts, None, None, mesh)
    # One copy for both lists: each copy makes the host wait for the device.
    totals = torch.stack([sent_counts.sum(1), received_counts.sum(1)])
    send, receive = totals.tolist()
    return send, receive, received_counts


def balanced_splits(counts: Tensor, rows: int, mesh: DeviceMesh) -> Sizes:
    """Return the sizes of an exchange of rows in which all experts get equally many rows.

    This function replaces `exchanged_splits` in simulations; ranks do not communicate. `rows` is
    the number of rows of this rank. `counts` is only used for the number of experts and the device.
    """
    n = mesh.size()
    send = even_parts(rows, n)
    # All ranks have equally many rows, so all send equally many to this rank.
    rows_from_rank = send[mesh.get_local_rank()]
    receive = [rows_from_rank] * n
    rows_per_expert = even_parts(rows_from_rank, len(counts) // n)
    received_counts = torch.tensor([rows_per_expert] * n, device=counts.device)
    return send, receive, received_counts


def even_parts(total: int, n: int) -> list[int]:
    size, remainder = divmod(total, n)
    larger_parts = [size + 1] * remainder
    return larger_parts + [size] * (n - remainder)


def share_out(experts: nn.Module, mesh: DeviceMesh, splits: Splits) -> None:
    """Divide the experts of a layer between ranks; the forward pass then exchanges tokens.

    Each rank stores E/n of the E experts. The parameters, each (E, ...), become DTensors. The
    forward pass keeps its signature. Its arguments are the M token rows of this rank, (M, D), which
    are sorted by expert; the router weight of each row, (M,); and the number of rows per expert,
    (E,). It returns one output per row, (M, D).

    Args:
        experts: module with the experts, changed in place.
        mesh: one-dimensional mesh of the n ranks.
        splits: function that computes how many rows the ranks exchange.
    """
    from torch.distributed.tensor import DTensor, Shard  # A slow import: half a second.

    rank = mesh.get_local_rank()
    # A list, because the loop replaces the parameters.
    for name, param in list(experts.named_parameters(recurse=False)):
        parts = param.detach().chunk(mesh.size())
        # Clone: a chunk is a view, which would keep the parameter with all experts.
        part = parts[rank].clone()
        divided = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(divided))
    compute = experts.forward

    def forward(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        # Every rank must reach the exchanges, also a rank without rows.
        send, receive, received_counts = splits(counts, len(x), mesh)
        rows = all_to_all_single_autograd(x, receive, send, mesh)
        weights = all_to_all_single_autograd(weights, receive, send, mesh)
        # Rows arrive by rank, then by expert; `order` sorts them by expert, `back` undoes it.
        ranks, experts_of_rank = received_counts.shape
        expert_of_block = torch.arange(experts_of_rank, device=received_counts.device).repeat(ranks)
        block_sizes = received_counts.flatten()
        # Without `output_size`, the host would wait for the device to learn the size.
        expert_of_row = torch.repeat_interleave(
            expert_of_block, block_sizes, output_size=sum(receive)
        )
        order = expert_of_row.argsort(stable=True)
        back = order.argsort()
        rows = _Reorder.apply(rows, order, back)
        weights = _Reorder.apply(weights, order, back)
        # `compute` needs plain tensors, so replace the DTensors during the call.
        # `torch.func.functional_call` would run the hooks of `experts` a second time.
        params: dict[str, Any] = experts._parameters
        divided = dict(params)
        plain = {name: param.to_local() for name, param in divided.items()}
        try:
            params.update(plain)
            y = compute(rows, weights, received_counts.sum(0))
        finally:
            params.update(divided)
        # Rows return to their ranks in the order in which they came.
        y = _Reorder.apply(y, back, order)
        return all_to_all_single_autograd(y, send, receive, mesh)

    # The host waits for row counts in `splits`, which a compiled graph cannot contain.
    experts.forward = torch.compiler.disable(forward)


def expert_ranks(param: Tensor) -> int:
    """Return the number of ranks that share the experts of `param`; 1 for other parameters."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None or mesh.mesh_dim_names is None:
        return 1
    if "expert" not in mesh.mesh_dim_names:
        return 1
    return mesh["expert"].size()


class _Reorder(torch.autograd.Function):
    """Return rows[order] in the forward pass, and grad[back] in the backward pass.

    `order` is a permutation, and `back` is its inverse. Plain indexing has a slower backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
