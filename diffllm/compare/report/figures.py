"""Figures of a report as SVG images: curves with bands, and gaps with intervals."""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from diffllm.compare.arms.run import Series
from diffllm.compare.arms.sentences import (
    compact,
    with_minus,
)
from diffllm.compare.report.curves import Band, Spike, envelope
from diffllm.compare.report.scales import FEW, hide_nonpositive, logarithmic, scale_limits
from diffllm.compare.report.styles import RowStyle
from diffllm.statistics.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOREGROUND, MUTED, GRID, SURFACE = "#1b1f24", "#5d6570", "#e3e6ea", "#ffffff"
WIDTH, HEIGHT, SMALL = 384, 248, 12.0
"""Sizes of figures and text in CSS pixels."""
CHARACTER = 6.6
"""Mean width of a character of a legend in pixels."""
LABEL_LENGTH = 44
ENTRIES = 10
"""With more rows, a legend names variants instead of rows."""
LEGEND_LINE, HANDLE = 16, 40
"""Height of a line and width of a handle in a legend, in pixels."""
MARGIN, GAP_LINE = 60, 26
"""Height of a figure of gaps without and per gap, in pixels."""
ROUND = [1, 2, 2.5, 5, 10]
RC = {
    # Texts stay texts: the browser draws them, and readers can search for them.
    "svg.fonttype": "none",
    # Without a fixed salt, the ids in a figure would be random, and equal runs would have
    # different pages.
    "svg.hashsalt": "diffllm",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": SMALL,
    # Labels contain values of config keys, in which "$" does not begin a formula.
    "text.parse_math": False,
    "text.color": FOREGROUND,
    "figure.facecolor": SURFACE,
    # A point is 1/72 inch, so that all sizes are in pixels.
    "figure.dpi": 72,
    "figure.constrained_layout.w_pad": 0.07,
    "figure.constrained_layout.h_pad": 0.06,
    "axes.facecolor": SURFACE,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.labelcolor": MUTED,
    "axes.labelsize": SMALL,
    "axes.labelpad": 2,
    "axes.titlecolor": MUTED,
    "axes.titlesize": SMALL,
    "axes.titlepad": 6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    # A power of ten or an offset would be a separate text at the end of the axis.
    "axes.formatter.limits": (-99, 99),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.major.pad": 3,
    "ytick.major.pad": 3,
    "xtick.color": MUTED,
    "xtick.labelcolor": FOREGROUND,
    "xtick.major.size": 3,
    "ytick.color": MUTED,
    "ytick.labelcolor": FOREGROUND,
    "ytick.major.size": 0,
}
DOTTED: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (2, 2)), "zorder": 1}
DASHED = DOTTED | {"linestyle": (0, (4, 2))}

Bands = Sequence[Band | None]
"""A band per row, in the order of the styles; None without values."""


def short_label(label: str, length: int = LABEL_LENGTH) -> str:
    return label if len(label) <= length else f"{label[: length - 1]}…"


def legend_of(styles: list[RowStyle]) -> list[tuple[str, RowStyle]]:
    """Return the entries of a legend, at most ENTRIES: names of rows or variants with a style."""
    styles_by_name: dict[str, RowStyle] = {}
    if len(styles) > ENTRIES:
        # The reversed order keeps the style of the first row of a variant.
        for style in reversed(styles):
            styles_by_name[style.variant] = style
        names = list(reversed(styles_by_name))
    else:
        for style in styles:
            styles_by_name[style.label] = style
        names = list(styles_by_name)
    return [(short_label(name), styles_by_name[name]) for name in names[:ENTRIES]]


def new_figure(width: float, height: float) -> "Figure":
    # pyplot would keep every figure in memory and choose a backend for a screen.
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), layout="constrained")


def add_legend(figure: "Figure") -> None:
    """Add a legend below the axes, and increase the figure's height by the legend's height."""
    handles_of_axes, labels_of_axes = figure.axes[0].get_legend_handles_labels()
    entries = []
    other_entries: dict[str, Any] = {}
    for handle, label in zip(handles_of_axes, labels_of_axes, strict=True):
        # Names of rows, which begin with a space, may be equal after `short_label`.
        if label.startswith(" "):
            entries.append((label, handle))
        else:
            other_entries.setdefault(label, handle)
    entries += other_entries.items()
    labels, handles = zip(*entries, strict=True)
    width, height = figure.get_size_inches()
    longest_label = max(map(len, labels))
    entry_width = HANDLE + CHARACTER * longest_label
    most_columns = max(1, int(72 * width / entry_width))
    lines = math.ceil(len(entries) / most_columns)
    legend_height = LEGEND_LINE * lines + 4
    figure.set_size_inches(width, height + legend_height / 72)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        # Fewer columns than would fit, if the lines are then equally full.
        ncols=math.ceil(len(entries) / lines),
        frameon=False,
        borderpad=0,
        borderaxespad=0.25,
        labelspacing=0.25,
        columnspacing=1,
        handlelength=2.2,
        handletextpad=0.4,
    )


