"""Figures of a report: styles of rows, curves with bands, gaps with intervals.

All are SVG images on white.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from markupsafe import Markup

from diffllm.compare.report.curves import Band, envelope
from diffllm.compare.report.numbers import compact, short, with_minus
from diffllm.compare.report.rows import FIRST, Row, variant_order
from diffllm.compare.report.runs import Series
from diffllm.config.compose import variants
from diffllm.metrics.records import LARGEST
from diffllm.statistics.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOREGROUND, MUTED, GRID, SURFACE = "#1b1f24", "#5d6570", "#e3e6ea", "#ffffff"
HUES = (
    "#69707a", "#00875f", "#0068b0", "#d4480b", "#a63a92", "#b07d00", "#4a38b8", "#0e93b8",
    "#7b1b45", "#6e5138",
)  # fmt: skip
DARKEST = 0.55
DASHES: tuple[tuple[float, ...], ...] = (
    (), (4, 1.6), (1, 1.3), (5, 1.4, 1, 1.4), (8, 2), (3, 1.2, 1, 1.2, 1, 1.2),
)  # fmt: skip
MARKERS = "os^Dv<>ph"
WIDTH, HEIGHT, SMALL = 384, 248, 12.0
"""CSS pixels."""
CHARACTER = 6.6
LONGEST = 44
ENTRIES = 10
"""A legend of more rows names the variants."""
LEGEND_LINE, HANDLE = 16, 40
"""Pixels."""
MARGIN, GAP_LINE = 60, 26
"""Pixels."""
OUTLYING = 4
"""The scale covers this multiple of the median reach of an interval."""
FEW = 24
"""Each point has a marker up to this number of points."""
ROUND = [1, 2, 2.5, 5, 10]
RC = {
    "svg.fonttype": "none", "svg.hashsalt": "diffllm",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": SMALL, "text.parse_math": False, "text.color": FOREGROUND,
    "figure.facecolor": SURFACE, "figure.dpi": 72,
    "figure.constrained_layout.w_pad": 0.07, "figure.constrained_layout.h_pad": 0.06,
    "axes.facecolor": SURFACE, "axes.edgecolor": MUTED, "axes.linewidth": 0.8,
    "axes.labelcolor": MUTED, "axes.labelsize": SMALL, "axes.labelpad": 2,
    "axes.titlecolor": MUTED, "axes.titlesize": SMALL, "axes.titlepad": 6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.unicode_minus": True,
    "axes.formatter.limits": (-99, 99), "axes.formatter.useoffset": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": GRID, "grid.linewidth": 0.8, "xtick.major.pad": 3, "ytick.major.pad": 3,
    "xtick.color": MUTED, "xtick.labelcolor": FOREGROUND, "xtick.major.size": 3,
    "ytick.color": MUTED, "ytick.labelcolor": FOREGROUND, "ytick.major.size": 0,
}  # fmt: skip

Bands = Sequence[Band | None]
"""Per row, in the order of styles."""


@dataclass(frozen=True)
class RowStyle:
    label: str
    variant: str
    colour: str
    dash: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": (0, self.dash) if self.dash else "-"}

    @property
    def swatch(self) -> Markup:
        dash = " ".join(f"{1.8 * part:.1f}" for part in self.dash)
        return Markup(
            '<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">'
            '<line x1="0" y1="5" x2="28" y2="5" stroke="{}" stroke-width="2.4"'
            ' stroke-dasharray="{}"/></svg>'
        ).format(self.colour, dash or "none")


def row_styles(rows: list[Row]) -> list[RowStyle]:
    names = [row.keys["attention"] for row in rows]
    known, others = sorted(variants(), key=variant_order), HUES[len(FIRST) :]
    styles = []
    for i, (row, variant) in enumerate(zip(rows, names, strict=True)):
        place = len(known) + crc32(variant.encode()) % 97
        place = known.index(variant) if variant in known else place
        hue, dash = others[place % len(others)], 1 + place % (len(DASHES) - 1)
        if place < len(FIRST):
            hue, dash = HUES[place], 0
        nth, count = names[:i].count(variant), names.count(variant)
        light = 1 - DARKEST * nth / max(count - 1, 1)
        colour = "#" + "".join(f"{round(int(hue[i : i + 2], 16) * light):02x}" for i in (1, 3, 5))
        dashes, marker = DASHES[(dash + nth) % len(DASHES)], MARKERS[i % len(MARKERS)]
        styles.append(RowStyle(row.label, variant, colour, dashes, marker))
    return styles


def short_label(label: str, most: int = LONGEST) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def legend_of(styles: list[RowStyle]) -> list[tuple[str, RowStyle]]:
    entries = {style.label: style for style in styles}
    if len(styles) > ENTRIES:
        entries = {style.variant: style for style in reversed(styles)}
        entries = dict(list(reversed(entries.items()))[:ENTRIES])
    return [(short_label(name), style) for name, style in entries.items()]


def new_figure(width: float, height: float, styles: list[RowStyle] | None = None) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not styles:
        return Figure(figsize=(width / 72, height / 72), layout="constrained")
    names, shown = zip(*legend_of(styles), strict=True)
    entry = HANDLE + CHARACTER * max(map(len, names))
    lines = -(-len(names) // max(1, int(width / entry)))
    height += LEGEND_LINE * lines + 4
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    figure.legend(
        [Line2D([], [], linewidth=1.8, **style.line) for style in shown],
        [f" {name}" for name in names],  # without a space, matplotlib omits names such as "_x"
        loc="outside lower center", ncols=-(-len(names) // lines), frameon=False, borderpad=0,
        borderaxespad=0, labelspacing=0.25, columnspacing=1, handlelength=2.2, handletextpad=0.4,
    )  # fmt: skip
    return figure


def draw_curves(
    bands: Bands,
    styles: list[RowStyle],
    unit: str,
    across: str = "tokens",
    log: bool = False,
    top: float | None = None,
    mark: tuple[float, str] | None = None,
    floor: Series | None = None,
) -> "Figure":
    """Draw means as lines, seeds as bands and alone as thin lines, with a cross where a seed ends
    early or is no longer finite.

    Args:
        unit: stands above the scale.
        across: the name of the horizontal axis.
        log: omits what is not positive.
        top: where a linear scale ends; None shows everything.
        mark: a value to draw a dotted line at, and its name.
        floor: half the width of a band that is drawn around zero behind the curves.
    """
    drawn = [style for band, style in zip(bands, styles, strict=True) if band is not None]
    figure = new_figure(WIDTH, HEIGHT, drawn)
    axes = figure.subplots()
    for band, style in zip(bands, styles, strict=True):
        if band is not None:
            draw_band(axes, band, style, log)
    axes.set_title(unit, loc="left")
    axes.locator_params(axis="y", nbins=6, steps=ROUND)
    axes.margins(x=0.03)
    if floor is not None:
        half = floor.values
        axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
        axes.fill_between(floor.tokens, -half, half, color=MUTED, alpha=0.22, lw=0, zorder=0)
    if mark is not None:
        axes.axhline(mark[0], color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        axes.text(1.01, mark[0], mark[1], transform=axes.get_yaxis_transform(), va="center")
    if log:
        logarithmic(axes)
    elif top is not None:
        axes.set_ylim(axes.dataLim.ymin - 0.05 * (top - axes.dataLim.ymin), top)
    axes.set_xlabel(across, loc="right")
    axes.locator_params(axis="x", nbins=5, steps=ROUND, integer=True)
    axes.xaxis.set_major_formatter(lambda x, _: compact(x))
    return figure


def draw_band(axes: "Axes", band: Band, style: RowStyle, log: bool) -> None:
    marker = style.marker if len(band.x) <= FEW else ""
    how: dict[str, Any] = {"marker": marker, **style.line}
    for y, width in ((band.mean, 1.6), *((y, 0.7) for y in band.singles)):
        axes.plot(band.x, on_scale(y, log), lw=width, ms=2 * width, **how)
    x, low, high = envelope(band)
    low = on_scale(low, log)
    known = np.isfinite(low) & np.isfinite(high)
    if (high > low)[known].any():
        axes.fill_between(x, low, high, where=known, color=style.colour, alpha=0.13, lw=0)
    if band.stops:
        x, y = np.transpose(band.stops)
        axes.plot(x, on_scale(y, log), "x", color=style.colour, ms=6, mew=1.6)


def on_scale(values: np.ndarray, log: bool) -> np.ndarray:
    """Replace values without a place on a logarithmic scale by NaN."""
    return np.where(values > 1 / LARGEST, values, np.nan) if log else values


def logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs: tuple[float, ...] = (1, 2, 5) if high < 100 * low else (1,)
    if high < 4 * low:
        subs = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda y, _: short(y, 4))


def draw_gaps(
    gaps: list[Estimate],
    styles: list[RowStyle],
    width: float = WIDTH,
    across: str = "nats a token",
    hollow: Sequence[bool] = (),
    sides: tuple[str, str] = ("better", "worse"),
) -> "Figure":
    """Draw gaps and their intervals from top to bottom; an arrow where one exceeds the scale.

    Args:
        gaps: one or more.
        styles: of their rows.
        across: the name of the scale.
        hollow: whose mean is drawn as a ring; nobody's if empty.
        sides: the meaning of gaps below 0 and above it.
    """
    figure = new_figure(width, max(MARGIN + GAP_LINE * len(gaps), HEIGHT))
    axes = figure.subplots()
    low, high = scale_limits(gaps)
    axes.set(xlim=(low, high), ylim=(len(gaps) - 0.4, -0.6))
    axes.axvline(0, color=FOREGROUND, linewidth=1, zorder=1)
    rings = hollow or [False] * len(gaps)
    for y, (gap, style, ring) in enumerate(zip(gaps, styles, rings, strict=True)):
        colour = style.colour
        if gap.low is not None and gap.high is not None:
            axes.plot((gap.low, gap.high), (y, y), lw=2.4, solid_capstyle="butt", color=colour)
            for end, beyond, arrow in ((low, gap.low < low, "<"), (high, gap.high > high, ">")):
                if beyond:
                    axes.plot(end, y, arrow, markersize=7, clip_on=False, color=colour)
        fill = SURFACE if ring else colour
        axes.plot(gap.mean, y, "o", ms=7, mew=1.8, color=colour, markerfacecolor=fill)
    axes.set_yticks(range(len(gaps)), [short_label(style.label, 22) for style in styles])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=max(3, int(width / 90)), steps=ROUND)
    axes.xaxis.set_major_formatter(lambda x, _: with_minus(f"{x:+g}" if x else "0"))
    axes.set_title(f"← {sides[0]}" if low < 0 else "", loc="left")
    axes.set_title(f"{sides[1]} →" if high > 0 else "", loc="right")
    axes.set_xlabel(across, loc="right")
    return figure


def scale_limits(gaps: list[Estimate]) -> tuple[float, float]:
    """Limits around 0 and the intervals of the gaps over most seeds, without outliers."""
    most = max(gap.seeds for gap in gaps)
    bounds = [
        [x for x in (gap.mean, gap.low, gap.high) if x is not None]
        for gap in gaps
        if gap.seeds == most
    ]
    limit = OUTLYING * float(np.median([max(map(abs, each)) for each in bounds])) or 1.0
    shown = [float(np.clip(x, -limit, limit)) for each in bounds for x in each]
    shown += [gap.mean for gap in gaps if abs(gap.mean) <= limit]
    low, high = min(0.0, *shown), max(0.0, *shown)
    margin = 0.12 * (high - low) or 1.0
    return low - margin, high + margin


def to_svg(figure: "Figure", title: str) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Title": title})
    return out.getvalue()


def to_image(figure: "Figure", title: str) -> Markup:
    width, height = (round(72 * side) for side in figure.get_size_inches())
    data = base64.b64encode(to_svg(figure, title)).decode()
    return Markup(
        '<img width="{}" height="{}" alt="{}" src="data:image/svg+xml;base64,{}">'
    ).format(width, height, title, data)
