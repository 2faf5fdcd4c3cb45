"""Figures of curves over tokens and over layers, a line a row."""

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diffllm.compare.report.bands import Band, Floor, envelope, extremes
from diffllm.compare.report.numbers import compact, short
from diffllm.compare.report.style import CHARACTER, HEIGHT, MUTED, RowStyle, new_figure, place
from diffllm.core.files.records import LARGEST

Bands = Sequence[Band | None]
"""The band of every row, in the order of styles."""
AMOUNT = FuncFormatter(lambda x, _: compact(x))
WHOLE = FuncFormatter(lambda x, _: f"{x:.0f}")
LEFT, TOP, RIGHT, BOTTOM = 48, 24, 14, 36
LANE = 6
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
    fit: Bands,
    spikes: Sequence[np.ndarray] = (),
    log: bool = False,
    zero: bool = False,
    start: float = 0,
    top: float | None = None,
    mark: tuple[float, str] | None = None,
    floor: Floor | None = None,
    across: str = "tokens",
) -> Figure:
    """Means as lines, seeds as bands and alone as thin lines, over tokens or what else was spent.

    Args:
        fit: those that the scales go by, None for others.
        spikes: of every row, the tokens to mark in a lane below the curves.
        log: leaves out what is not positive.
        zero: whether to draw a line at zero.
        start: tokens at which the axis begins.
        top: where a linear scale ends; None shows everything.
        mark: a value to draw a line at, and its name.
        floor: the noise floor, drawn around zero behind the curves.
        across: the name of the horizontal axis.
    """
    lanes = len(styles) * LANE + 8 if any(map(len, spikes)) else 0
    figure, axes = draw_bands(bands, styles, unit, log, across, lanes, mark)
    fit_scales(axes, fit, log, mark)
    axes.set_xlim(left=start)
    if zero:
        axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
    if floor is not None:
        axes.fill_between(floor.x, -floor.half, floor.half, color=MUTED, alpha=0.22, lw=0, zorder=0)
    if top is not None and not log:
        axes.set_ylim(axes.dataLim.ymin - 0.05 * (top - axes.dataLim.ymin), top)
    last = axes
    if lanes:
        last = place(figure, LEFT, HEIGHT - BOTTOM + 4, room_beside(mark), BOTTOM, sharex=axes)
        draw_lanes(last, spikes, styles)
        axes.tick_params(axis="x", labelbottom=False)
    last.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
    last.xaxis.set_major_formatter(AMOUNT)
    return figure


def fit_scales(axes: Axes, bands: Bands, log: bool, mark: tuple[float, str] | None) -> None:
    """Let the scales end a little beyond these curves and a mark."""
    x = np.concatenate([band.x for band in bands if band is not None])
    values = [
        *(band.drawn for band in bands if band is not None),
        np.array([mark[0]] if mark else []),
    ]
    y = shown(np.concatenate(values), log)
    y = y[np.isfinite(y)]
    if len(y):
        axes.dataLim.set_points(np.array([[x.min(), y.min()], [x.max(), y.max()]]))
    axes.margins(x=0.01)
    axes.autoscale_view()


def draw_layers(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    log: bool = False,
    mark: tuple[float, str] | None = None,
) -> Figure:
    """Means as lines and seeds as bands, over layers.

    Args:
        log: leaves out what is not positive.
        mark: a value to draw a line at, and its name.
    """
    figure, axes = draw_bands(bands, styles, unit, log, "layer", mark=mark)
    layers = sorted({int(x) for band in bands if band is not None for x in band.x})
    put_numbers(axes, layers, [f"{layer}" for layer in layers], NUMBERED)
    return figure


def draw_levels(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    setting: str,
    labels: Sequence[str],
) -> Figure:
    """Draw means as lines and seeds as bands over the values `labels` of a setting."""
    figure, axes = draw_bands(bands, styles, unit, False, setting)
    put_numbers(axes, range(len(labels)), labels, NUMBERED_LEVELS)
    return figure


