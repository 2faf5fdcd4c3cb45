"""Figures of curves over tokens and over layers, a line a row."""

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diffllm.report.bands import Band, envelope, extremes
from diffllm.report.numbers import compact, short
from diffllm.report.style import HEIGHT, MUTED, RowStyle, new_figure, place

Bands = Sequence[Band | None]
"""The band of every row, in the order of styles."""
TOKENS = FuncFormatter(lambda x, _: compact(x))
WHOLE = FuncFormatter(lambda x, _: f"{x:.0f}")
LEFT, TOP, RIGHT, BOTTOM = 46, 22, 14, 34
LANE = 6
ROUND = [1, 2, 2.5, 5, 10]
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
) -> Figure:
    """Means as lines, seeds as bands and alone as thin lines, over tokens.

    Args:
        spikes: of every row, the tokens to mark in a lane below the curves.
        log: leaves out what is not positive.
        zero: whether to draw a line at zero.
        start: tokens at which the axis begins.
        top: where a linear scale ends; None shows everything.
    """
    lanes = len(styles) * LANE + 8 if any(map(len, spikes)) else 0
    figure, axes = draw_bands(bands, styles, unit, log, "tokens", lanes)
    axes.margins(x=0.01)
    axes.set_xlim(left=start)
    if zero:
        axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
    if top is not None and not log:
        axes.set_ylim(axes.dataLim.ymin - 0.05 * (top - axes.dataLim.ymin), top)
    last = axes
    if lanes:
        last = place(figure, LEFT, HEIGHT - BOTTOM + 4, RIGHT, BOTTOM, sharex=axes)
        draw_lanes(last, spikes, styles)
        axes.tick_params(axis="x", labelbottom=False)
    last.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
    last.xaxis.set_major_formatter(TOKENS)
    return figure


def draw_layers(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    log: bool = False,
    reference: tuple[float, str] | None = None,
) -> Figure:
    """Means as lines and seeds as bands, over layers.

    Args:
        log: leaves out what is not positive.
        reference: a value to draw a line at, and what it is.
    """
    figure, axes = draw_bands(bands, styles, unit, log, "layer")
    axes.margins(x=0.04)
    if reference is not None:
        value, name = reference
        axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            name, (1, value), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", color=MUTED,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(WHOLE)
    return figure


def draw_bands(
    bands: Bands, styles: list[RowStyle], unit: str, log: bool, across: str, lanes: float = 0
) -> tuple[Figure, Axes]:
    """A figure of all rows, with a cross where a seed ends early or is no longer finite.

    Args:
        unit, across: the names of the axes.
        lanes: pixels to leave free below the curves.
    """
    figure = new_figure(height=HEIGHT + lanes)
    axes = place(figure, LEFT, TOP, RIGHT, BOTTOM + lanes)
    alpha = 0.16 if len(styles) <= MANY else 0.09
    for band, style in zip(bands, styles, strict=True):
        if band is None:
            continue
        few = len(band.x) <= FEW
        thick = {"linewidth": 1.6, "markersize": 3.6, "marker": style.marker if few else ""}
        thin = {**thick, "linewidth": 0.7, "markersize": 2}
        for y, how in ((band.mean, thick), *((y, thin) for y in band.singles)):
            kept = extremes(y)
            axes.plot(band.x[kept], shown(y[kept], log), **style.line, **how)  # type: ignore[arg-type]
        if (band.high > band.low).any():
            x, low, high = envelope(band)
            how = {"color": style.colour, "alpha": alpha, "linewidth": 0, "gid": style.gid}
            axes.fill_between(x, shown(low, log), high, **how)  # type: ignore[arg-type]
        if band.stops:
            x, y = np.transpose(band.stops)
            how = {"color": style.colour, "markersize": 6, "markeredgewidth": 1.6, "gid": style.gid}
            axes.plot(x, shown(y, log), "x", **how)  # type: ignore[arg-type]
    name_axes(figure, axes, unit, across)
    if log:
        logarithmic(axes)
    return figure, axes


def shown(values: np.ndarray, log: bool) -> np.ndarray:
    """NaN for what has no place on a logarithmic scale."""
    return np.where(values > 0, values, np.nan) if log else values


def name_axes(figure: Figure, axes: Axes, unit: str, across: str) -> None:
    """The unit above the scale, where it needs no turned head."""
    axes.annotate(
        unit, (0, 1), (2 - LEFT, 9), xycoords="axes fraction", textcoords="offset points",
        color=MUTED,
    )  # fmt: skip
    figure.text(1, 0.012, across, ha="right", va="bottom", color=MUTED)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))


def logarithmic(axes: Axes) -> None:
    """A logarithmic scale with plain numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    subs: tuple[float, ...] = (1, 2, 5) if decades < 2.2 else (1,)
    if decades < 0.6:
        subs = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y, 4)))


def draw_lanes(axes: Axes, spikes: Sequence[np.ndarray], styles: list[RowStyle]) -> None:
    """A lane a row, in the legend's order; a stroke where its count had risen."""
    for tokens, style in zip(spikes, styles, strict=True):
        lane, at = len(styles) - style.index, np.unique(tokens)
        how = {"color": style.colour, "linewidth": 1.3, "gid": style.gid}
        axes.vlines(at, lane - 0.4, lane + 0.4, **how)  # type: ignore[arg-type]
    axes.set_ylim(0.4, len(styles) + 0.6)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
