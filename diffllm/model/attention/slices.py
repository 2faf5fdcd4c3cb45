"""Context parallelism: ranks hold slices of sequences, and exchange heads around attention.

Each sequence of T tokens is divided between C ranks: rank c holds the tokens c t to (c + 1) t - 1,
with t = T / C. Before the attention kernel, ranks exchange heads, so that each rank has whole
sequences of some heads (DeepSpeed-Ulysses, arXiv 2309.14509). A second exchange returns the result.

Shapes: B batch, H query heads, K key heads, V value heads, d width of a query or key head, dv width
of a value head. Key head j belongs to value head j % V. A unit of the exchange is one value head
with its K / V keys and their queries. If C > V, values and keys are repeated C / V times, and the
queries of a key head are divided.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slices(NamedTuple):
    """The ranks that share each sequence, in the order of their slices.

    `mean`, `gather`, `pick` and `around` are collectives: all these ranks must call them.
    """

    group: Any
    """Name of the process group; a text, because compiled graphs compare texts cheaply."""
    rank: int
    """Index of this rank's slice."""
    size: int
    """Number of slices of each sequence, C."""

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's slice of x (B, T, ...): (B, t, ...)."""
        length = x.shape[1] // self.size
        start = self.rank * length
        return x[:, start : start + length]

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the slices, without a gradient."""
        from torch.distributed._functional_collectives import all_reduce

        total = all_reduce(x.detach(), "sum", self.group)
        return total / self.size

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole sequences of the slices x (B, t, ...), without a gradient."""
        from torch.distributed import _functional_collectives as collectives

        # The name all_gather_tensor of torch 2.11 is deprecated from torch 2.13 on.
        all_gather = getattr(collectives, "all_gather_single", None)
        if all_gather is None:
            all_gather = collectives.all_gather_tensor
        return all_gather(x.detach().contiguous(), 1, self.group)

    def pick(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the entries of x (B, t, ...) at positions (N,) of the whole sequences."""
        from torch.distributed._functional_collectives import all_reduce

        length = x.shape[1]
        offsets = positions - self.rank * length
        is_inside = (offsets >= 0) & (offsets < length)
        # Positions of other ranks get any index in the slice; their entries are replaced by 0.
        offsets = offsets.clamp(0, length - 1)
        entries = x.detach()[:, offsets]
        other_dimensions = [1] * (x.ndim - 2)
        is_inside = is_inside.view(1, -1, *other_dimensions)
        entries = torch.where(is_inside, entries, 0)
        # Exactly one rank holds each position, so the sum adds zeros to its entry.
        return all_reduce(entries, "sum", self.group)

    def heads(self, n_heads: int, n_keys: int, n_values: int) -> list[int]:
        """Return the query heads that this rank has between the exchanges, in their order."""
        queries_per_key = n_heads // n_keys
        copies = max(1, self.size // n_values)
        units_per_rank = max(1, n_values // self.size)
        # The copies of a key head divide its queries.
        queries_per_copy = queries_per_key // copies
        first_unit = self.rank * units_per_rank
        heads: list[int] = []
        for first_key in range(0, n_keys, n_values):
            for unit in range(first_unit, first_unit + units_per_rank):
                value, copy = divmod(unit, copies)
                key = first_key + value
                first = key * queries_per_key + copy * queries_per_copy
                heads += range(first, first + queries_per_copy)
        return heads

    def around(
        self,
        kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Call `kernel` with whole sequences of some heads, and return its result for this slice.

        Args:
            kernel: maps q (B, T, h, d), k and v to (B, T, h, dv), for some of the heads.
            q: (B, t, H, d). k: (B, t, K, d). v: (B, t, V, dv).
        """
        batch, length, n_keys, d = k.shape
        n_values, dv = v.shape[2:]
        keys_per_value = n_keys // n_values
        copies = max(1, self.size // n_values)
        values_per_rank = max(1, n_values // self.size)
        n_copied_keys = n_keys * copies
        n_copied_values = n_values * copies
        queries = self._units(q, n_keys, n_values)
        # No names for the repeated heads, so that their memory is freed when they are grouped.
        keys = self._units(k.repeat_interleave(copies, 2), n_copied_keys, n_copied_values)
        values = self._units(v.repeat_interleave(copies, 2), n_copied_values, n_copied_values)
        widths = [queries.shape[-1], keys.shape[-1], values.shape[-1]]
        # One exchange of q, k and v together, because each exchange waits for all ranks.
        sequences = torch.cat((queries, keys, values), dim=-1)  # (C, B, t, sum of widths)
        sequences = self._exchange(sequences)
        sequences = sequences.transpose(0, 1)
        sequences = sequences.reshape(batch, self.size * length, -1)
        all_q, all_k, all_v = sequences.split(widths, dim=-1)
        all_q = all_q.unflatten(-1, (-1, d))
        all_k = all_k.unflatten(-1, (keys_per_value * values_per_rank, d))
        all_v = all_v.unflatten(-1, (values_per_rank, dv))
        out = kernel(all_q, all_k, all_v)  # (B, T, heads of this rank, dv)
        out = out.reshape(batch, self.size, length, -1)
        heads = self._exchange(out.transpose(0, 1))  # (C, B, t, heads of a rank * dv)
        heads = heads.view(self.size, batch, length, keys_per_value, values_per_rank, -1, dv)
        # The ranks divide the value heads, so the index of the rank precedes that of the value.
        heads = heads.movedim(0, 3)
        return heads.reshape(batch, length, q.shape[2], dv)

    def _units(self, x: Tensor, n_keys: int, n_values: int) -> Tensor:
        """Group the heads of x (B, t, heads, width) by rank: (C, B, t, heads of a rank * width)."""
        batch, length, n_heads, width = x.shape
        keys_per_value = n_keys // n_values
        values_per_rank = max(1, n_values // self.size)
        heads_per_copy = n_heads // (keys_per_value * self.size * values_per_rank)
        grouped = x.reshape(
            batch, length, keys_per_value, self.size, values_per_rank, heads_per_copy, width
        )
        return grouped.movedim(3, 0).flatten(3)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send x[c] to rank c, for each rank c; return the received parts in the order of ranks."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        sizes = [1] * self.size
        return all_to_all_single_autograd(x.contiguous(), sizes, sizes, self.group)


def degrees(n_heads: int, n_keys: int, n_values: int) -> list[int]:
    """Return the possible numbers of slices for these numbers of query, key and value heads."""
    queries_per_key = n_heads // n_keys
    # Up to n_values slices, each rank has whole value heads. With more slices, ranks share them.
    sizes = [size for size in range(1, n_values) if n_values % size == 0]
    for copies in range(1, queries_per_key + 1):
        if queries_per_key % copies == 0:
            sizes.append(n_values * copies)
    return sizes
