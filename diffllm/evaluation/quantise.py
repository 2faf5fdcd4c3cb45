"""The cost of fewer bits: the change of loss if matrices, what they multiply, or both are rounded.

Quantisation is fake: values are rounded to those that a number of bits can tell apart, and products
stay in the model's own precision. With b bits a value is one of the 2^b - 1 multiples of a scale
from -(2^(b-1) - 1) to 2^(b-1) - 1; the scale is the largest magnitude over 2^(b-1) - 1 (symmetric
absmax), of a tensor or of each of its rows. Halves go to the even neighbour.

Shapes: M rows, E experts, K width that a matrix multiplies.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from diffllm.core.errors import CheckpointError, DataError
from diffllm.data.progress import track
from diffllm.evaluation.evaluation import Asked, Evaluation, Line, NamedScore, Settings, Subject
from diffllm.evaluation.load import (
    TOKENS,
    HeldoutSequence,
    first_sequences,
    own_corpus,
    sequences_for,
)
from diffllm.model import Transformer
from diffllm.model.ffn.experts import Experts
from diffllm.statistics.bootstrap import of_documents

VERSION = 2
"""Changed whenever lines or scores change, so that older results are made anew."""
BITS = (8, 6, 4)
PLAIN = "unquantised"
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
            dims = -1 if weights.by_row else (-2, -1)
            parameters = (each for layer in layers(model) for each in layer.parameters())
            # Matrices are (out, K), or (E, out, K) of experts; a bias stays.
            for weight in (each for each in parameters if each.ndim > 1):
                stack.callback(setattr, weight, "data", weight.data)
                weight.data = rounded(weight.data, weights.bits, dims)
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


@contextmanager
def rounded_inputs(layer: nn.Linear | Experts, how: Rounding) -> Iterator[None]:
    """Round what a layer's matrices multiply, (..., K), rows being tokens, while this lasts."""

    def fewer_bits(x: Tensor) -> Tensor:
        return rounded(x, how.bits, -1 if how.by_row else tuple(range(x.ndim)))

    with ExitStack() as stack:
        stack.enter_context(
            layer.register_forward_pre_hook(lambda _, args: (fewer_bits(args[0]), *args[1:]))
        )
        if isinstance(layer, Experts):
            plain = layer.activation
            stack.callback(setattr, layer, "activation", plain)
            layer.activation = lambda *args: fewer_bits(plain(*args))
        yield


class Arm(NamedTuple):
    """A way to round a model."""

    name: str
    weights: Rounding | None = None
    activations: Rounding | None = None
    level: Mapping[str, Any] = {}
    """The number of bits, and what has so few; empty without rounding."""


KINDS = {
    "weights per channel": (True, None),
    "activations per token": (None, True),
    "weights per tensor": (False, None),
    "activations per tensor": (None, False),
    "both per channel and token": (True, True),
}
"""Whether weights and activations have a scale for each row; None: they are not rounded."""


def _arm(kind: str, bits: int) -> Arm:
    what, _, how = kind.partition(" ")
    weights, activations = (None if x is None else Rounding(bits, x) for x in KINDS[kind])
    level = {"bits": bits, "rounded": kind}
    return Arm(f"{what} {bits} {how}", weights, activations, level)


ARMS = [Arm(PLAIN), *(_arm(kind, bits) for kind in KINDS for bits in BITS)]
"""The unquantised model, then each kind of arm from many bits to few."""


class Quantise(Evaluation):
    """Measures the loss over the sequences of the pass over outliers in each arm.

    A score is the loss of an arm minus that of the model as it is, over the same sequences; with
    it stands the latter, so that models can be compared where their losses are equal. One sequence
    is read at a time.
    """

    name = "quantise"
    unit = "change of loss, nats a token"

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        return {
            "version": VERSION,
            "sequences": asked.limit or sequences_for(TOKENS, subject.cfg.seq_len),
            "corpus": own_corpus(subject.run, subject.cfg),
        }

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        asked = settings["sequences"]
        first = first_sequences(subject.run, subject.cfg, asked, subject.device)
        sequences = [each for each in first if bool((each.targets >= 0).any())]
        if not sequences:
            raise DataError("the held-out sequences have no token that is to be predicted")
        found: list[Line] = []
        with track(self.name, len(ARMS) * len(sequences)) as advance:
            for arm in ARMS:
                with quantised(subject.model, arm.weights, arm.activations):
                    found += loss_lines(subject, arm.name, sequences, advance)
        return found

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        nats = {
            arm.name: np.array([line["nats"] for line in lines if line["arm"] == arm.name])
            for arm in ARMS
        }
        tokens = np.array([line["tokens"] for line in lines if line["arm"] == PLAIN])
        loss = float(nats[PLAIN].sum() / tokens.sum())
        found = []
        for arm in ARMS[1:]:
            change = nats[arm.name] - nats[PLAIN]
            found.append(
                NamedScore(
                    arm.name,
                    float(change.sum() / tokens.sum()),
                    of_documents(change, tokens),
                    len(tokens),
                    more={"loss": loss, "level": arm.level},
                )
            )
        return found


@torch.no_grad()
def loss_lines(
    subject: Subject,
    arm: str,
    sequences: Sequence[HeldoutSequence],
    advance: Callable[[int], None],
) -> list[Line]:
    """Return a line with the loss of each sequence, by the model as it is now."""
    found = []
    for i, each in enumerate(sequences):
        losses = subject.model(
            each.inputs, each.targets, documents=each.documents, by_token=True
        ).double()
        nats = losses.sum().item()
        if not math.isfinite(nats):
            raise CheckpointError(
                f"{subject.checkpoint}: the loss of held-out tokens is not finite ({arm})"
            )
        tokens = int((each.targets >= 0).sum())
        found.append({"arm": arm, "sequence": i, "nats": nats, "tokens": tokens})
        advance(1)
    return found
