"""A quantity of every layer over time, as a map a row on one colour scale."""

from dataclasses import dataclass

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from diffllm.report.bands import over_time
from diffllm.report.comparison import Row
from diffllm.report.curves import ROUND, TOKENS
from diffllm.report.numbers import short
from diffllm.report.style import MUTED, SMALL, new_figure, place

STRETCHES = 100
"""Most stretches of tokens that a map tells apart."""
WIDE = 20
"""Ratio of largest to smallest from which the scale is logarithmic."""
WIDTH, HEIGHT, BAR_HEIGHT = 300, 168, 40
LEFT, TOP, RIGHT, BOTTOM = 26, 18, 10, 34


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
    figure = new_figure(WIDTH, HEIGHT)
    axes = place(figure, LEFT, TOP, RIGHT, BOTTOM)
    n_layers = len(values)
    axes.imshow(
        np.ma.masked_invalid(values),
        cmap=maps.scale.colours,
        norm=maps.scale.norm,
        origin="lower",
        extent=(0, maps.tokens or 1, -0.5, n_layers - 0.5),
        aspect="auto",
        interpolation="none",
    )
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
    figure = new_figure(WIDTH, BAR_HEIGHT)
    axes = place(figure, LEFT, 8, RIGHT, 20)
    bar = figure.colorbar(
        ScalarMappable(maps.scale.norm, maps.scale.colours), cax=axes, orientation="horizontal"
    )
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    norm = maps.scale.norm
    low, high = float(norm.vmin or 0), float(norm.vmax or 0)
    ticks = np.geomspace(low, high, 4) if isinstance(norm, LogNorm) else np.linspace(low, high, 5)
    bar.ax.xaxis.set_major_locator(FixedLocator(ticks.tolist()))
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x, 2)))
    bar.ax.tick_params(labelsize=SMALL, color=MUTED, length=3, pad=2)
    return figure
