"""Maps of a quantity over layers and tokens, one for every row, on one scale of colours."""

from dataclasses import dataclass

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diffllm.compare.report.bands import over_time
from diffllm.compare.report.drawing import AMOUNT, ROUND
from diffllm.compare.report.numbers import short
from diffllm.compare.report.rows import Row
from diffllm.compare.report.style import MUTED, new_figure, place

STRETCHES = 100
"""Most stretches of tokens that a map tells apart."""
WIDE = 20
"""Ratio of largest to smallest from which the scale is logarithmic."""
WIDTH, BAR_HEIGHT = 300, 40
LEFT, TOP, RIGHT, BOTTOM = 26, 22, 12, 36
LAYER, LEAST = 14, 120
"""Pixels: of a layer, which holds its number, and of a map of few layers."""


@dataclass(frozen=True)
class Heatmaps:
    """The maps of all rows, and what they share."""

    grids: list[np.ndarray | None]
    """(L, n) of every row: layers, stretches of tokens; None where it was never logged."""
    end: float
    """Tokens at which time ends."""
    norm: Normalize
    colours: str
    """Name of the colour map."""
    scale: str
    """Colours and norm in words."""


def heatmaps(rows: list[Row], quantity: str) -> Heatmaps | None:
    """The maps of a quantity; None if no row ever logged it, or nothing finite."""
    logged = [run.by_layer(quantity).tokens for row in rows for run in row.runs]
    most, end = max(map(len, logged)), max(tokens.max(initial=0) for tokens in logged)
    if not most:
        return None
    edges = np.linspace(0, end, min(most, STRETCHES) + 1)
    grids = [over_time(row, quantity, edges) for row in rows]
    seen = np.concatenate([grid[np.isfinite(grid)] for grid in grids if grid is not None])
    return Heatmaps(grids, end, *scale_of(seen)) if len(seen) else None


def scale_of(seen: np.ndarray) -> tuple[Normalize, str, str]:
    """Diverging about 0 where there are values on both sides, logarithmic for a wide range."""
    low, high = float(seen.min()), float(seen.max())
    if low < 0:
        limit = max(-low, high)
        return Normalize(-limit, limit), "RdBu_r", "Red above 0, blue below"
    if low > 0 and high > WIDE * low:
        return LogNorm(low, high), "viridis", "Colour on a logarithmic scale"
    if high - low < 1e-9 * high:
        low, high = 0.9 * low, 1.1 * high or 1.0
    return Normalize(low, high), "viridis", "Colour on a linear scale"


def draw_map(grid: np.ndarray, maps: Heatmaps) -> Figure:
    """One of the maps: layers upwards, each numbered, tokens to the right."""
    height = max(LAYER * len(grid), LEAST) + TOP + BOTTOM
    figure = new_figure(WIDTH, height)
    axes = place(figure, LEFT, TOP, RIGHT, BOTTOM)
    axes.imshow(
        grid, cmap=maps.colours, norm=maps.norm, origin="lower", aspect="auto",
        interpolation="none", extent=(0, maps.end or 1, -0.5, len(grid) - 0.5),
    )  # fmt: skip
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks(range(len(grid)))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
    axes.xaxis.set_major_formatter(AMOUNT)
    figure.text(0, 1 - 3 / height, "layer", ha="left", va="top", color=MUTED)
    figure.text(1, 3 / height, "tokens", ha="right", va="bottom", color=MUTED)
    return figure


def numbers_of(grid: np.ndarray) -> str:
    """A map's values for the page's script: layers upwards between semicolons, three digits."""
    return ";".join(
        ",".join(f"{x:.3g}" if np.isfinite(x) else "" for x in layer) for layer in grid.tolist()
    )


def draw_bar(maps: Heatmaps) -> Figure:
    """The scale that all maps share."""
    figure = new_figure(WIDTH, BAR_HEIGHT)
    low, high = float(maps.norm.vmin or 0), float(maps.norm.vmax or 0)
    spaced = np.geomspace if isinstance(maps.norm, LogNorm) else np.linspace
    bar = figure.colorbar(
        ScalarMappable(maps.norm, maps.colours),
        cax=place(figure, LEFT, 8, RIGHT, 20),
        orientation="horizontal",
        ticks=spaced(low, high, 5),
        format=FuncFormatter(lambda x, _: short(x, 2)),
    )
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    return figure
