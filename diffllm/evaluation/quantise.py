"""Measure how the loss changes if weight matrices, their inputs, or both are rounded.

Quantisation is simulated: rounded values are stored and multiplied in the model's dtype. With b
bits, a rounded value is a scale times an integer of magnitude at most 2^(b-1) - 1. The scale is the
largest magnitude in a tensor or row, divided by 2^(b-1) - 1 (symmetric absmax). Ties round to even.

Shapes: E experts, K input width of a matrix.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from diffllm.core.errors import CheckpointError, DataError
from diffllm.data.progress import track
from diffllm.evaluation.evaluation import Asked, Evaluation, Line, NamedScore, Settings, Subject
from diffllm.evaluation.load import HeldoutSequence, first_sequences, pass_settings
from diffllm.model import Transformer
from diffllm.model.ffn.experts import Experts
from diffllm.statistics.bootstrap import of_documents

VERSION = 2
"""Part of the key of results: increase it when lines or scores change."""
BITS = (8, 6, 4)
PLAIN = "unquantised"
KEPT = ("w_lambda",)
"""Linear layers that are not rounded, because the output is one scalar per head."""


@dataclass(frozen=True)
class Rounding:
    """Number of bits of rounded values, and whether each row of a tensor has its own scale."""

    bits: int
    by_row: bool
    """A scale per output channel or token; otherwise one per matrix, expert or layer input."""


def rounded(x: Tensor, bits: int, dims: int | tuple[int, ...]) -> Tensor:
    """Round each value of x to a multiple of a scale; return a tensor of the same shape and dtype.

    Rounding is computed in float32. Values along the dimensions `dims` of x share a scale. If the
    scale is 0, these values become 0.
    """
    most = 2 ** (bits - 1) - 1
    wide = x.float()
    largest = wide.abs().amax(dims, keepdim=True)
    # Divide by a tensor: for a number, CUDA would multiply by its rounded reciprocal.
    scale = largest / torch.full_like(largest, most)
    level = torch.round(wide / scale).clamp(-most, most).int()
    return torch.where(scale > 0, level * scale, 0.0).to(x.dtype)


@contextmanager
def quantised(
    model: Transformer, weights: Rounding | None = None, activations: Rounding | None = None
) -> Iterator[None]:
    """Context manager: round weight matrices and their inputs inside the `with` block.

    The matrices of all experts and linear layers in transformer blocks are rounded, except layers
    named in KEPT. The input of an expert's matrix w2 is rounded after it is multiplied by the
    router weight. The original weights are restored exactly on exit. If `weights` is None, the
    matrices are not rounded. If `activations` is None, the inputs are not rounded.
    """
    with ExitStack() as stack:
        if weights is not None:
            dims = -1 if weights.by_row else (-2, -1)
            parameters = (each for layer in layers(model) for each in layer.parameters())
            # Matrices have shape (out, K), or (E, out, K) for experts; biases are not rounded.
            for weight in (each for each in parameters if each.ndim > 1):
                stack.callback(setattr, weight, "data", weight.data)
                weight.data = rounded(weight.data, weights.bits, dims)
        if activations is not None:
            for layer in layers(model):
                round_inputs(layer, activations, stack)
        yield


def layers(model: Transformer) -> list[nn.Linear | Experts]:
    """Return the linear layers and experts whose matrices and inputs can be rounded."""
    return [
        module
        for name, module in model.layers.named_modules()
        if isinstance(module, nn.Linear | Experts) and name.rpartition(".")[2] not in KEPT
    ]


def round_inputs(layer: nn.Linear | Experts, how: Rounding, stack: ExitStack) -> None:
    """Round the inputs (..., K) of the matrices of `layer` until `stack` closes.

    `how` contains the number of bits, and whether each row of an input has its own scale.
    """

    def fewer_bits(x: Tensor) -> Tensor:
        return rounded(x, how.bits, -1 if how.by_row else tuple(range(x.ndim)))

    stack.enter_context(
        layer.register_forward_pre_hook(lambda _, args: (fewer_bits(args[0]), *args[1:]))
    )
    if isinstance(layer, Experts):
        plain = layer.activation
        stack.callback(setattr, layer, "activation", plain)
        layer.activation = lambda *args: fewer_bits(plain(*args))


class Arm(NamedTuple):
    """A quantisation setting: how to round weights and activations; None means no rounding."""

    name: str
    weights: Rounding | None = None
    activations: Rounding | None = None
    level: Mapping[str, Any] = {}


KINDS = {
    "weights per channel": (True, None),
    "activations per token": (None, True),
    "weights per tensor": (False, None),
    "activations per tensor": (None, False),
    "both per channel and token": (True, True),
}
"""Whether weights, and whether activations, have a scale per row; None: not rounded."""


ARMS = [Arm(PLAIN)]
for kind, bits in product(KINDS, BITS):
    w, x = (None if by_row is None else Rounding(bits, by_row) for by_row in KINDS[kind])
    ARMS.append(Arm(kind.replace(" ", f" {bits} ", 1), w, x, {"bits": bits, "rounded": kind}))


class Quantise(Evaluation):
    """Evaluation of simulated quantisation: the change of the loss for each setting in ARMS.

    The loss is computed on the sequences of `first_sequences`, one sequence at a time. The score
    of each setting also contains the loss without rounding.
    """

    name = "quantise"
    unit = "change of loss, nats per token"

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        return pass_settings(subject, asked, VERSION)

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        asked = settings["sequences"]
        first = first_sequences(subject.run, subject.cfg, asked, subject.device)
        sequences = [each for each in first if bool((each.targets >= 0).any())]
        if not sequences:
            raise DataError(
                f"the loss ignores all tokens of the first {asked} held-out sequences, because "
                f"they belong to prompts; set limit above {asked}"
            )
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
    """Compute the loss of each sequence; return one dict per sequence.

    The entry "nats" is the summed loss, and "tokens" is the number of predicted tokens. Raises
    CheckpointError if a loss is not finite.

    Args:
        arm: name of the current setting in ARMS; the dicts and the error message contain this name.
        advance: called with 1 after each sequence, to show progress.
    """
    found = []
    for i, each in enumerate(sequences):
        losses = subject.model(
            each.inputs, each.targets, documents=each.documents, by_token=True
        ).double()
        nats = losses.sum().item()
        if not math.isfinite(nats):
            raise CheckpointError(
                f"{subject.checkpoint}: the loss of held-out tokens is not finite ({arm}); "
                "evaluate an earlier checkpoint"
            )
        tokens = int((each.targets >= 0).sum())
        found.append({"arm": arm, "sequence": i, "nats": nats, "tokens": tokens})
        advance(1)
    return found