def put_numbers(axes: Axes, places: Sequence[int], labels: Sequence[str], most: int) -> None:
    """Labels below the axes, so few of them that there are `most`."""
    axes.margins(x=0.04)
    every = -(-len(labels) // most)
    axes.set_xticks(places[::every], labels[::every])


def room_beside(mark: tuple[float, str] | None) -> float:
    """Pixels to the right of the curves: a mark's name stands there, clear of them."""
    return RIGHT if mark is None else max(RIGHT, len(mark[1]) * CHARACTER + 8)


def draw_mark(axes: Axes, mark: tuple[float, str]) -> None:
    """A dotted line at a value, named beside the axes."""
    value, name = mark
    axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        name, (1, value), (4, 0), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="left", va="center", color=MUTED,
    )  # fmt: skip


def draw_bands(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    log: bool,
    across: str,
    lanes: float = 0,
    mark: tuple[float, str] | None = None,
) -> tuple[Figure, Axes]:
    """A figure of all rows, with a cross where a seed ends early or is no longer finite.

    Args:
        unit, across: the names of the axes.
        lanes: pixels to leave free below the curves.
        mark: a value to draw a line at, and its name.
    """
    figure = new_figure(height=HEIGHT + lanes)
    axes = place(figure, LEFT, TOP, room_beside(mark), BOTTOM + lanes)
    alpha = 0.16 if len(styles) <= MANY else 0.09
    for band, style in zip(bands, styles, strict=True):
        if band is None:
            continue
        few = len(band.x) <= FEW
        thick = {"linewidth": 1.6, "markersize": 3.6, "marker": style.marker if few else ""}
        thin = {**thick, "linewidth": 0.7, "markersize": 2, "gid": f"{style.gid}-single"}
        for y, how in ((band.mean, thick), *((y, thin) for y in band.singles)):
            kept = extremes(y)
            axes.plot(band.x[kept], shown(y[kept], log), **(style.line | how))  # type: ignore[arg-type]
        if (band.high > band.low).any():
            x, low, high = envelope(band)
            for outline in stretches(x, shown(low, log), high):
                gid = f"{style.gid}-band"
                axes.add_patch(Polygon(outline, color=style.colour, alpha=alpha, lw=0, gid=gid))
        if band.stops:
            x, y = np.transpose(band.stops)
            gid = f"{style.gid}-stop"
            how = {"color": style.colour, "markersize": 6, "markeredgewidth": 1.6, "gid": gid}
            axes.plot(x, shown(y, log), "x", **how)  # type: ignore[arg-type]
    name_axes(figure, axes, unit, across)
    if mark is not None:
        draw_mark(axes, mark)
    if log:
        logarithmic(axes)
    return figure, axes


def stretches(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """The outlines (n, 2) of a band, one a stretch where both of its ends are finite."""
    known = np.isfinite(low) & np.isfinite(high)
    parts = np.split(np.arange(len(known)), np.flatnonzero(np.diff(known)) + 1)
    return [
        np.concatenate([np.stack([x[at], low[at]], 1), np.stack([x[at], high[at]], 1)[::-1]])
        for at in parts
        if len(at) and known[at[0]]
    ]


def shown(values: np.ndarray, log: bool) -> np.ndarray:
    """Replace values without a place on a logarithmic scale by NaN."""
    return np.where(values > 1 / LARGEST, values, np.nan) if log else values


def name_axes(figure: Figure, axes: Axes, unit: str, across: str) -> None:
    """The unit above the scale, where it needs no turned head."""
    axes.annotate(
        unit, (0, 1), (2 - LEFT, 9), xycoords="axes fraction", textcoords="offset points",
        color=MUTED,
    )  # fmt: skip
    figure.text(1, 3 / HEIGHT, across, ha="right", va="bottom", color=MUTED)
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
        how = {"color": style.colour, "linewidth": 1.3, "gid": f"{style.gid}-lane"}
        axes.vlines(at, lane - 0.4, lane + 0.4, **how)  # type: ignore[arg-type]
    axes.set_ylim(0.4, len(styles) + 0.6)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
