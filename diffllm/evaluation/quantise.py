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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from diffllm.core.console import track
from diffllm.core.errors import CheckpointError, DataError
from diffllm.evaluation.evaluation import (
    Evaluation,
    EvaluationOptions,
    Line,
    NamedScore,
    Settings,
    Subject,
)
from diffllm.evaluation.load import HeldoutSequence, first_sequences, pass_settings
from diffllm.model import Transformer
from diffllm.model.ffn.experts import Experts
from diffllm.statistics.bootstrap import of_documents

QUANTISE_VERSION = 2
"""Part of the key of results: increase it when lines or scores change."""
BITS = (8, 6, 4)
PLAIN = "unquantised"
UNROUNDED_LAYERS = ("w_lambda",)
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
    # A division by a scale of 0 gives NaN, whose integer is undefined.
    values = torch.where(scale > 0, level * scale, 0.0)
    return values.to(x.dtype)


@contextmanager
def quantised(
    model: Transformer, weights: Rounding | None = None, activations: Rounding | None = None
) -> Iterator[None]:
    """Context manager: round weight matrices and their inputs inside the `with` block.

    The matrices of all experts and linear layers in transformer blocks are rounded, except layers
    named in UNROUNDED_LAYERS. The input of an expert's matrix w2 is rounded after it is multiplied
    by the router weight. The original weights are restored exactly on exit. If `weights` is None,
    the matrices are not rounded. If `activations` is None, the inputs are not rounded.
    """
    with ExitStack() as stack:
        if weights is not None:
            dims = -1 if weights.by_row else (-2, -1)
            for layer in layers(model):
                for weight in layer.parameters():
                    # Matrices have shape (out, K), or (E, out, K) for experts; biases are not
                    # rounded.
                    if weight.ndim > 1:
                        # Keep the original tensor: rounding cannot be undone.
                        stack.callback(setattr, weight, "data", weight.data)
                        weight.data = rounded(weight.data, weights.bits, dims)
        if activations is not None:
            for layer in layers(model):
                round_inputs(layer, activations, stack)
        yield


def layers(model: Transformer) -> list[nn.Linear | Experts]:
    """Return the linear layers and experts whose matrices and inputs can be rounded."""
    chosen: list[nn.Linear | Experts] = []
    for path, module in model.layers.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear | Experts) and name not in UNROUNDED_LAYERS:
            chosen.append(module)
    return chosen


def round_inputs(layer: nn.Linear | Experts, rounding: Rounding, stack: ExitStack) -> None:
    """Round the inputs (..., K) of the matrices of `layer` until `stack` closes.

    `rounding` contains the number of bits, and whether each row of an input has its own scale.
    """

    def fewer_bits(x: Tensor) -> Tensor:
        dims = -1 if rounding.by_row else tuple(range(x.ndim))
        return rounded(x, rounding.bits, dims)

    def with_fewer_bits(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        return fewer_bits(x), *others

    stack.enter_context(layer.register_forward_pre_hook(with_fewer_bits))
    if isinstance(layer, Experts):
        # The hook rounds the input of w1 and w3; the input of w2 exists only inside the layer.
        plain = layer.activation
        stack.callback(setattr, layer, "activation", plain)
        layer.activation = lambda *args: fewer_bits(plain(*args))


class Arm(NamedTuple):
    """A quantisation setting: how to round weights and activations; None means no rounding."""

    name: str
    weights: Rounding | None = None
    activations: Rounding | None = None
    level: Mapping[str, Any] = {}


SCALES = {
    "weights per channel": (True, None),
    "activations per token": (None, True),
    "weights per tensor": (False, None),
    "activations per tensor": (None, False),
    "both per channel and token": (True, True),
}
"""Whether weights, and whether activations, have a scale per row; None: not rounded."""


def make_arms() -> list[Arm]:
    """Return all settings: first without rounding, then each entry of SCALES with each of BITS."""
    arms = [Arm(PLAIN)]
    for kind, (weights_by_row, inputs_by_row) in SCALES.items():
        for bits in BITS:
            weights = None if weights_by_row is None else Rounding(bits, weights_by_row)
            activations = None if inputs_by_row is None else Rounding(bits, inputs_by_row)
            name = kind.replace(" ", f" {bits} ", 1)
            arms.append(Arm(name, weights, activations, {"bits": bits, "rounded": kind}))
    return arms


QUANTISE_ARMS = make_arms()


class Quantise(Evaluation):
    """Evaluation of simulated quantisation: the change of the loss by rounding.

    Each of QUANTISE_ARMS except the first has a score, which also contains the loss without
    rounding. The loss is computed on the sequences of `first_sequences`, one sequence at a time.
    """

    name = "quantise"
    unit = "change of loss, nats per token"

    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        return pass_settings(subject, options, QUANTISE_VERSION)

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        most = settings["sequences"]
        sequences = []
        for sequence in first_sequences(subject.run, subject.cfg, most, subject.device):
            has_targets = bool((sequence.targets >= 0).any())
            if has_targets:
                sequences.append(sequence)
        if not sequences:
            raise DataError(
                f"the loss ignores all tokens of the first {most} held-out sequences, because "
                f"they belong to prompts; set limit above {most}"
            )
        lines: list[Line] = []
        with track(self.name, len(QUANTISE_ARMS) * len(sequences)) as advance:
            for arm in QUANTISE_ARMS:
                with quantised(subject.model, arm.weights, arm.activations):
                    lines += loss_lines(subject, arm.name, sequences, advance)
        return lines

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        nats: dict[str, np.ndarray] = {}
        for arm in QUANTISE_ARMS:
            losses = [line["nats"] for line in lines if line["arm"] == arm.name]
            nats[arm.name] = np.array(losses)
        # All settings use the same sequences, so the numbers of tokens are equal.
        counts = [line["tokens"] for line in lines if line["arm"] == PLAIN]
        tokens = np.array(counts)
        loss = float(nats[PLAIN].sum() / tokens.sum())
        scores = []
        for arm in QUANTISE_ARMS[1:]:
            change = nats[arm.name] - nats[PLAIN]
            scores.append(
                NamedScore(
                    arm.name,
                    float(change.sum() / tokens.sum()),
                    of_documents(change, tokens),
                    len(tokens),
                    more={"loss": loss, "level": arm.level},
                )
            )
        return scores


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
        arm: name of one of QUANTISE_ARMS; the dicts and the error message contain this name.
        advance: called with 1 after each sequence, to show progress.
    """
    lines = []
    for i, (inputs, targets, documents) in enumerate(sequences):
        losses = subject.model.token_losses(inputs, targets, documents)
        # Changes of the loss can be smaller than the rounding of a float32 sum.
        nats = losses.double().sum().item()
        if not math.isfinite(nats):
            raise CheckpointError(
                f"{subject.checkpoint}: the loss of held-out tokens is not finite ({arm}); "
                "evaluate an earlier checkpoint"
            )
        tokens = int((targets >= 0).sum())
        lines.append({"arm": arm, "sequence": i, "nats": nats, "tokens": tokens})
        advance(1)
    return lines
