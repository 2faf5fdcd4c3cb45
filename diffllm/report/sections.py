"""Which figures a report has, and what each says.

A section without data is left out; so is a figure that no run has the metrics for, or only zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffllm.report.bands import Band, gap_band, largest, rises, smoothed, window
from diffllm.report.comparison import Comparison
from diffllm.report.figures import Figure, Figures
from diffllm.report.numbers import short
from diffllm.report.style import RowStyle


@dataclass(frozen=True)
class Section:
    """Figures on one subject."""

    title: str
    intro: str
    figures: list[Figure]

    @property
    def halves(self) -> int:
        """Single drawings, the first, that are half as wide as the page; the rest a third.

        So that no row of the page has an empty place.
        """
        single = sum(not figure.panels for figure in self.figures)
        return min(single, {0: 0, 1: 4, 2: 2}[single % 3])


def sections(comparison: Comparison, styles: list[RowStyle]) -> list[Section]:
    """Those that have a figure."""
    draw = Figures(comparison, styles)
    weights = list(lambdas(draw)), list(gates(draw))
    parts = [
        (
            "Learning",
            "Losses in nats a token, over training tokens." + incomparable(comparison),
            list(learning(draw, comparison)),
        ),
        ("Stability", "Gradient norms are taken before clipping.", list(stability(draw))),
        (
            "Context RMS",
            "The context is the vector per token and head that enters attention's output "
            "projection; its RMS is taken over channels (for DIFF V1 before the head norm). "
            f"{by_layer(draw)}",
            list(context(draw)),
        ),
        (
            " and ".join(
                name for name, made in zip(("Lambda", "Gate"), weights, strict=True) if made
            ).capitalize(),
            " ".join(
                text
                for text, made in zip((LAMBDA, GATE, by_layer(draw)), (*weights, True), strict=True)
                if made
            ),
            [figure for made in weights for figure in made],
        ),
        (
            "Outliers",
            "Of the outputs of blocks; large ones cost precision in bf16 and in quantisation. "
            f"{by_layer(draw)}",
            list(outliers(draw)),
        ),
        (
            "Attention maps",
            "Taken from explicit maps at a few query positions, drawn anew each time: means over "
            f"them, over heads and sequences, unless said otherwise. {by_layer(draw)}",
            list(probes(draw)),
        ),
        (
            "Experts",
            "Load is the tokens of the global batch that an expert got over the uniform number: 1 "
            f"when balanced. {by_layer(draw)}",
            list(experts(draw)),
        ),
    ]
    return [Section(*part) for part in parts if part[-1]]


LAMBDA = "Lambda weighs the second attention map, which differential attention subtracts."
GATE = "The gate multiplies attention's output, before its projection."


def by_layer(draw: Figures) -> str:
    """Which runs and step the figures over layers show."""
    none = [row.label for row in draw.rows if all(run.summary is None for run in row.runs)]
    finished = "Figures by layer show finished runs at the last logged step"
    if not none:
        return f"{finished}."
    common = "at the last logged step that its runs have in common"
    if len(none) == len(draw.rows):
        return f"No run has finished: figures by layer show each row {common}."
    return f"{finished}; of {', '.join(none)}, without a finished run, all runs {common}."


def incomparable(comparison: Comparison) -> str:
    """What forbids reading the curves against each other."""
    keys = ", ".join(difference.key for difference in comparison.differences)
    return f" Rows are not comparable: they differ in {keys}." if keys else ""


def learning(draw: Figures, comparison: Comparison) -> Iterator[Figure]:
    """Losses and the gap."""
    logged = [len(run.series("train/loss").values) for row in draw.rows for run in row.runs]
    points = window(max(logged, default=0))
    train = draw.over_tokens(lambda run: smoothed(run.series("train/loss"), points))
    held_out = draw.metric("eval/loss")
    said = f"Running mean over {points} logged steps" if points > 1 else "At logged steps"
    spikes = [rises(row, "spikes/loss_total") for row in draw.rows]
    warning = incomparable(comparison)
    yield from draw.curves(
        "Training loss",
        f"{said}, in nats a token.{warning}" + marked(spikes, "the loss"),
        train,
        "nats a token",
        spikes=spikes,
        top=start_of(train),
    )
    yield from draw.curves(
        "Held-out loss",
        f"On held-out documents, in nats a token, at every evaluation.{warning}",
        held_out,
        "nats a token",
        top=start_of(held_out),
    )
    yield from draw.curves(
        f"Gap to {comparison.baseline}",
        "Held-out loss minus that of the baseline's run with the same seeds, in nats a token: "
        "below 0 the row is better than its baseline.",
        [gap_band(row) for row in draw.rows],
        "nats a token",
        zero=True,
    )
    half = max((float(band.x[-1]) for band in train if band is not None), default=0) / 2
    late = [band and band.since(half) for band in train]
    if sum(len(band.x) for band in late if band) > 2 * len(draw.rows):
        yield from draw.curves(
            "Training loss, second half",
            f"{said}, in nats a token, on a scale of its own.{warning}",
            late,
            "nats a token",
            start=half,
        )


def stability(draw: Figures) -> Iterator[Figure]:
    """Gradients and updates."""
    spikes = [rises(row, "spikes/grad_total") for row in draw.rows]
    yield from draw.curves(
        "Gradient norm",
        "Global L2 norm before clipping, at logged steps." + marked(spikes, "the gradient norm"),
        draw.metric("train/grad_norm"),
        "L2 norm",
        spikes=spikes,
        log=True,
    )
    yield from draw.curves(
        "Update norm",
        "L2 norm of the change of all parameters in a step; 0 where the update was skipped.",
        draw.metric("train/update_norm"),
        "L2 norm",
        log=True,
    )
    yield from draw.curves(
        "Parameter norm", "L2 norm of all parameters.", draw.metric("train/param_norm"), "L2 norm"
    )
    yield from draw.curves(
        "Skipped updates",
        "Steps so far whose update was left out: by train.skip_step=nonfinite where the loss or "
        "gradient norm was not finite, by train.skip_step=spike also where it spiked.",
        draw.metric("spikes/skipped_total"),
        "steps",
    )
    names = {name for row in draw.rows for run in row.runs for name in run.names}
    for name in sorted(name for name in names if name.startswith("grad_norm/")):
        group = name.removeprefix("grad_norm/")
        yield from draw.curves(
            f"Gradient norm, {group}",
            f"L2 norm over the parameters of the group {group}.",
            draw.metric(name),
            "L2 norm",
            log=True,
        )


def context(draw: Figures) -> Iterator[Figure]:
    """Context RMS over time and at the end."""
    lengths = {run.cfg.seq_len for row in draw.rows for run in row.runs}
    only = min(lengths) if len(lengths) == 1 else None
    at = f" ({short(only**-0.5)} at n = {only:,})" if only else ""
    expected = (
        f"For uncorrelated values of RMS 1, uniform attention over n visible keys gives 1/√n{at}"
    )
    yield from draw.maps(
        "Mean context RMS, by layer and time",
        f"Mean over tokens and heads. {expected}, a single key 1, and DIFF V2 at most √2; a "
        "model's values are not normalised, so it may lie on either side.",
        "context_rms",
    )
    reference = (only**-0.5, f"1/√n, n = {only:,}") if only else None
    yield from draw.layers(
        "Smallest context RMS, by layer",
        f"Smallest over tokens and heads. {expected}; a model's values are not normalised.",
        "context_rms_min",
        "RMS",
        log=True,
        reference=reference,
    )
    yield from draw.layers(
        "Largest context RMS, by layer",
        "Largest over tokens and heads.",
        "context_rms_max",
        "RMS",
        log=True,
    )


def lambdas(draw: Figures) -> Iterator[Figure]:
    """Of differential attention."""
    yield from draw.maps(
        "Mean lambda, by layer and time",
        "Mean over tokens and heads. Between 0 and 1 under a sigmoid; DIFF V1's, and a raw "
        "projection, can leave that range. At 0 the second map has no weight.",
        "lambda_mean",
    )
    for end, which in (("min", "Smallest"), ("max", "Largest")):
        title = f"{which} lambda, by layer"
        yield from draw.layers(title, f"{which} over tokens and heads.", f"lambda_{end}", "lambda")


def gates(draw: Figures) -> Iterator[Figure]:
    """Of gated attention."""
    yield from draw.layers(
        "Mean gate, by layer",
        "Mean over tokens, heads and channels: 0 is shut, 1 is open.",
        "gate_mean",
        "gate",
    )


def outliers(draw: Figures) -> Iterator[Figure]:
    """Of hidden states, by layer and over time."""
    kinds = (
        ("hidden_top1", "Largest magnitude", "Over tokens and channels", "", "|value|"),
        ("hidden_kurtosis", "Kurtosis", "Over channels, mean over tokens",
         " A normal distribution has 3.", "kurtosis"),
    )  # fmt: skip
    for quantity, title, over, normal, unit in kinds:
        yield from draw.layers(f"{title}, by layer", f"{over}.{normal}", quantity, unit, log=True)
        yield from draw.curves(
            f"{title}, highest layer",
            f"{over}, of the layer where it is highest at that step.{normal}",
            draw.over_tokens(lambda run, q=quantity: largest(run.by_layer(q))),  # type: ignore[misc]
            unit,
            log=True,
        )


def probes(draw: Figures) -> Iterator[Figure]:
    """Of explicit maps."""
    kinds = (
        ("attn_entropy", "Entropy of attention", "nats",
         "Of the softmax maps before they are combined, a sink's share left out; uniform "
         "attention over n keys has ln n."),
        ("attn_logit_top1", "Largest attention logit", "logit",
         "Largest q·k/√d over positions, visible keys, heads and sequences."),
        ("sink_mass", "Weight on the first token", "weight",
         "Signed weight of the effective map, differences taken, on the first visible token: the "
         "start of the document where documents are masked."),
        ("attn_negative_share", "Negative attention weights", "share",
         "Magnitude of the effective map's negative weights over that of all its weights."),
    )  # fmt: skip
    for quantity, title, unit, caption in kinds:
        yield from draw.layers(f"{title}, by layer", caption, quantity, unit)


def experts(draw: Figures) -> Iterator[Figure]:
    """Of mixtures of experts, by layer and over time."""
    yield from draw.curves(
        "Load of the busiest expert, highest layer",
        "Of the layer where it is highest at that step.",
        draw.over_tokens(lambda run: largest(run.by_layer("expert_load_max"))),
        "load",
        log=True,
    )
    kinds = (
        ("expert_load_max", "Load of the busiest expert", "load", "Over experts."),
        ("expert_load_min", "Load of the idlest expert", "load", "Over experts."),
        ("router_entropy", "Entropy of the router", "nats",
         "Of a token's scores over all experts, mean over tokens; uniform scores of E experts have "
         "ln E."),
        ("router_bias_range", "Range of the balancing bias", "score",
         "Largest minus smallest of the experts' biases."),
    )  # fmt: skip
    for quantity, title, unit, caption in kinds:
        yield from draw.layers(f"{title}, by layer", caption, quantity, unit)


def start_of(bands: list[Band | None]) -> float | None:
    """Just above the highest curve's start: what lies above is a spike or a divergence."""
    drawn = [band.high[np.isfinite(band.high)] for band in bands if band is not None]
    starts = [float(high[0]) for high in drawn if len(high)]
    return 1.05 * max(starts) if starts else None


def marked(spikes: list[np.ndarray], what: str) -> str:
    """What the lanes below the curves are, where there are any."""
    if not any(map(len, spikes)):
        return ""
    return (
        f" Strokes below, a lane a row in the legend's order, its seeds together: {what} spiked, "
        "by the 128-step definition, since the previous logged step."
    )
