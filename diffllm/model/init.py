"""Initial values that depend on (seed, parameter name) only.

Every row block of a tensor has a generator of its own, so a rank that holds some rows draws
only those, and draws what a single process would have drawn.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

BLOCK = 1 << 16  # values drawn from one generator, rounded up to whole rows

Shard = Callable[[Tensor], tuple[Tensor, int, torch.Size]]


def whole(param: Tensor) -> tuple[Tensor, int, torch.Size]:
    """The view of an unsharded parameter: (values held here, first row, full shape)."""
    return param, 0, param.shape


class Initializer:
    """Fills parameters in place, each from its own name.

    Args:
        seed: any integer.
        names: the parameter names of the model, by parameter.
        shard: how to find the rows that this process holds, for sharded models.
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
        row_size = max(1, shape[1:].numel())
        rows = max(1, BLOCK // row_size)
        last = first + local.shape[0]
        for block in range(first // rows, -(-last // rows)):
            start, stop = block * rows, min((block + 1) * rows, shape[0])
            values = torch.empty((stop - start, *shape[1:]), dtype=torch.float32, device="cpu")
            generator = torch.Generator().manual_seed(self._seed(self.names[param], block))
            if truncate is None:
                values.normal_(0.0, std, generator=generator)
            else:
                bound = truncate * std
                nn.init.trunc_normal_(values, 0.0, std, -bound, bound, generator=generator)
            low, high = max(start, first), min(stop, last)
            with torch.no_grad():
                local[low - first : high - first].copy_(values[low - start : high - start])

    def _seed(self, name: str, block: int) -> int:
        text = f"{self.seed}:{name}:{block}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def named(module: nn.Module) -> dict[Tensor, str]:
    """Parameter names by parameter, for `Initializer`."""
    return {param: name for name, param in module.named_parameters()}
