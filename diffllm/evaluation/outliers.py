"""Measure outliers of a checkpoint in each layer: hidden states, attention logits and sinks.

The model reads fixed held-out tokens. `diffllm outliers` prints the statistics, and the evaluation
`outliers` stores them.

Shapes: B batch, T tokens, N queries, h heads of an attention map, D model width.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffllm.core.console import track
from diffllm.core.errors import CheckpointError
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
from diffllm.model.attention.base import Aux, Maps
from diffllm.model.stats import Probe, kurtosis, over_channels, probe_at, values_rms

WEIGHTS_AT_ONCE = 2**22
"""Maximum attention weights that are computed explicitly at a time."""
LEFT_OUT = 14
"""Number of low bits of a float32 that its bin ignores; 9 bits of the mantissa remain."""
BINS = 2 ** (31 - LEFT_OUT)
TOP = (1, 2, 3, 10, 100)
PERCENTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "p99.99": 99.99}
OUTLIERS_VERSION = 1
"""Part of the key of results: increase it when lines or scores change."""
SCORED_NUMBERS = (*(f"top_{k}" for k in TOP), "median", "rms", "kurtosis")


class Spread:
    """Running statistics of added values x: RMS, kurtosis, and percentiles and maxima of |x|.

    Percentiles come from a histogram of |x| with 512 bins per factor of 2. Their relative error is
    at most 0.1%.
    """

    def __init__(self) -> None:
        self.count = 0
        self.largest = torch.zeros(0)
        self.bins = torch.zeros(BINS, dtype=torch.int64)
        self.sums = torch.zeros(4, dtype=torch.float64)
        """Sums of the first four powers of the values."""

    def add(self, values: Tensor) -> None:
        """Add the values of a tensor of any shape; all values must be finite."""
        flat = values.detach().float().flatten()
        magnitudes = flat.abs()
        self.count += len(flat)
        largest_before = self.largest.to(flat.device)
        n_largest = min(TOP[-1], len(largest_before) + len(magnitudes))
        # Copies of the values have no name, so that they are freed before the next copy.
        self.largest = torch.cat((largest_before, magnitudes)).topk(n_largest).values.cpu()
        # The bits of floats from 0, read as integers, have the same order as the floats.
        counts = torch.bincount(magnitudes.view(torch.int32) >> LEFT_OUT, minlength=BINS)
        self.bins += counts.cpu()
        # The kurtosis subtracts sums of powers from each other, which float32 cannot resolve.
        wide = flat.double()
        squares = wide.square()
        powers = (wide, squares, squares * wide, squares.square())
        sums = torch.stack([power.sum() for power in powers])
        self.sums += sums.cpu()

    def percentile(self, percent: float) -> float:
        """Return a percentile (0 to 100) of |x|, with a relative error of at most 0.1%."""
        n_values = math.ceil(percent / 100 * self.count)
        rank = max(1, n_values)
        counts_up_to_bin = self.bins.cumsum(0)
        place = int(torch.searchsorted(counts_up_to_bin, rank))
        if place == 0:
            # The bin contains 0 and the smallest subnormal numbers.
            return 0.0
        # The bits of a bin's first float are the number of the bin and zeros.
        bins = torch.tensor([place, place + 1], dtype=torch.int32)
        ends = (bins << LEFT_OUT).view(torch.float32)
        low, high = ends.tolist()
        return (low + high) / 2

    @property
    def kurtosis(self) -> float | None:
        """Kurtosis E[(x - mean)^4] / E[(x - mean)^2]^2 of all values x; None if all are equal."""
        moments = self.sums / self.count
        mean, second, third, fourth = moments.tolist()
        variance = second - mean**2
        # The difference of equal numbers has a rounding error, so it is compared with a bound.
        if variance <= 1e-12 * second:
            return None
        central_moment = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        return central_moment / variance**2

    def numbers(self) -> dict[str, float | None]:
        """Return all statistics by name, such as "p99" or "top_10", the tenth largest |x|.

        `top_<k>` is None if fewer than k values were added.
        """
        top: dict[str, float | None] = {}
        for k in TOP:
            has_k_values = k <= self.count
            top[f"top_{k}"] = self.largest[k - 1].item() if has_k_values else None
        percentiles = {}
        for name, percent in PERCENTILES.items():
            percentiles[name] = self.percentile(percent)
        mean_square = self.sums[1].item() / self.count
        rms = math.sqrt(mean_square)
        return {**top, **percentiles, "rms": rms, "kurtosis": self.kurtosis}


class Mean:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, values: Tensor) -> None:
        self.sum += values.double().sum().item()
        self.count += values.numel()

    @property
    def value(self) -> float | None:
        return self.sum / self.count if self.count else None


class LayerOutliers:
    def __init__(self) -> None:
        self.hidden = Spread()
        self.channels = torch.zeros(0)
        """The largest magnitude of each channel of the hidden states, (D,)."""
        self.over_channels = Mean()
        self.context = Mean()
        self.ratio = Mean()
        self.smallest_ratio = math.inf
        self.largest_ratio = -math.inf
        self.logits: defaultdict[str, Spread] = defaultdict(Spread)
        self.weight: defaultdict[str, Mean] = defaultdict(Mean)
        self.share: defaultdict[str, Mean] = defaultdict(Mean)

    def add_states(self, x: Tensor, context: Tensor, v: Tensor) -> None:
        """Add the hidden states, attention outputs and values of one batch to the statistics.

        Args:
            x: hidden states, which are the outputs of the transformer block, (B, T, D).
            context: outputs of attention heads before the output projection, (B, T, h, value_dim).
            v: value vectors, (B, T, value heads, value_dim).
        """
        self.hidden.add(x)
        # `kurtosis` returns a mean over tokens: one copy per token weights batches by their size.
        mean_kurtosis = kurtosis(x)
        self.over_channels.add(mean_kurtosis.expand(x.shape[:2]))
        largest = x.abs().flatten(0, 1).amax(0).cpu()  # (D,)
        if len(self.channels):
            largest = torch.maximum(self.channels, largest)
        self.channels = largest
        rms = over_channels(context)  # (B, T, h)
        ratio = rms / values_rms(v)
        self.context.add(rms)
        self.ratio.add(ratio)
        lowest = ratio.min().item()
        highest = ratio.max().item()
        self.smallest_ratio = min(self.smallest_ratio, lowest)
        self.largest_ratio = max(self.largest_ratio, highest)

    def add_maps(self, logits: Maps, maps: Maps, probe: Probe) -> None:
        """Add the attention logits and weights of N queries to the statistics.

        Args:
            logits: values before the softmax (B, h, N, T), by name of the attention map.
            maps: attention weights (B, h, N, T), by name of the attention map.
            probe: the N queries, and the keys that these queries see.
        """
        for name, scores in logits.items():
            is_visible = probe.visible.expand_as(scores)
            self.logits[name].add(scores[is_visible])
        for name, weights in maps.items():
            is_visible = probe.visible.expand_as(weights)
            # argmax returns the first of equal values, here the first visible key.
            first_key = is_visible.int().argmax(-1, keepdim=True)
            weight = weights.gather(-1, first_key).squeeze(-1)  # (B, h, N)
            total = weights.abs().sum(-1)
            # If the total is 0, all weights are 0: a division by 1 gives the share 0, not NaN.
            divisor = torch.where(total > 0, total, 1)
            share = weight.abs() / divisor
            # A query with one visible key has no choice.
            has_choice = is_visible.sum(-1) > 1
            self.weight[name].add(weight[has_choice])
            self.share[name].add(share[has_choice])

    def numbers(self) -> dict[str, Any]:
        """Return all statistics of the layer by name, as described in `measure_outliers`."""
        hidden = {
            **self.hidden.numbers(),
            "kurtosis_over_channels": self.over_channels.value,
            "top_1_channel": int(self.channels.argmax()),
        }
        logits = {name: spread.numbers() for name, spread in self.logits.items()}
        sinks = {}
        for name, weight in self.weight.items():
            share = self.share[name]
            sinks[name] = {"weight": weight.value, "share": share.value}
        ratios = {
            "mean": self.ratio.value,
            "min": self.smallest_ratio,
            "max": self.largest_ratio,
        }
        return {
            "hidden": hidden,
            "logits": logits,
            "sinks": sinks,
            "context_rms": self.context.value,
            "context_over_value_rms": ratios,
        }


@torch.no_grad()
def measure_outliers(
    model: Transformer,
    sequences: Iterable[HeldoutSequence],
    advance: Callable[[int], None] = lambda done: None,
    name: str = "the model",
) -> list[dict[str, Any]]:
    """Run the model on all sequences, and return a dict of statistics for each layer.

    The keys of a dict are:
    - "hidden": statistics of the outputs of the transformer block, mainly from `Spread`.
    - "logits": for each attention map, `Spread` statistics of the values before the softmax.
      Masked keys are excluded.
    - "sinks": for each attention map, two means over queries. "weight" is the mean weight on the
      first visible key. "share" is the mean ratio of |weight| on this key to the sum of |weight|
      over all keys. Queries that see only one key are excluded.
    - "context_rms": mean RMS of the outputs of attention heads before the output projection.
    - "context_over_value_rms": mean, min and max of a ratio: the RMS of these outputs divided by
      the RMS of the value vectors.

    Raises CheckpointError if the output of a layer is not finite.

    Args:
        advance: called with 1 after each sequence, to show progress.
        name: name of the model in the error message.
    """
    outliers = [LayerOutliers() for _ in model.layers]
    for tokens, _, documents in sequences:
        x = model.tok_embeddings(tokens)
        rope, mask = model.whole_sequences(tokens, documents, x.dtype)
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        for i, (layer, block) in enumerate(zip(outliers, model.layers, strict=True)):
            attention = block.attention
            aux: Aux = {}
            normed = block.attention_norm(x)
            attention(normed, rope, mask, aux=aux)
            # Complete maps of a long sequence may not fit into memory: take some queries at a time.
            weights_per_query = tokens.numel() * attention.n_query_heads
            queries_at_once = max(1, WEIGHTS_AT_ONCE // weights_per_query)
            for piece in positions.split(queries_at_once):
                probe = probe_at(piece, length, documents)
                q = aux["q"][:, piece]
                k = aux["k"]
                inputs = normed[:, piece]
                maps = attention.maps(inputs, q, k, probe.visible)
                # The logits have no name, so that they are freed before the next piece.
                layer.add_maps(attention.logits(q, k), maps, probe)
            x, *_ = block(x, rope, mask)
            if not x.isfinite().all():
                raise CheckpointError(
                    f"{name}: the output of layer {i} is not finite; evaluate an earlier checkpoint"
                )
            layer.add_states(x, aux["context"], aux["v"])
        advance(1)
    return [layer.numbers() for layer in outliers]


class Outliers(Evaluation):
    """Evaluation that stores the outlier statistics of each layer.

    The statistics of hidden states and logits have scores. A score is the maximum of one statistic
    over all layers, and for logits also over all attention maps. For example, the score "hidden
    top_1" is the largest |x| of all elements x of the hidden states.
    """

    name = "outliers"
    unit = "magnitude, largest of layers (kurtosis: a ratio)"

    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        return pass_settings(subject, options, OUTLIERS_VERSION)

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        most = settings["sequences"]
        sequences = first_sequences(subject.run, subject.cfg, most, subject.device)
        with track(self.name, len(sequences)) as advance:
            checkpoint = str(subject.checkpoint)
            layers = measure_outliers(subject.model, sequences, advance, checkpoint)
        count = len(sequences)
        n_tokens = count * subject.cfg.seq_len
        lines = []
        for i, numbers in enumerate(layers):
            lines.append({"layer": i, "sequences": count, "tokens": n_tokens, **numbers})
        return lines

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        hidden: list[tuple[Line, Line]] = []
        logits: list[tuple[Line, Line]] = []
        for line in lines:
            layer = {"layer": line["layer"]}
            hidden.append((layer, line["hidden"]))
            for map_name, numbers in line["logits"].items():
                place = {**layer, "map": map_name}
                logits.append((place, numbers))
        scores = []
        for kind, places in (("hidden", hidden), ("logits", logits)):
            for name in SCORED_NUMBERS:
                values = []
                for place, numbers in places:
                    if numbers[name] is not None:
                        values.append((numbers[name], place))
                if not values:
                    continue
                # Compare only the values, because places are dicts, which have no order.
                value, place = max(values, key=lambda pair: pair[0])
                count = lines[0]["sequences"]
                scores.append(NamedScore(f"{kind} {name}", value, examples=count, more=place))
        return scores
