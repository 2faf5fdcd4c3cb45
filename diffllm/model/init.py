"""Initial values that depend on (seed, parameter name) only.

Every row block of a tensor has a generator of its own, so a rank that holds some rows draws
only those, and draws what a single process would have drawn. A row is what the last of two or more
dimensions runs along.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

BLOCK = 1 << 16  # values drawn from one generator, rounded up to whole rows

Shard = Callable[[Tensor], tuple[Tensor, tuple[int, ...], torch.Size]]


def whole(param: Tensor) -> tuple[Tensor, tuple[int, ...], torch.Size]:
    """Of an unsharded parameter: (values held here, first index of each dimension, full shape)."""
    return param, (0,) * param.ndim, param.shape


class Initializer:
    """Fills parameters in place, each from its own name.

    Args:
        seed: any integer.
        names: the parameter names of the model, by parameter.
        shard: how to find the block that this process holds, for sharded models.
    """

    def __init__(self, seed: int, names: Mapping[Tensor, str], shard: Shard = whole):
        self.seed, self.names, self.shard = seed, names, shard

    def constant_(self, param: Tensor, value: float) -> None:
        """Fill with one value."""
        with torch.no_grad():
            self.shard(param)[0].fill_(value)

    def normal_(self, param: Tensor, std: float, truncate: float | None = None) -> None:
        """Fill from N(0, std^2), optionally truncated at `truncate` standard deviations."""
        local, first, shape = self.shard(param)
        leading, row_size = (shape[:-1], shape[-1]) if len(shape) > 1 else (shape, 1)
        rows = max(1, BLOCK // row_size)
        column, width = (first[-1], local.shape[-1]) if len(shape) > 1 else (0, 1)
        held = rows_held(local.shape, first, leading)
        target = local.detach().view(len(held), width)
        for block in (held // rows).unique().tolist():
            start, stop = block * rows, min((block + 1) * rows, leading.numel())
            values = torch.empty((stop - start, row_size), dtype=torch.float32, device="cpu")
            generator = torch.Generator().manual_seed(self._seed(self.names[param], block))
            values.normal_(0.0, std, generator=generator)
            # As nn.init.trunc_normal_ of torch 2.13 draws, which in 2.11 is another function.
            while truncate and (beyond := values.abs() > truncate * std).any():
                others = torch.empty_like(values).normal_(0.0, std, generator=generator)
                values = torch.where(beyond, others, values)
            low, high = torch.searchsorted(held, torch.tensor([start, stop])).tolist()
            target[low:high].copy_(values[held[low:high] - start, column : column + width])

    def _seed(self, name: str, block: int) -> int:
        text = f"{self.seed}:{name}:{block}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def rows_held(local: torch.Size, first: tuple[int, ...], leading: torch.Size) -> Tensor:
    """Of a block of a tensor, the row numbers, rising, int64.

    Args:
        local: the block's shape.
        first: its first index in each dimension.
        leading: the dimensions of the whole tensor that count rows.
    """
    held = torch.zeros(1, dtype=torch.int64)
    for size, start, n in zip(leading, first, local, strict=False):
        held = (held.unsqueeze(1) * size + torch.arange(start, start + n)).flatten()
    return held


def named(module: nn.Module) -> dict[Tensor, str]:
    """Parameter names by parameter, for `Initializer`."""
    return {param: name for name, param in module.named_parameters()}