def draw_curves(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    across: str = "tokens",
    log: bool = False,
    top: float | None = None,
    mark: tuple[float, str] | None = None,
    floor: Series | None = None,
    starts: Iterable[float] = (),
) -> "Figure":
    """Draw the curves of all report rows over a common horizontal axis.

    A line shows the mean over seeds, and an area shows the range. If a seed has no value, thin
    lines show the other seeds. A cross marks the last finite value of a curve that ends early.

    Args:
        bands: the curves of each row; None for a row without values.
        unit: label of the vertical axis; `across` is the label of the horizontal axis.
        log: whether the vertical axis is logarithmic; values that are not positive are omitted.
        top: upper end of the vertical axis if it is linear; None shows all values.
        mark: value and label of an additional dotted horizontal line.
        floor: curve of half the width of the noise floor, drawn as an area around zero.
        starts: horizontal positions of vertical lines, where stages of training start.
    """
    drawn = []
    styles_of_bands = []
    for band, style in zip(bands, styles, strict=True):
        if band is not None:
            drawn.append((band, style))
            styles_of_bands.append(style)
    names = {}
    for name, style in legend_of(styles_of_bands):
        # The space keeps names such as "_x": matplotlib omits labels that begin with "_".
        names[style] = f" {name}"
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.subplots()
    for band, style in drawn:
        draw_band(axes, band, style, log, names.get(style, ""))
    axes.set_title(unit, loc="left")
    axes.locator_params(axis="y", nbins=6, steps=ROUND)
    axes.margins(x=0.03)
    if floor is not None:
        draw_floor(axes, floor)
    if mark is not None:
        height, label = mark
        axes.axhline(height, label=label, **DOTTED)
    label = "start of a stage"
    for start in starts:
        axes.axvline(start, label=label, **DASHED)
        # The legend has one entry for all starts.
        label = ""
    if log:
        logarithmic(axes)
    elif top is not None:
        end_scale(axes, drawn, top)
    # Spikes above the scale are drawn at its upper edge, so the scale must be final.
    draw_spikes(axes, drawn)
    axes.set_xlabel(across, loc="right")
    axes.locator_params(axis="x", nbins=5, steps=ROUND, integer=True)
    axes.xaxis.set_major_formatter(lambda x, _: compact(x))
    add_legend(figure)
    return figure


def end_scale(axes: "Axes", drawn: list[tuple[Band, RowStyle]], top: float) -> None:
    """End the vertical axis at `top`; an arrow marks a curve that is entirely above it."""
    bottom = axes.dataLim.ymin
    margin = 0.05 * (top - bottom)
    axes.set_ylim(bottom - margin, top)
    for band, style in drawn:
        if band.drawn.min() > top:
            draw_arrow(axes, (band.x[-1], top), "^", style.colour)


def draw_floor(axes: "Axes", floor: Series) -> None:
    axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
    axes.fill_between(
        floor.tokens,
        -floor.values,
        floor.values,
        label="noise floor",
        color=MUTED,
        alpha=0.22,
        lw=0,
        zorder=0,
    )


def draw_arrow(axes: "Axes", place: tuple[float, float], arrow: str, colour: str) -> None:
    axes.plot(*place, arrow, color=colour, ls="", ms=7, clip_on=False, label="off the scale")


def draw_band(axes: "Axes", band: Band, style: RowStyle, log: bool, name: str) -> None:
    lines = [(band.mean, 1.6, name)]
    for single in band.singles:
        lines.append((single, 0.7, ""))
    marker = style.marker if len(band.x) <= FEW else ""
    for values, width, label in lines:
        y = hide_nonpositive(values, log)
        axes.plot(band.x, y, lw=width, ms=2 * width, label=label, marker=marker, **style.line)
    x, low, high = envelope(band)
    low = hide_nonpositive(low, log)
    is_finite = np.isfinite(low) & np.isfinite(high)
    is_above = band.high > band.mean
    is_below = band.low < band.mean
    has_area = is_above.any() or is_below.any()
    if has_area and is_finite.any():
        axes.fill_between(
            x,
            low,
            high,
            where=is_finite,
            facecolor=(style.colour, 0.13),
            # The edge shows single steps and single seeds, whose area is too narrow to see.
            edgecolor=(style.colour, 0.3),
            lw=0.6,
        )
    if band.stops:
        x, y = np.transpose(band.stops)
        y = hide_nonpositive(y, log)
        axes.plot(x, y, "x", color=style.colour, ms=6, mew=1.6, label="last finite value")


