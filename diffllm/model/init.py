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
TilePart = tuple[tuple[int, int], range, range]
"""Index of a matrix in the local values and in the full parameter; local rows and columns of this
matrix that are in one tile, as indices in the full matrix."""


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
        if len(shape) == 1:
            # A vector is a matrix of one row, in tiles of one row.
            tile_rows = 1
            local = local.unsqueeze(0)
            first = (0, *first)
            shape = torch.Size((1, *shape))
        matrices = matrices_held(local.shape[:-2], first[:-2], shape[:-2])
        rows, columns = local.shape[-2:]
        first_row, first_column = first[-2:]
        target = local.detach().view(len(matrices), rows, columns)
        is_inference = torch.is_inference_mode_enabled()

        def fill(part: TilePart) -> None:
            (index, matrix), row_range, column_range = part
            row, y_in_tile = divmod(row_range.start, TILE)
            column, x_in_tile = divmod(column_range.start, TILE)
            text = f"{self.seed}:{self.names[param]}:{matrix}:{row}:{column}"
            generator = seeded_generator(text)
            # Draw whole tiles: values that are drawn again depend on the number of values.
            tile = torch.empty((tile_rows, TILE), dtype=torch.float32, device="cpu")
            fill_normal(tile.view(-1), std, truncate, generator)
            height = len(row_range)
            width = len(column_range)
            values = tile[y_in_tile : y_in_tile + height, x_in_tile : x_in_tile + width]
            y = row_range.start - first_row
            x = column_range.start - first_column
            # Inference mode is per thread, and only this mode can change an inference tensor.
            with torch.inference_mode(is_inference):
                target[index, y : y + height, x : x + width].copy_(values)

        row_ranges = split(first_row, rows)
        column_ranges = split(first_column, columns)
        parts = product(enumerate(matrices), row_ranges, column_ranges)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            # `list` raises the exceptions of the threads.
            list(pool.map(fill, parts))

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


def seeded_generator(text: str) -> torch.Generator:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # Without the lowest bit, the seed fits in a signed 64-bit integer.
    seed = int.from_bytes(digest, "little") >> 1
    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed)
    return generator


def matrices_held(local: torch.Size, first: tuple[int, ...], full: torch.Size) -> list[int]:
    """Return the indices of the matrices in a local part of a parameter, ascending.

    The arguments describe all dimensions except the last two. Flattened, these dimensions number
    the matrices; a parameter with two dimensions is the matrix 0.

    Args:
        local: shape of the local part.
        first: index in the full tensor of the local part's first matrix, one number per dimension.
        full: shape of the full tensor.
    """
    matrices = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, start, n in zip(full, first, local, strict=True):
        indices = torch.arange(start, start + n, device="cpu")
        first_of_dimension = matrices.unsqueeze(1) * size
        matrices = (first_of_dimension + indices).flatten()
    return matrices.tolist()


def split(start: int, count: int) -> list[range]:
    """Split the indices from `start` to `start + count` at the borders between tiles."""
    stop = start + count
    first_border = (start // TILE + 1) * TILE
    borders = [start, *range(first_border, stop, TILE), stop]
    return [range(begin, end) for begin, end in pairwise(borders)]


def fill_normal(
    values: Tensor,
    std: float,
    truncate: float | None,
    generator: torch.Generator,
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
        others = torch.empty_like(values)
        others.normal_(0.0, std, generator=generator)
        array[missing] = others.numpy()[missing]
        is_too_large = np.abs(array[missing]) > bound
        missing = missing[is_too_large]
