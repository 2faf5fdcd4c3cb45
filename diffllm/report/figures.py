"""Which figures a report has, and what each says.

A section without data is left out; so is a figure that no run has the metrics for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Drawing

from diffllm.report import bands as of
from diffllm.report.bands import Band
from diffllm.report.comparison import Comparison
from diffllm.report.curves import draw_curves, draw_layers
from diffllm.report.heatmaps import draw_bar, draw_map, maps_of
from diffllm.report.numbers import short
from diffllm.report.runs import Run, Series
from diffllm.report.style import RowStyle, to_svg


@dataclass(frozen=True)
class Panel:
    """One map among several."""

    style: RowStyle
    svg: str


@dataclass(frozen=True)
class Figure:
    """A card of the page: one drawing, or a panel a row under a shared colour bar."""

    title: str
    caption: str
    svg: str
    panels: list[Panel] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """Figures on one subject."""

    title: str
    intro: str
    figures: list[Figure]


class Figures:
    """Draws the figures of one comparison."""

    def __init__(self, comparison: Comparison, styles: list[RowStyle]):
        self.comparison, self.rows, self.styles = comparison, comparison.rows, styles
        self.several = any(len(row.runs) > 1 for row in self.rows)
        self.count = 0

    def sections(self) -> list[Section]:
        """Those that have a figure."""
        made = (
            Section(
                "Learning",
                "Losses in nats a token, over training tokens.",
                list(self.learning()),
            ),
            Section(
                "Stability",
                "Gradient norms are taken before clipping.",
                list(self.stability()),
            ),
            Section(
                "Context RMS",
                "The context is the vector per token and head that enters attention's output "
                "projection; its RMS is taken over channels (for DIFF V1 before the head norm).",
                list(self.context()),
            ),
            Section(
                "Lambda and gate",
                "Lambda weighs the second attention map, which differential attention subtracts.",
                list(self.weights()),
            ),
            Section(
                "Outliers",
                "Of the outputs of blocks; large ones cost precision in bf16 and in quantisation.",
                list(self.outliers()),
            ),
            Section(
                "Attention maps",
                "Taken from explicit maps of a few sequences, by layer, at the last step logged.",
                list(self.probes()),
            ),
        )
        return [section for section in made if section.figures]

    def learning(self) -> Iterator[Figure]:
        """Losses and the gap."""
        train = self.over_tokens(lambda run: of.smoothed(run.series("train/loss")))
        held_out = self.over_tokens(lambda run: run.series("eval/loss"))
        said = f"of the logged steps' losses (over {100 // of.SMOOTHING}% of them)"
        spikes = [of.rises(row, "spikes/loss_total") for row in self.rows]
        yield from self.curves(
            "Training loss",
            f"Running mean {said}, in nats a token." + marked(spikes, "the loss"),
            train,
            "nats a token",
            spikes=spikes,
            top=start_of(train),
        )
        yield from self.curves(
            "Held-out loss",
            "On held-out documents, in nats a token, at every evaluation.",
            held_out,
            "nats a token",
            top=start_of(held_out),
        )
        pairs = [(row, of.baseline_of(self.comparison, row)) for row in self.rows]
        gaps = [of.gap_band(row, base) if base else None for row, base in pairs]
        yield from self.curves(
            f"Gap to {self.comparison.baseline}",
            "Held-out loss minus the baseline's of the same seed, in nats a token: below 0 the row "
            "is better than the baseline.",
            gaps,
            "nats a token",
            zero=True,
        )
        half = max((float(band.x[-1]) for band in train if band is not None), default=0) / 2
        late = [band and band.since(half) for band in train]
        if sum(len(band.x) for band in late if band) > 2 * len(self.rows):
            yield from self.curves(
                "Training loss, second half",
                f"The same running mean {said}, on a scale of its own.",
                late,
                "nats a token",
                start=half,
            )

    def stability(self) -> Iterator[Figure]:
        """Gradients and updates."""
        spikes = [of.rises(row, "spikes/grad_total") for row in self.rows]
        yield from self.curves(
            "Gradient norm",
            "Global L2 norm before clipping, at logged steps, on a logarithmic scale."
            + marked(spikes, "the gradient norm"),
            self.metric("train/grad_norm"),
            "L2 norm",
            spikes=spikes,
            log=True,
        )
        yield from self.curves(
            "Update norm",
            "L2 norm of the change of all parameters in a step, on a logarithmic scale.",
            self.metric("train/update_norm"),
            "L2 norm",
            log=True,
        )
        yield from self.curves(
            "Parameter norm",
            "L2 norm of all parameters.",
            self.metric("train/param_norm"),
            "L2 norm",
        )
        yield from self.curves(
            "Skipped updates",
            "Steps so far whose update was left out because of a spike.",
            self.metric("spikes/skipped_total"),
            "steps",
        )
        names = {name for row in self.rows for run in row.runs for name in run.names}
        for name in sorted(name for name in names if name.startswith("grad_norm/")):
            group = name.removeprefix("grad_norm/")
            yield from self.curves(
                f"Gradient norm, {group}",
                f"L2 norm over the parameters of the group {group}, on a logarithmic scale.",
                self.metric(name),
                "L2 norm",
                log=True,
            )

    def context(self) -> Iterator[Figure]:
        """Context RMS over time and at the end."""
        lengths = {run.cfg.seq_len for row in self.rows for run in row.runs}
        at = "".join(f", {short(n**-0.5)} at n = {n:,}" for n in lengths if len(lengths) == 1)
        reference = (lengths.pop() ** -0.5, "1/√n") if len(lengths) == 1 else None
        uniform = f"Uniform attention over n uncorrelated values of RMS 1 gives 1/√n{at}"
        yield from self.maps(
            "Mean context RMS, by layer and time",
            "Mean over tokens and heads. "
            f"{uniform}; standard attention stays above it and below 1, DIFF V2 below √2.",
            "context_rms",
        )
        for end, which in (("min", "Smallest"), ("max", "Largest")):
            yield from self.layers(
                f"{which} context RMS, by layer",
                f"{which} over tokens and heads, at the last logged step; logarithmic. {uniform}.",
                f"context_rms_{end}",
                "RMS",
                log=True,
                reference=reference if end == "min" else None,
            )

    def weights(self) -> Iterator[Figure]:
        """Lambda, and the gate."""
        yield from self.maps(
            "Mean lambda, by layer and time",
            "Mean over tokens and heads. Between 0 and 1 under a sigmoid; DIFF V1's, and a raw "
            "projection, can leave that range. 0 would be standard attention.",
            "lambda_mean",
        )
        for end, which in (("min", "Smallest"), ("max", "Largest")):
            yield from self.layers(
                f"{which} lambda, by layer",
                f"{which} over tokens and heads, at the last logged step.",
                f"lambda_{end}",
                "lambda",
            )
        yield from self.layers(
            "Mean gate, by layer",
            "Mean over tokens, heads and channels at the last logged step: 0 is shut, 1 is open.",
            "gate_mean",
            "gate",
        )

    def outliers(self) -> Iterator[Figure]:
        """Of hidden states, by layer and over time."""
        kinds = (
            ("hidden_top1", "Largest magnitude", "over tokens and channels", "|value|"),
            ("hidden_kurtosis", "Kurtosis", "over channels, mean over tokens", "kurtosis"),
        )
        normal = {"hidden_kurtosis": " A normal distribution has 3."}
        for quantity, title, over, unit in kinds:
            yield from self.layers(
                f"{title}, by layer",
                f"{title} {over}, at the last logged step; logarithmic.{normal.get(quantity, '')}",
                quantity,
                unit,
                log=True,
            )
            yield from self.curves(
                f"{title}, highest layer",
                f"{title} {over}, of the layer where it is highest at that step; logarithmic.",
                self.over_tokens(lambda run, q=quantity: of.largest(run.by_layer(q))),  # type: ignore[misc]
                unit,
                log=True,
            )

    def probes(self) -> Iterator[Figure]:
        """Of explicit maps."""
        kinds = (
            ("attn_entropy", "Entropy of attention", "nats",
             "Mean over queries and heads, in nats; uniform attention over n keys has ln n."),
            ("attn_logit_top1", "Largest attention logit", "logit",
             "Largest q·k/√d over queries, keys and heads."),
            ("sink_mass", "Weight on the first token", "share",
             "Mean attention weight on the first token: the attention sink."),
            ("attn_negative_share", "Negative attention weights", "share",
             "Share of the combined map's weights that are below 0."),
        )  # fmt: skip
        for quantity, title, unit, caption in kinds:
            yield from self.layers(f"{title}, by layer", caption, quantity, unit)

    def over_tokens(self, pick: Callable[[Run], Series]) -> list[Band | None]:
        return [of.band_of(row, pick) for row in self.rows]

    def metric(self, name: str) -> list[Band | None]:
        return self.over_tokens(lambda run: run.series(name))

    def curves(
        self, title: str, caption: str, bands: list[Band | None], unit: str, **how: Any
    ) -> Iterator[Figure]:
        """One figure over tokens, if there is anything to draw."""
        drawn = [band for band in bands if band is not None and len(band.x)]
        if not drawn:
            return
        top = how.get("top")
        if top is not None:
            highest = max(float(band.high.max()) for band in drawn)
            if highest <= top:
                how["top"] = None
            else:
                caption += f" The scale ends at {short(top)}; values go to {short(highest)}."
        yield self.card(title, caption, draw_curves(bands, self.styles, unit, **how))

    def layers(
        self, title: str, caption: str, quantity: str, unit: str, **how: Any
    ) -> Iterator[Figure]:
        """One figure over layers, if there is anything to draw."""
        bands = [of.at_end(row, quantity) for row in self.rows]
        if any(bands):
            yield self.card(title, caption, draw_layers(bands, self.styles, unit, **how))

    def maps(self, title: str, caption: str, quantity: str) -> Iterator[Figure]:
        """A panel for every row that logged it."""
        maps = maps_of(self.rows, quantity)
        if maps is None:
            return
        panels = [
            Panel(
                style, self.svg(draw_map(values, maps), f"{title}: {style.label}. {ends(values)}")
            )
            for style, values in zip(self.styles, maps.values, strict=True)
            if values is not None
        ]
        several = ", mean over seeds" if self.several else ""
        reading = (
            f"Layers upwards from 0, tokens to the right, colour on {maps.scale.kind}"
            if maps.scale.colours == "viridis"
            else f"Layers upwards from 0, tokens to the right, {maps.scale.kind}"
        )
        shared = " that all panels share" if len(panels) > 1 else ""
        caption = f"{caption} {reading}{shared}{several}."
        bar = self.svg(draw_bar(maps), f"{title}: scale of colours")
        yield Figure(title, caption, bar, panels)

    def card(self, title: str, caption: str, drawing: Drawing) -> Figure:
        """A single drawing."""
        return Figure(title, caption, self.svg(drawing, f"{title}. {caption}"))

    def svg(self, drawing: Drawing, label: str) -> str:
        self.count += 1
        return to_svg(drawing, f"f{self.count}", label, self.styles)


def start_of(bands: list[Band | None]) -> float | None:
    """Just above the highest curve's start: what lies above is a spike or a divergence."""
    starts = [float(band.mean[0]) for band in bands if band is not None and len(band.x)]
    return 1.05 * max(starts) if starts else None


def marked(spikes: list[np.ndarray], what: str) -> str:
    """What the lanes below the curves are, where there are any."""
    if not any(map(len, spikes)):
        return ""
    return (
        f" Strokes below, a lane a row in the legend's order: {what} spiked since the line before."
    )


def ends(values: np.ndarray) -> str:
    """A map in words: its range at the first and last logged time."""
    logged = np.flatnonzero(np.isfinite(values).any(axis=0))
    first, last = (values[:, i][np.isfinite(values[:, i])] for i in (logged[0], logged[-1]))
    return (
        f"From {short(first.min())} to {short(first.max())} over layers at first, "
        f"from {short(last.min())} to {short(last.max())} at last."
    )
