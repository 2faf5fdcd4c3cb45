"""Maps of a quantity over layers and tokens, one for every row, on one scale of colours."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diffllm.compare.report.bands import over_time
from diffllm.compare.report.drawing import ROUND
from diffllm.compare.report.numbers import compact, short
from diffllm.compare.report.rows import Row
from diffllm.compare.report.style import FOREGROUND, WIDTH, RowStyle, new_figure, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRETCHES = 100
"""Most stretches of tokens that a map tells apart."""
WIDE = 20
"""Ratio of largest to smallest from which the scale is logarithmic."""
BESIDE = 3
"""Most maps beside each other."""
PANEL, EDGE = 320, 60
"""Pixels: width of one of several maps, and what is above and below a map."""
LAYER, LEAST = 14, 120
"""Pixels: of a layer, which holds its number, and of a map of few layers."""
NAME = 40
"""Characters of a label above a map."""


@dataclass(frozen=True)
class Heatmaps:
    """The maps of all rows, and what they share."""

    grids: list[np.ndarray | None]
    """(L, n) of every row: layers, stretches of tokens; None without a finite value."""
    end: float
    """Tokens at which time ends."""
    low: float
    high: float
    log: bool
    colours: str
    """Name of the colour map."""
    scale: str
    """Colours and scale in words."""


def heatmaps(rows: list[Row], quantity: str) -> Heatmaps | None:
    """The maps of a quantity; None if no row ever logged it, or nothing finite."""
    logged = [run.by_layer(quantity).tokens for row in rows for run in row.runs]
    most, end = max(map(len, logged)), max(tokens.max(initial=0) for tokens in logged)
    if not most:
        return None
    edges = np.linspace(0, end, min(most, STRETCHES) + 1)
    grids = [over_time(row, quantity, edges) for row in rows]
    grids = [grid if grid is not None and np.isfinite(grid).any() else None for grid in grids]
    seen = np.concatenate([np.zeros(0), *(g[np.isfinite(g)] for g in grids if g is not None)])
    return Heatmaps(grids, end, *scale_of(seen)) if len(seen) else None


def scale_of(seen: np.ndarray) -> tuple[float, float, bool, str, str]:
    """Diverging about 0 where there are values on both sides, logarithmic for a wide range."""
    low, high = float(seen.min()), float(seen.max())
    if low < 0:
        limit = max(-low, high)
        return -limit, limit, False, "RdBu_r", "Red above 0, blue below"
    if low > 0 and high > WIDE * low:
        return low, high, True, "viridis", "Colour on a logarithmic scale"
    if high - low < 1e-9 * high:
        low, high = 0.9 * low, 1.1 * high or 1.0
    return low, high, False, "viridis", "Colour on a linear scale"


def draw_heatmaps(maps: Heatmaps, styles: list[RowStyle]) -> "Figure":
    """Draw a panel for each row that has a map, layers upwards, with one scale of colours."""
    found = [(s, grid) for s, grid in zip(styles, maps.grids, strict=True) if grid is not None]
    down = -(-len(found) // BESIDE)
    across = -(-len(found) // down)
    tall = max(LAYER * max(len(grid) for _, grid in found), LEAST) + EDGE
    figure = new_figure(WIDTH if across == 1 else across * PANEL, down * tall)
    places = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for (style, grid), axes in zip(found, places, strict=False):
        image = axes.imshow(
            grid, cmap=maps.colours, norm="log" if maps.log else "linear", vmin=maps.low,
            vmax=maps.high, origin="lower", aspect="auto", interpolation="none",
            extent=(0, maps.end or 1, -0.5, len(grid) - 0.5),
        )  # fmt: skip
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_yticks(range(len(grid)))
        axes.locator_params(axis="x", nbins=4, steps=ROUND)
        axes.xaxis.set_major_formatter(lambda x, _: compact(x))
        axes.set_xlabel("tokens", loc="right")
        axes.set_ylabel("layer")
        if len(styles) > 1:
            axes.set_title(shortened(style.label, NAME), loc="left", color=FOREGROUND)
    for axes in places[len(found) :]:
        axes.set_visible(False)
    spaced = np.geomspace if maps.log else np.linspace
    ticks = spaced(maps.low, maps.high, 5)
    bar = figure.colorbar(
        image, ax=places, ticks=ticks, format=lambda x, _: short(x, 2), aspect=30, pad=0.02
    )
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    return figure
