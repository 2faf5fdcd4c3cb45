"""Initial values that depend only on the seed and the name of a parameter.

Each block of rows of a parameter has its own random generator; in a vector, each value is a row. A
rank draws only the blocks that contain its local rows, and gets the same values for these rows as a
run on one process.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from diffllm.core.errors import ConfigError

OUTPUTS = {"wo", "w2"}
BLOCK = 1 << 16  # values drawn from one generator, rounded up to whole rows

LocalBlock = tuple[Tensor, tuple[int, ...], torch.Size]
"""The local values of a parameter, their first index in each dimension, and the full shape."""
Shard = Callable[[Tensor], LocalBlock]


def unsharded(param: Tensor) -> LocalBlock:
    return param, (0,) * param.ndim, param.shape


@dataclass
class Initializer:
    """Fills parameters with initial values that depend only on `seed` and the parameter names.

    Args:
        names: dotted name of each parameter in the decoder.
        shard: function that returns the `LocalBlock` of a parameter on this rank.
        filled: parameters that already have an initial value.
    """

    seed: int
    names: Mapping[Tensor, str]
    shard: Shard = unsharded
    filled: set[Tensor] = field(default_factory=set)

    def constant_(self, param: Tensor, value: float) -> None:
        self.filled.add(param)
        with torch.no_grad():
            self.shard(param)[0].fill_(value)

    def normal_(self, param: Tensor, std: float, truncate: float | None = None) -> None:
        """Fill `param` with normal values of mean 0 and standard deviation `std`.

        If `truncate` is given, all magnitudes are at most `truncate * std`.
        """
        self.filled.add(param)
        local, first, shape = self.shard(param)
        leading, row_size = (shape[:-1], shape[-1]) if len(shape) > 1 else (shape, 1)
        rows = max(1, BLOCK // row_size)
        column, width = (first[-1], local.shape[-1]) if len(shape) > 1 else (0, 1)
        held = rows_held(local.shape, first, leading)
        target = local.detach().view(len(held), width)
        starts = (held // rows).unique() * rows
        stops = (starts + rows).clamp_max(leading.numel())
        low, high = torch.searchsorted(held, torch.stack((starts, stops)))
        blocks = torch.stack((starts, stops, low, high), dim=1)
        in_place = (target.device.type, target.dtype) == ("cpu", torch.float32)

        def fill(block: list[int]) -> None:
            # Draw rows [start, stop) of `param`; store the local rows in `target` at [low, high).
            start, stop, low, high = block
            complete = (high - low, width) == (stop - start, row_size)
            text = f"{self.seed}:{self.names[param]}:{start // rows}".encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            generator = torch.Generator(device="cpu")
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            if complete and in_place:
                fill_normal(target[low:high].view(-1), std, truncate, generator)
                return
            values = torch.empty((stop - start, row_size), dtype=torch.float32, device="cpu")
            fill_normal(values.view(-1), std, truncate, generator)
            if not complete:
                values = values[held[low:high] - start, column : column + width]
            target[low:high].copy_(values)

        inference = torch.is_inference_mode_enabled()

        def fill_in_thread(block: list[int]) -> None:
            with torch.inference_mode(inference):  # inference mode is per thread
                fill(block)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill_in_thread, blocks.tolist()))

    def matrices_(self, std: float, out_std: float) -> None:
        """Fill all matrices with normal values of mean 0, truncated at 3 standard deviations.

        The standard deviation is `out_std` for the output matrices `wo` and `w2`, otherwise `std`.
        """
        for param, name in self.names.items():
            if param.ndim > 1:
                is_output = not OUTPUTS.isdisjoint(name.split("."))
                self.normal_(param, out_std if is_output else std, truncate=3)

    def check_all_filled(self) -> None:
        for param, name in self.names.items():
            if param not in self.filled:
                raise ConfigError(
                    f"parameter {name} has no initial value: call init.constant_ or init.normal_ "
                    "in reset_parameters(init) of the attention module"
                )


def rows_held(local: torch.Size, first: tuple[int, ...], leading: torch.Size) -> Tensor:
    """Return the indices in the full tensor of the rows of a local block: (n,) int64, ascending.

    All dimensions except the last are flattened to rows. In a vector, each value is a row.

    Args:
        local: shape of the local block.
        first: index in the full tensor of the block's first value, one number per dimension.
        leading: shape of the full tensor without its last dimension; for a vector, the full shape.
    """
    held = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, start, n in zip(leading, first, local, strict=False):
        indices = torch.arange(start, start + n, device="cpu")
        held = (held.unsqueeze(1) * size + indices).flatten()
    return held


def fill_normal(
    values: Tensor, std: float, truncate: float | None, generator: torch.Generator
) -> None:
    """Fill `values` in place with random numbers from N(0, std^2).

    `values` is (n,), contiguous, float32, on the CPU. If `truncate` is given, values of magnitude
    above `truncate * std` are drawn again until no such value is left.
    """
    values.normal_(0.0, std, generator=generator)
    if truncate is None:
        return
    # NumPy, because torch would start more threads inside each thread of the pool.
    here, bound = values.numpy(), np.float32(truncate * std)
    missing = np.flatnonzero(np.abs(here) > bound)
    while len(missing):
        others = torch.empty_like(values).normal_(0.0, std, generator=generator).numpy()
        here[missing] = others[missing]
        missing = missing[np.abs(here[missing]) > bound]