def draw_spikes(axes: "Axes", drawn: list[tuple[Band, RowStyle]]) -> None:
    """Mark spikes by triangles, and write the step of the highest.

    A triangle is at the upper edge if the spike is above the scale, or not finite.
    """
    bottom, top = axes.get_ylim()
    axes.set_autoscaley_on(False)  # marks do not change the scale
    spikes: list[Spike] = []
    for band, style in drawn:
        if not band.spikes:
            continue
        spikes += band.spikes
        x = [spike.x for spike in band.spikes]
        values = [spike.value for spike in band.spikes]
        y = np.clip(values, bottom, top)
        axes.plot(x, y, "^", color=style.colour, ls="", ms=5, clip_on=False, label="spike")
    if not spikes:
        return
    highest = max(spikes, key=lambda spike: spike.value)
    # The text is on the side of the mark where more of the figure is.
    middle = sum(axes.dataLim.intervalx) / 2
    distance, alignment = 6, "left"
    if highest.x > middle:
        distance, alignment = -6, "right"
    axes.annotate(
        f"step {highest.step:,}",
        (highest.x, min(highest.value, top)),
        xytext=(distance, -2),
        textcoords="offset points",
        horizontalalignment=alignment,
        verticalalignment="top",
    )


def draw_gaps(
    gaps: list[Estimate],
    styles: list[RowStyle],
    width: float = WIDTH,
    across: str = "nats per token",
    hollow: Sequence[bool] = (),
    sides: tuple[str, str] = ("better", "worse"),
    ends: str = "95% interval",
) -> "Figure":
    """Draw gaps with their intervals; an arrow marks a gap or interval that leaves the axis.

    Args:
        hollow: for each gap, whether to draw a ring instead of a dot, because the gap is not
            significant; if empty, draw only dots.
        sides: labels of the negative side and the positive side of the axis.
        ends: description of the intervals, for the legend.
    """
    height = max(MARGIN + GAP_LINE * len(gaps), HEIGHT)
    figure = new_figure(width, height)
    axes = figure.subplots()
    low, high = scale_limits(gaps)
    # The first gap is at the top.
    axes.set(xlim=(low, high), ylim=(len(gaps) - 0.4, -0.6))
    axes.axvline(0, color=FOREGROUND, linewidth=1, zorder=1)
    rings = hollow or [False] * len(gaps)
    for y, (gap, style, is_ring) in enumerate(zip(gaps, styles, rings, strict=True)):
        draw_interval(axes, y, gap, style.colour, ends)
        name = "mean"
        if hollow:
            name = "not significant" if is_ring else "significant"
        fill = SURFACE if is_ring else style.colour
        axes.plot(
            gap.mean, y, "o", ms=7, mew=1.8, color=style.colour, markerfacecolor=fill, label=name
        )
    labels = [short_label(style.label, 22) for style in styles]
    axes.set_yticks(range(len(gaps)), labels)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    most_ticks = max(3, int(width / 90))
    axes.locator_params(axis="x", nbins=most_ticks, steps=ROUND)
    axes.xaxis.set_major_formatter(lambda x, _: with_minus(f"{x:+g}" if x else "0"))
    negative, positive = sides
    axes.set_title(f"← {negative}" if low < 0 else "", loc="left")
    axes.set_title(f"{positive} →" if high > 0 else "", loc="right")
    axes.set_xlabel(across, loc="right")
    add_legend(figure)
    return figure


def draw_interval(axes: "Axes", y: int, gap: Estimate, colour: str, label: str) -> None:
    """Draw an interval at the height `y`, with arrows and the mean if they leave the axis."""
    low, high = axes.get_xlim()
    first, last = gap.mean, gap.mean
    if gap.interval and not gap.all_equal:
        first, last = gap.interval
        axes.plot((first, last), (y, y), color=colour, lw=2.4, solid_capstyle="butt", label=label)
    if first < low:
        draw_arrow(axes, (low, y), "<", colour)
    if last > high:
        draw_arrow(axes, (high, y), ">", colour)
    value = with_minus(f" {gap.mean:+.3g} ")
    if gap.mean < low:
        axes.text(low, y - 0.1, value, horizontalalignment="left")
    elif gap.mean > high:
        axes.text(high, y - 0.1, value, horizontalalignment="right")


def to_svg(figure: "Figure", title: str) -> bytes:
    out = io.BytesIO()
    # A date would make pages of equal runs different.
    figure.savefig(out, format="svg", metadata={"Date": None, "Title": title})
    return out.getvalue()


def to_image(figure: "Figure", title: str) -> Markup:
    width, height = figure.get_size_inches()
    data = base64.b64encode(to_svg(figure, title)).decode()
    return Markup(
        '<img width="{}" height="{}" alt="{}" src="data:image/svg+xml;base64,{}">'
    ).format(round(72 * width), round(72 * height), title, data)
