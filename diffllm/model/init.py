"""Initial values that depend only on the seed, the name of a parameter and the position in it.

Each matrix is divided into square tiles, and each tile has its own random generator. Two matrices
of one name therefore have equal values in their common rows and columns, also if they differ in
size. A rank draws only the tiles that overlap its local part of a parameter.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
import torch
from torch import Tensor

from diffllm.core.errors import ConfigError

OUTPUT_MATRICES = {"wo", "w2"}
TILE = 256
"""Rows and columns of a tile."""

LocalBlock = tuple[Tensor, tuple[int, ...], torch.Size]
"""The local values of a parameter, their first index in each dimension, and the full shape."""
Shard = Callable[[Tensor], LocalBlock]


def unsharded(param: Tensor) -> LocalBlock:
    return param, (0,) * param.ndim, param.shape


@dataclass
class Initializer:
    """Fills parameters with initial values that depend only on seed, parameter name and position.

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
        tile_rows = TILE
        if len(shape) == 1:  # A vector is a matrix of one row, in tiles of one row.
            tile_rows = 1
            local = local.unsqueeze(0)
            first = (0, *first)
            shape = torch.Size((1, *shape))
        matrices = matrices_held(local.shape[:-2], first[:-2], shape[:-2])
        target = local.detach().view(len(matrices), *local.shape[-2:])
        rows, columns = target.shape[-2:]
        first_row, first_column = first[-2:]

        def fill(part: tuple[tuple[int, int], range, range]) -> None:
            (at, matrix), row_range, column_range = part
            row = row_range.start // TILE
            column = column_range.start // TILE
            text = f"{self.seed}:{self.names[param]}:{matrix}:{row}:{column}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            generator = torch.Generator(device="cpu")
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            # Draw whole tiles: values that are drawn again depend on the number of values.
            tile = torch.empty((tile_rows, TILE), dtype=torch.float32, device="cpu")
            fill_normal(tile.view(-1), std, truncate, generator)
            height, width = len(row_range), len(column_range)
            values = tile[row_range.start % TILE :, column_range.start % TILE :]
            y = row_range.start - first_row
            x = column_range.start - first_column
            target[at, y : y + height, x : x + width].copy_(values[:height, :width])

        inference = torch.is_inference_mode_enabled()

        def fill_in_thread(part: tuple[tuple[int, int], range, range]) -> None:
            with torch.inference_mode(inference):  # inference mode is per thread
                fill(part)

        parts = product(enumerate(matrices), split(first_row, rows), split(first_column, columns))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill_in_thread, parts))

    def matrices_(self, std: float, out_std: float) -> None:
        """Fill all matrices with normal values of mean 0, truncated at 3 standard deviations.

        The standard deviation is `out_std` for the output matrices `wo` and `w2`, otherwise `std`.
        """
        for param, name in self.names.items():
            if param.ndim > 1:
                is_output = not OUTPUT_MATRICES.isdisjoint(name.split("."))
                self.normal_(param, out_std if is_output else std, truncate=3)

    def check_all_filled(self) -> None:
        for param, name in self.names.items():
            if param not in self.filled:
                raise ConfigError(
                    f"parameter {name} has no initial value: call init.constant_ or init.normal_ "
                    "in reset_parameters(init) of the attention module"
                )


def matrices_held(local: torch.Size, first: tuple[int, ...], full: torch.Size) -> list[int]:
    """Return the indices of the matrices in a local part of a parameter, ascending.

    The arguments describe all dimensions except the last two. Flattened, these dimensions number
    the matrices; a parameter with two dimensions is the matrix 0.

    Args:
        local: shape of the local part.
        first: index in the full tensor of the local part's first matrix, one number per dimension.
        full: shape of the full tensor.
    """
    held = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, start, n in zip(full, first, local, strict=True):
        indices = torch.arange(start, start + n, device="cpu")
        held = (held.unsqueeze(1) * size + indices).flatten()
    return held.tolist()


def split(start: int, count: int) -> list[range]:
    """Split the indices from `start` to `start + count` at the borders between tiles."""
    stop = start + count
    borders = [start, *range((start // TILE + 1) * TILE, stop, TILE), stop]
    return [range(*pair) for pair in pairwise(borders)]


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
    # NumPy, because torch would start more threads inside each thread of the pool. The array shares
    # the memory of `values`.
    array = values.numpy()
    bound = np.float32(truncate * std)
    missing = np.flatnonzero(np.abs(array) > bound)
    while len(missing):
        others = torch.empty_like(values).normal_(0.0, std, generator=generator).numpy()
        array[missing] = others[missing]
        missing = missing[np.abs(array[missing]) > bound]
