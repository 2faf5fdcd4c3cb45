"""How a report looks: a colour and a dash for every row, and figures as SVG images on white."""

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from markupsafe import Markup

from diffllm.compare.report.rows import FIRST, Row, variant_order
from diffllm.config.compose import variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOREGROUND, MUTED, GRID, SURFACE = "#1b1f24", "#5d6570", "#e3e6ea", "#ffffff"
HUES = (
    "#69707a", "#00875f", "#0068b0", "#d4480b", "#a63a92", "#b07d00", "#4a38b8", "#0e93b8",
    "#7b1b45", "#6e5138",
)  # fmt: skip
"""On white: Okabe and Ito's first, told apart with any colour vision."""
DARKEST = 0.55
"""Share of black in the colour of a variant's last row."""
DASHES: tuple[tuple[float, ...], ...] = (
    (), (4, 1.6), (1, 1.3), (5, 1.4, 1, 1.4), (8, 2), (3, 1.2, 1, 1.2, 1, 1.2),
)  # fmt: skip
MARKERS = "os^Dv<>ph"
WIDTH, HEIGHT, SMALL = 384, 248, 12.0
"""Sizes of a figure without its legend, and of its text, in CSS pixels."""
CHARACTER = 6.6
"""Pixels that a character of a figure is wide, about."""
LONGEST = 44
"""Characters of a row's label that a figure shows."""
ENTRIES = 10
"""Most entries of a legend: of more rows, it names the variants."""
LEGEND_LINE, HANDLE = 16, 40
"""Pixels: height of a line of a legend, and width of an entry besides its label."""
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


@dataclass(frozen=True)
class RowStyle:
    """How a row is drawn in every figure."""

    index: int
    label: str
    variant: str
    colour: str
    dash: tuple[float, ...]
    """In line widths; empty for a solid line."""
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": (0, self.dash) if self.dash else "-"}

    @property
    def swatch(self) -> Markup:
        """A short piece of its line, for the page's text."""
        dash = " ".join(f"{1.8 * part:.1f}" for part in self.dash)
        return Markup(
            '<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">'
            '<line x1="0" y1="5" x2="28" y2="5" stroke="{}" stroke-width="2.4"'
            ' stroke-dasharray="{}"/></svg>'
        ).format(self.colour, dash or "none")


def row_styles(rows: list[Row]) -> list[RowStyle]:
    """Rows of one variant share its hue, in shades and with dashes of their own."""
    names = [row.keys["attention"] for row in rows]
    styles = []
    for i, (row, variant) in enumerate(zip(rows, names, strict=True)):
        hue, dash = hue_and_dash(variant)
        nth, count = names[:i].count(variant), names.count(variant)
        colour = darkened(hue, DARKEST * nth / max(count - 1, 1))
        dashes, marker = DASHES[(dash + nth) % len(DASHES)], MARKERS[i % len(MARKERS)]
        styles.append(RowStyle(i, row.label, variant, colour, dashes, marker))
    return styles


def darkened(colour: str, share: float) -> str:
    parts = (round(int(colour[i : i + 2], 16) * (1 - share)) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


def hue_and_dash(variant: str) -> tuple[str, int]:
    """Hue and dash by a variant's place among all variants, the same in every report.

    Those that rows begin with have hues of their own and solid lines.
    """
    known = sorted(variants(), key=variant_order)
    nth = known.index(variant) if variant in known else len(known) + crc32(variant.encode()) % 97
    if nth < len(FIRST):
        return HUES[nth], 0
    others = HUES[len(FIRST) :]
    return others[nth % len(others)], 1 + nth % (len(DASHES) - 1)


def shortened(label: str, most: int = LONGEST) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def legend_of(styles: list[RowStyle]) -> list[tuple[str, RowStyle]]:
    """Names and styles of a legend's entries: the rows, or of more than `ENTRIES` the variants."""
    entries = {style.label: style for style in styles}
    if len(styles) > ENTRIES:
        entries = {style.variant: style for style in reversed(styles)}
        entries = dict(list(reversed(entries.items()))[:ENTRIES])
    return [(shortened(name), style) for name, style in entries.items()]


def new_figure(width: float, height: float, styles: list[RowStyle] | None = None) -> "Figure":
    """Make an empty figure, with a legend of `styles` below `height` pixels for the plot."""
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


def to_svg(figure: "Figure", title: str) -> bytes:
    """Return matplotlib's SVG; equal figures give equal bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Title": title})
    return out.getvalue()


def to_image(figure: "Figure", title: str, text: str = "") -> Markup:
    """Return an <img> that holds the figure's SVG.

    Args:
        text: further words for readers who cannot see the figure, after the title.
    """
    width, height = (round(72 * side) for side in figure.get_size_inches())
    data = base64.b64encode(to_svg(figure, title)).decode()
    return Markup(
        '<img width="{}" height="{}" alt="{}" src="data:image/svg+xml;base64,{}">'
    ).format(width, height, f"{title}. {text}".strip() if text else title, data)
