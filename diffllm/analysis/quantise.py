"""A decoder computed with fewer bits: its matrices, what they multiply, or both, rounded.

Quantisation is fake: values are rounded to those that a number of bits can tell apart, and products
stay in the model's own precision. With b bits a value is one of the 2^b - 1 multiples of a scale
from -(2^(b-1) - 1) to 2^(b-1) - 1; the scale is the largest magnitude over 2^(b-1) - 1 (symmetric
absmax), of a tensor or of each of its rows. Halves go to the even neighbour.

Shapes: M rows, E experts, K width that a matrix multiplies.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffllm.model import Transformer
from diffllm.model.ffn.experts import Experts

KEPT = ("w_lambda",)
"""Linear layers of a block that stay as they are: a scalar a head, as a router's is one an expert.
Everything outside the blocks stays, too."""


@dataclass(frozen=True)
class Rounding:
    """How finely, and with how many scales."""

    bits: int
    by_row: bool
    """A scale for each row: an output channel of a matrix, a token of activations. Otherwise one
    for each matrix, an expert's too, and for all activations that a layer reads at once."""


def rounded(x: Tensor, bits: int, dims: int | tuple[int, ...]) -> Tensor:
    """Return x with each value at the nearest of 2^bits - 1 levels, in the dtype of x.

    Computed in float32. Where all values are 0, or so small that their scale is, they become 0.

    Args:
        bits: 2 or more.
        dims: dimensions that share a scale.
    """
    most = 2 ** (bits - 1) - 1
    wide = x.float()
    largest = wide.abs().amax(dims, keepdim=True)
    scale = largest / torch.full_like(largest, most)  # CUDA multiplies with a number's reciprocal
    level = torch.round(wide / scale).clamp(-most, most).int()
    return torch.where(scale > 0, level * scale, 0.0).to(x.dtype)


def rounded_weight(weight: Tensor, how: Rounding) -> Tensor:
    """Round a matrix (out, K), or those of experts (E, out, K), each by itself."""
    return rounded(weight, how.bits, -1 if how.by_row else (-2, -1))


def rounded_activations(x: Tensor, how: Rounding) -> Tensor:
    """Round what a layer reads, (..., K), rows being tokens."""
    return rounded(x, how.bits, -1 if how.by_row else tuple(range(x.ndim)))


@contextmanager
def quantised(
    model: Transformer, weights: Rounding | None = None, activations: Rounding | None = None
) -> Iterator[None]:
    """Round the matrices of all blocks, and what these multiply, while this lasts.

    Matrices are the linear layers of attention and feed-forward layers but `KEPT`, and experts; of
    experts, activations are rounded before w1 and w3 and, with the router's weight on them, before
    w2. Afterwards the model is as before, bit for bit.
    """
    with ExitStack() as stack:
        if weights is not None:
            for weight in matrices(model):
                stack.callback(setattr, weight, "data", weight.data)
                weight.data = rounded_weight(weight.data, weights)
        if activations is not None:
            for layer in layers(model):
                stack.enter_context(rounded_inputs(layer, activations))
        yield


def layers(model: Transformer) -> list[nn.Linear | Experts]:
    """List the linear layers and experts of all blocks whose matrices are rounded."""
    return [
        module
        for name, module in model.layers.named_modules()
        if isinstance(module, nn.Linear | Experts) and name.rpartition(".")[2] not in KEPT
    ]


def matrices(model: Transformer) -> list[Tensor]:
    """List the matrices of these, (out, K) or (E, out, K)."""
    return [
        weight
        for layer in layers(model)
        for weight in ([layer.weight] if isinstance(layer, nn.Linear) else layer.parameters())
    ]


@contextmanager
def rounded_inputs(layer: nn.Linear | Experts, how: Rounding) -> Iterator[None]:
    """Round what a layer's matrices multiply, while this lasts."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return rounded_activations(args[0], how), *args[1:]

    hook = layer.register_forward_pre_hook(before)
    if not isinstance(layer, Experts):
        with hook:
            yield
        return
    plain = layer.activation
    layer.activation = lambda *args: rounded_activations(plain(*args), how)
    try:
        with hook:
            yield
    finally:
        layer.activation = plain
