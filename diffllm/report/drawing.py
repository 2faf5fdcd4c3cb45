"""Figures: curves over tokens and over layers, a line a row, and maps of layers over time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diffllm.report.bands import Band, over_time, thinned
from diffllm.report.numbers import compact, short
from diffllm.report.rows import Row
from diffllm.report.style import HEIGHT, MUTED, SMALL, RowStyle, new_figure, place

Bands = Sequence[Band | None]
"""The band of every row, in the order of styles."""
TOKENS = FuncFormatter(lambda x, _: compact(x))
LEFT, TOP, RIGHT, BOTTOM = 46, 22, 14, 34
LANE = 6
ROUND = [1, 2, 2.5, 5, 10]
MANY = 6
"""Rows from which on bands are fainter."""
FEW = 24
"""Points up to which each is marked."""
STRETCHES = 100
"""Most stretches of tokens that a map tells apart."""
WIDE = 20
"""Ratio of largest to smallest from which the scale is logarithmic."""
MAP_WIDTH, MAP_HEIGHT, BAR_HEIGHT = 300, 168, 40
MAP_LEFT, MAP_TOP, MAP_RIGHT, MAP_BOTTOM = 26, 18, 10, 34


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
            name, (1, value), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", color=MUTED,
        )  # fmt: skip
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
            alpha = 0.16 if len(styles) <= MANY else 0.09
            how = {"color": style.colour, "alpha": alpha, "linewidth": 0, "gid": style.gid}
            axes.fill_between(band.x, low, band.high, **how)  # type: ignore[arg-type]
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
        unit, (0, 1), (2 - LEFT, 9), xycoords="axes fraction", textcoords="offset points",
        color=MUTED,
    )  # fmt: skip
    axes.tick_params(labelsize=SMALL, pad=3)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    plain = ticker.ScalarFormatter(useOffset=False)
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
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
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


@dataclass(frozen=True)
class Scale:
    """Colours of values."""

    norm: Normalize
    colours: str
    kind: str
    """In words, for the caption."""


@dataclass(frozen=True)
class Maps:
    """A quantity's maps, (L, n) a row or None, and what they share."""

    values: list[np.ndarray | None]
    tokens: float
    """Where time ends."""
    scale: Scale


def maps_of(rows: list[Row], quantity: str) -> Maps | None:
    """None if no row ever logged it, or nothing finite."""
    logged = [run.by_layer(quantity).tokens for row in rows for run in row.runs]
    longest = max(logged, key=len, default=np.zeros(0))
    end = max((float(tokens[-1]) for tokens in logged if len(tokens)), default=0.0)
    if not len(longest):
        return None
    edges = np.linspace(0, end, min(len(longest), STRETCHES) + 1)
    values = [over_time(row, quantity, edges) for row in rows]
    seen = np.concatenate([v[np.isfinite(v)] for v in values if v is not None])
    return Maps(values, end, scale_of(seen)) if len(seen) else None


def scale_of(seen: np.ndarray) -> Scale:
    """Diverging about 0 where there are values on both sides, logarithmic for a wide range."""
    low, high = float(seen.min()), float(seen.max())
    if low < 0:
        limit = max(-low, high)
        return Scale(Normalize(-limit, limit), "RdBu_r", "red above 0, blue below")
    if low > 0 and high > WIDE * low:
        return Scale(LogNorm(low, high), "viridis", "a logarithmic scale")
    if high - low < 1e-9 * high:
        low, high = 0.9 * low, 1.1 * high or 1.0
    return Scale(Normalize(low, high), "viridis", "a linear scale")


def draw_map(values: np.ndarray, maps: Maps) -> Figure:
    """values (L, n): layers upwards, tokens to the right."""
    figure = new_figure(MAP_WIDTH, MAP_HEIGHT)
    axes = place(figure, MAP_LEFT, MAP_TOP, MAP_RIGHT, MAP_BOTTOM)
    n_layers = len(values)
    axes.imshow(
        np.ma.masked_invalid(values), cmap=maps.scale.colours, norm=maps.scale.norm, origin="lower",
        extent=(0, maps.tokens or 1, -0.5, n_layers - 0.5), aspect="auto", interpolation="none",
    )  # fmt: skip
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f}"))
    axes.set_ylim(-0.5, n_layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
    axes.xaxis.set_major_formatter(TOKENS)
    axes.tick_params(labelsize=SMALL, pad=3)
    figure.text(0, 0.99, "layer", ha="left", va="top", color=MUTED)
    figure.text(1, 0.012, "tokens", ha="right", va="bottom", color=MUTED)
    return figure


def draw_bar(maps: Maps) -> Figure:
    """The scale that all maps share."""
    figure = new_figure(MAP_WIDTH, BAR_HEIGHT)
    axes = place(figure, MAP_LEFT, 8, MAP_RIGHT, 20)
    bar = figure.colorbar(
        ScalarMappable(maps.scale.norm, maps.scale.colours), cax=axes, orientation="horizontal"
    )
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    norm = maps.scale.norm
    low, high = float(norm.vmin or 0), float(norm.vmax or 0)
    ticks = np.geomspace(low, high, 4) if isinstance(norm, LogNorm) else np.linspace(low, high, 5)
    bar.ax.xaxis.set_major_locator(ticker.FixedLocator(ticks.tolist()))
    bar.ax.xaxis.set_minor_locator(ticker.NullLocator())
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x, 2)))
    bar.ax.tick_params(labelsize=SMALL, color=MUTED, length=3, pad=2)
    return figure
