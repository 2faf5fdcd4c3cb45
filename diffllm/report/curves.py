"""Curves over tokens and over layers, a line a row."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    ScalarFormatter,
)

from diffllm.report.bands import Band, thinned
from diffllm.report.numbers import compact, short
from diffllm.report.style import HEIGHT, MUTED, SMALL, RowStyle, new_figure, place

Bands = Sequence[Band | None]
"""Of every row, in the order of styles."""
TOKENS = FuncFormatter(lambda x, _: compact(x))
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
    spikes: Sequence[np.ndarray] | None = None,
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
    lanes = len(styles) * LANE + 8 if spikes is not None and any(map(len, spikes)) else 0
    figure = new_figure(height=HEIGHT + lanes)
    axes = place(figure, LEFT, TOP, RIGHT, BOTTOM + lanes)
    end = draw_bands(axes, bands, styles, log)
    draw_stops(axes, bands, styles, log)
    name_axes(axes, unit)
    axes.set_xlim(start, end + 0.01 * (end - start) or 1)
    if zero:
        axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
    if log:
        logarithmic(axes)
    elif top is not None:
        bottom = min(float(band.drawn.min()) for band in bands if band and len(band.drawn))
        axes.set_ylim(bottom - 0.05 * (top - bottom), top)
    last = axes
    if lanes and spikes is not None:
        box = axes.get_position()
        height = figure.get_size_inches()[1] * 72
        size = (box.width, (lanes - 4) / height)
        last = figure.add_axes((box.x0, BOTTOM / height, *size), sharex=axes)
        draw_lanes(last, spikes, styles)
        axes.tick_params(axis="x", labelbottom=False)
    last.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
    last.xaxis.set_major_formatter(TOKENS)
    figure.text(1, 0.012, "tokens", ha="right", va="bottom", color=MUTED)
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
    figure = new_figure()
    axes = place(figure, LEFT, TOP, RIGHT, BOTTOM)
    draw_bands(axes, bands, styles, log)
    name_axes(axes, unit)
    if log:
        logarithmic(axes)
    axes.margins(x=0.04)
    if reference is not None:
        value, name = reference
        axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            name,
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    figure.text(1, 0.012, "layer", ha="right", va="bottom", color=MUTED)
    return figure


def draw_bands(axes: Axes, bands: Bands, styles: list[RowStyle], log: bool) -> float:
    """All rows; returns the largest x."""
    end = 0.0
    for band, style in zip(bands, styles, strict=True):
        if band is None or not len(band.x):
            continue
        end = max(end, float(band.x[-1]))
        band = thinned(band)
        few = len(band.x) <= FEW
        marker = {"marker": style.marker, "markersize": 3.6} if few else {}
        mean, low = (positive(y) if log else y for y in (band.mean, band.low))
        axes.plot(band.x, mean, linewidth=1.6, **style.line, **marker)  # type: ignore[arg-type]
        for x, y in band.singles:
            line = {**style.line, **marker, "linewidth": 0.7, "markersize": 2}
            axes.plot(x, positive(y) if log else y, **line)  # type: ignore[arg-type]
        if (band.high > band.low).any():
            axes.fill_between(
                band.x,
                low,
                band.high,
                color=style.colour,
                alpha=0.16 if len(styles) <= MANY else 0.09,
                linewidth=0,
                gid=style.gid,
            )
    return end


def draw_stops(axes: Axes, bands: Bands, styles: list[RowStyle], log: bool) -> None:
    """A cross where a seed ends early or is no longer finite."""
    for band, style in zip(bands, styles, strict=True):
        if band is not None and len(band.stops):
            x, y = band.stops.T
            cross = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6, "linestyle": "none"}
            y = positive(y) if log else y
            axes.plot(x, y, color=style.colour, gid=style.gid, **cross)  # type: ignore[arg-type]


def positive(values: np.ndarray) -> np.ndarray:
    """NaN for the rest, which has no place on a logarithmic scale."""
    return np.where(values > 0, values, np.nan)


def name_axes(axes: Axes, unit: str) -> None:
    """The unit above the scale, where it needs no turned head."""
    axes.annotate(
        unit,
        (0, 1),
        xycoords="axes fraction",
        xytext=(2 - LEFT, 9),
        textcoords="offset points",
        color=MUTED,
    )
    axes.tick_params(labelsize=SMALL, pad=3)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    plain = ScalarFormatter(useOffset=False)
    plain.set_scientific(False)
    axes.yaxis.set_major_formatter(plain)


def logarithmic(axes: Axes) -> None:
    """A logarithmic scale with plain numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    subs: tuple[float, ...] = (1, 2, 5) if decades < 2.2 else (1,)
    if decades < 0.6:
        subs = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y, 4)))


def draw_lanes(axes: Axes, spikes: Sequence[np.ndarray], styles: list[RowStyle]) -> None:
    """A lane a row, in the legend's order; a stroke where its count had risen."""
    for tokens, style in zip(spikes, styles, strict=True):
        lane = len(styles) - style.index
        at = np.unique(tokens).astype(float)
        x = np.repeat(at, 3)
        y = np.tile((lane - 0.4, lane + 0.4, np.nan), len(at))
        if len(at):
            axes.plot(x, y, color=style.colour, linewidth=1.3, gid=style.gid)
    axes.set_ylim(0.4, len(styles) + 0.6)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(labelsize=SMALL, pad=3)
