"""Figures of curves over tokens and over layers, a line a row."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from diffllm.compare.report.bands import Band, Floor, envelope, thinned
from diffllm.compare.report.numbers import compact, short
from diffllm.compare.report.style import HEIGHT, MUTED, WIDTH, RowStyle, new_figure
from diffllm.metrics.records import LARGEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bands = Sequence[Band | None]
"""The band of every row, in the order of styles."""
LANE, LANES = 6, 96
"""Pixels of a row's lane of spikes, and of all lanes at most."""
ROUND = [1, 2, 2.5, 5, 10]
NUMBERED = 24
"""Layers up to which each has its number below a figure."""
NUMBERED_LEVELS = 12
"""Levels up to which each has its number below a figure."""
MANY = 6
"""Rows from which on bands are fainter."""
FEW = 24
"""Points up to which each is marked."""


def draw_curves(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    spikes: Sequence[np.ndarray] = (),
    log: bool = False,
    zero: bool = False,
    start: float = 0,
    top: float | None = None,
    mark: tuple[float, str] | None = None,
    floor: Floor | None = None,
    across: str = "tokens",
) -> "Figure":
    """Means as lines, seeds as bands and alone as thin lines, over tokens or what else was spent.

    Args:
        spikes: of every row, the tokens to mark in a lane below the curves.
        log: leaves out what is not positive.
        zero: whether to draw a line at zero.
        start: tokens at which the axis begins.
        top: where a linear scale ends; None shows everything.
        mark: a value to draw a line at, and its name.
        floor: the noise floor, drawn around zero behind the curves.
        across: the name of the horizontal axis.
    """
    lanes = min(len(styles) * LANE, LANES) + 8 if any(map(len, spikes)) else 0
    figure, axes, last = empty(bands, styles, lanes)
    draw_bands(axes, bands, styles, unit, log, mark)
    axes.margins(x=0.01)
    axes.set_xlim(left=start)
    if zero:
        axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
    if floor is not None:
        axes.fill_between(floor.x, -floor.half, floor.half, color=MUTED, alpha=0.22, lw=0, zorder=0)
    if top is not None and not log:
        axes.set_ylim(axes.dataLim.ymin - 0.05 * (top - axes.dataLim.ymin), top)
    if lanes:
        draw_lanes(last, spikes, styles)
    last.set_xlabel(across, loc="right")
    last.locator_params(axis="x", nbins=5, steps=ROUND)
    last.xaxis.set_major_formatter(lambda x, _: compact(x))
    return figure


def draw_layers(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    log: bool = False,
    mark: tuple[float, str] | None = None,
) -> "Figure":
    """Means as lines and seeds as bands, over layers.

    Args:
        log: leaves out what is not positive.
        mark: a value to draw a line at, and its name.
    """
    figure, axes, _ = empty(bands, styles)
    draw_bands(axes, bands, styles, unit, log, mark)
    layers = sorted({int(x) for band in bands if band is not None for x in band.x})
    label_places(axes, "layer", layers, [f"{layer}" for layer in layers], NUMBERED)
    return figure


def draw_levels(
    bands: Bands, styles: list[RowStyle], unit: str, setting: str, labels: Sequence[str]
) -> "Figure":
    """Draw means as lines and seeds as bands over the values `labels` of a setting."""
    figure, axes, _ = empty(bands, styles)
    draw_bands(axes, bands, styles, unit)
    label_places(axes, setting, range(len(labels)), labels, NUMBERED_LEVELS)
    return figure


def empty(
    bands: Bands, styles: list[RowStyle], lanes: float = 0
) -> tuple["Figure", "Axes", "Axes"]:
    """A figure with a legend of the rows that have a band, its axes, and those below of the lanes,
    which may be the same.

    Args:
        lanes: pixels of the lanes.
    """
    drawn = [style for band, style in zip(bands, styles, strict=True) if band is not None]
    figure = new_figure(WIDTH, HEIGHT + lanes, drawn)
    if not lanes:
        axes = figure.subplots()
        return figure, axes, axes
    axes, last = figure.subplots(2, 1, sharex=True, height_ratios=[HEIGHT, lanes])
    figure.get_layout_engine().set(h_pad=0.03, hspace=0)  # type: ignore[union-attr, call-arg]
    return figure, axes, last


def label_places(
    axes: "Axes", across: str, places: Sequence[int], labels: Sequence[str], most: int
) -> None:
    """Label the horizontal axis, with so few labels that there are `most`."""
    axes.margins(x=0.04)
    every = -(-len(labels) // most)
    axes.set_xticks(places[::every], labels[::every])
    axes.set_xlabel(across, loc="right")


def draw_bands(
    axes: "Axes",
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    log: bool = False,
    mark: tuple[float, str] | None = None,
) -> None:
    """Draw the curves of all rows, with a cross where a seed ends early or is no longer finite.

    Args:
        unit: stands above the scale, where it needs no turned head.
        log: leaves out what is not positive.
        mark: a value to draw a dotted line at, and its name beside the axes.
    """
    alpha = 0.16 if len(styles) <= MANY else 0.09
    for band, style in zip(bands, styles, strict=True):
        if band is None:
            continue
        few = len(band.x) <= FEW
        thick = {"linewidth": 1.6, "markersize": 3.6, "marker": style.marker if few else ""}
        thin = {**thick, "linewidth": 0.7, "markersize": 2}
        for y, how in ((band.mean, thick), *((y, thin) for y in band.singles)):
            kept = thinned(y)
            axes.plot(band.x[kept], on_scale(y[kept], log), **(style.line | how))
        x, low, high = envelope(band)
        low = on_scale(low, log)
        known = np.isfinite(low) & np.isfinite(high)
        if (high > low)[known].any():
            axes.fill_between(x, low, high, where=known, color=style.colour, alpha=alpha, lw=0)
        if band.stops:
            x, y = np.transpose(band.stops)
            axes.plot(x, on_scale(y, log), "x", color=style.colour, ms=6, mew=1.6)
    axes.set_title(unit, loc="left")
    axes.locator_params(axis="y", nbins=6, steps=ROUND)
    if mark is not None:
        value, name = mark
        axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            name, (1, value), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="left", va="center", color=MUTED,
        )  # fmt: skip
    if log:
        logarithmic(axes)


def on_scale(values: np.ndarray, log: bool) -> np.ndarray:
    """Replace values without a place on a logarithmic scale by NaN."""
    return np.where(values > 1 / LARGEST, values, np.nan) if log else values


def logarithmic(axes: "Axes") -> None:
    """A logarithmic scale with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    subs: tuple[float, ...] = (1, 2, 5) if decades < 2.2 else (1,)
    if decades < 0.6:
        subs = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda y, _: short(y, 4))


def draw_lanes(axes: "Axes", spikes: Sequence[np.ndarray], styles: list[RowStyle]) -> None:
    """A lane a row, in the table's order; a stroke where its count had risen."""
    for i, (tokens, style) in enumerate(zip(spikes, styles, strict=True)):
        lane, at = len(styles) - i, np.unique(tokens)
        axes.vlines(at, lane - 0.4, lane + 0.4, color=style.colour, linewidth=1.3)
    axes.set_ylim(0.4, len(styles) + 0.6)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
