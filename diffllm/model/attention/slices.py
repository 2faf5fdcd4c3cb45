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
        return x[:, self.rank * length : (self.rank + 1) * length]

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the slices, without a gradient."""
        from torch.distributed._functional_collectives import all_reduce

        return all_reduce(x.detach(), "sum", self.group) / self.size

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole sequences of the slices x (B, t, ...), without a gradient."""
        from torch.distributed import _functional_collectives as collectives

        # The name all_gather_tensor of torch 2.11 is deprecated from torch 2.13 on.
        newer = getattr(collectives, "all_gather_single", None)
        return (newer or collectives.all_gather_tensor)(x.detach().contiguous(), 1, self.group)

    def pick(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the entries of x (B, t, ...) at positions (N,) of the whole sequences."""
        from torch.distributed._functional_collectives import all_reduce

        length = x.shape[1]
        offsets = positions - self.rank * length
        is_inside = (offsets >= 0) & (offsets < length)
        rows = x.detach()[:, offsets.clamp(0, length - 1)]
        mask = is_inside.view(1, -1, *[1] * (x.ndim - 2))
        # Exactly one rank holds each position, so the sum adds zeros to its entry.
        return all_reduce(torch.where(mask, rows, 0), "sum", self.group)

    def heads(self, n_heads: int, n_keys: int, n_values: int) -> list[int]:
        """Return the query heads that this rank has between the exchanges, in their order."""
        queries = n_heads // n_keys
        copies = max(1, self.size // n_values)
        values = max(1, n_values // self.size)
        share = queries // copies
        heads: list[int] = []
        for key in range(0, n_keys, n_values):
            for unit in range(self.rank * values, (self.rank + 1) * values):
                value, copy = divmod(unit, copies)
                first = (key + value) * queries + copy * share
                heads += range(first, first + share)
        return heads

    def around(
        self, kernel: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Call `kernel` with whole sequences of some heads, and return its result for this slice.

        Args:
            kernel: maps q (B, T, h, d), k and v to (B, T, h, dv), for some of the heads.
            q: (B, t, H, d). k: (B, t, K, d). v: (B, t, V, dv).
        """
        (batch, length, n_keys, d), n_values = k.shape, v.shape[2]
        copies = max(1, self.size // n_values)
        values = max(1, n_values // self.size)
        times = n_keys // n_values
        # Without names for the repeated keys and values, so that their memory is freed at once.
        sent = (
            self._units(q, n_keys, n_values),
            self._units(k.repeat_interleave(copies, 2), n_keys * copies, n_values * copies),
            self._units(v.repeat_interleave(copies, 2), n_values * copies, n_values * copies),
        )
        widths = [part.shape[-1] for part in sent]
        # One exchange of q, k and v together, because each exchange waits for all ranks.
        sequences = self._exchange(torch.cat(sent, dim=-1)).transpose(0, 1)
        sequences = sequences.reshape(batch, self.size * length, -1)
        all_q, all_k, all_v = sequences.split(widths, dim=-1)
        all_q = all_q.unflatten(-1, (-1, d))
        all_k = all_k.unflatten(-1, (times * values, d))
        all_v = all_v.unflatten(-1, (values, v.shape[-1]))
        out = kernel(all_q, all_k, all_v)
        out = out.reshape(batch, self.size, length, -1)
        returned = self._exchange(out.transpose(0, 1))
        heads = returned.view(self.size, batch, length, times, values, -1, v.shape[-1])
        return heads.movedim(0, 3).reshape(batch, length, q.shape[2], v.shape[-1])

    def _units(self, x: Tensor, n_keys: int, n_values: int) -> Tensor:
        """Group the heads of x (B, t, heads, width) by rank: (C, B, t, heads of a rank * width)."""
        times = n_keys // n_values
        values = max(1, n_values // self.size)
        per_rank = x.shape[2] // (times * self.size * values)
        grouped = x.reshape(*x.shape[:2], times, self.size, values, per_rank, x.shape[3])
        return grouped.movedim(3, 0).flatten(3)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send x[c] to rank c, for each rank c; return the received parts in the order of ranks."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        sizes = [1] * self.size
        return all_to_all_single_autograd(x.contiguous(), sizes, sizes, self.group)


def degrees(n_heads: int, n_keys: int, n_values: int) -> list[int]:
    """Return the possible numbers of slices for these numbers of query, key and value heads."""
    queries = n_heads // n_keys
    divided = [n for n in range(1, n_values) if n_values % n == 0]
    repeated = [n_values * n for n in range(1, queries + 1) if queries % n == 0]
    return [*divided, *repeated]
