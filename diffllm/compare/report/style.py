"""How a report looks: a colour and a dash for every row, and figures that follow the page's theme.

Figures are drawn in stand-in colours, which the SVG text then names as CSS variables: one drawing
serves light and dark.
"""

import io
import re
from dataclasses import dataclass
from zlib import crc32

from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffllm.compare.report.rows import FIRST, Row, variant_order
from diffllm.config.compose import variants

FOREGROUND, MUTED, GRID, SURFACE = "#010101", "#020202", "#030303", "#040404"
THEME = {FOREGROUND: "--fg", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface"}

HUES = (
    ("#69707a", "#a9b0ba"), ("#00875f", "#35cfa0"), ("#0068b0", "#5db5f5"), ("#d4480b", "#ff7d4a"),
    ("#a63a92", "#ea8fd6"), ("#b07d00", "#f0c24b"), ("#4a38b8", "#a79ffa"), ("#0e93b8", "#86e0f7"),
    ("#7b1b45", "#e0608f"), ("#6e5138", "#cfae8e"),
)  # fmt: skip
"""On white and on near black: Okabe and Ito's first, told apart with any colour vision."""
DASHES: tuple[tuple[float, ...], ...] = (
    (), (4, 1.6), (1, 1.3), (5, 1.4, 1, 1.4), (8, 2), (3, 1.2, 1, 1.2, 1, 1.2),
)  # fmt: skip
MARKERS = "os^Dv<>ph"
WIDTH, HEIGHT, SMALL = 372, 236, 12.0
"""Sizes of a figure and its text in CSS pixels. The page scales no figure unless a screen is too
narrow for all, so that text has one size in figures of any width."""
CHARACTER = 6.6
"""Pixels that a character of a figure is wide, about."""
RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diffllm",
    "font.size": SMALL, "text.parse_math": False, "text.color": FOREGROUND,
    "figure.facecolor": "none", "figure.dpi": 72,
    "axes.facecolor": "none", "axes.edgecolor": MUTED, "axes.linewidth": 0.8,
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
    light: str
    dark: str
    dash: tuple[float, ...]
    """In line widths; empty for a solid line."""
    marker: str

    @property
    def gid(self) -> str:
        return f"row-{self.index}"

    @property
    def colour(self) -> str:
        """Stand-in for the CSS variable that holds its colour."""
        return f"#fe{self.index:04x}"

    @property
    def line(self) -> dict[str, object]:
        """Options of matplotlib's plot."""
        dashes = (0, self.dash) if self.dash else "-"
        return {"color": self.colour, "linestyle": dashes, "gid": self.gid}


def row_styles(rows: list[Row]) -> list[RowStyle]:
    """Rows of one variant share its hue, in shades and with dashes of their own."""
    names = [row.keys["attention"] for row in rows]
    styles = []
    for i, (row, variant) in enumerate(zip(rows, names, strict=True)):
        hue, dash = hue_and_dash(variant)
        nth, count = names[:i].count(variant), names.count(variant)
        shade = 0.55 * nth / max(count - 1, 1)
        light, dark = (
            f"color-mix(in srgb, {colour}, {other} {shade:.0%})"
            for colour, other in zip(hue, ("black", "white"), strict=True)
        )
        dashes, marker = DASHES[(dash + nth) % len(DASHES)], MARKERS[i % len(MARKERS)]
        styles.append(RowStyle(i, row.label, light, dark, dashes, marker))
    return styles


def hue_and_dash(variant: str) -> tuple[tuple[str, str], int]:
    """Hue and dash by a variant's place among all variants, the same in every report.

    Those that rows begin with have hues of their own and solid lines.
    """
    known = sorted(variants(), key=variant_order)
    nth = known.index(variant) if variant in known else len(known) + crc32(variant.encode()) % 97
    if nth < len(FIRST):
        return HUES[nth], 0
    others = HUES[len(FIRST) :]
    return others[nth % len(others)], 1 + nth % (len(DASHES) - 1)


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Figure:
    return Figure(figsize=(width / 72, height / 72))


def place(
    figure: Figure, left: float, top: float, right: float, bottom: float, sharex: Axes | None = None
) -> Axes:
    """Axes with these margins, in pixels."""
    width, height = figure.get_size_inches() * 72
    box = (left / width, bottom / height)
    size = (1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure.add_axes((*box, *size), sharex=sharex)


COORDINATE = re.compile(r"-?\d+\.\d+")
ARTIST = re.compile(r'<g id="row-(\d+)(?:-(\w+))?">')

MARKS = re.compile(r'<g( clip-path="[^"]*")?>((?:<use [^<>]*/>)+)</g>')


def to_svg(figure: Figure, name: str, styles: list[RowStyle], label: str = "", **data: str) -> str:
    """An <svg> for a page: themed, with ids under `name` and artists of rows as classes.

    Args:
        name: unique in the page; without a label the element `name`-title says what it is.
        label: read out in place of the figure.
        data: attributes for the page's script, `data-<key>` each.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert view
    body = text[text.index("</metadata>") + len("</metadata>") : text.rindex("</svg>")]
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'\b(d|x|y)="([^"]*)"', shortened, body)
    body = re.sub(r"font(?:-size|-family)?: [^;\"]*;? ?", "", body)  # the page's, in one size
    body = re.sub(r' transform="rotate\(-?0 [^"]*"', "", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r">\s+<", "><", body)
    body = MARKS.sub(styled_once, body)

    def artist(found: re.Match[str]) -> str:
        row, part = styles[int(found[1])], found[2] or ""
        title = "" if part else f"<title>{escape(row.label)}</title>"
        return f'<g class="{f"row {row.gid} {part}".rstrip()}">{title}'

    body = ARTIST.sub(artist, body)
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r'(url\(|href=")#', rf"\1#{name}-", body)
    variables = THEME | {style.colour: f"--r{style.index}" for style in styles}
    body = re.sub(
        r"#[0-9a-f]{6}\b", lambda m: f"var({variables[m[0]]})" if m[0] in variables else m[0], body
    )
    named = f'aria-label="{escape(label)}"' if label else f'aria-labelledby="{name}-title"'
    more = "".join(f' data-{key}="{escape(value)}"' for key, value in data.items())
    size = f'width="{float(view[1]):g}" height="{float(view[2]):g}"'
    box = f'viewBox="0 0 {view[1]} {view[2]}"'
    return f'<svg {size} {box} role="img" {named}{more}>{body.strip()}</svg>'


def shortened(attribute: re.Match[str]) -> str:
    """A hundredth of a pixel a coordinate: the page's script reads values from them."""
    numbers = COORDINATE.sub(lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), attribute[2])
    return f'{attribute[1]}="{" ".join(numbers.split())}"'


def styled_once(group: re.Match[str]) -> str:
    """A group of marks with the style that all of them have, in a third of the bytes."""
    styles = set(re.findall(r' style="([^"]*)"', group[2]))
    if len(styles) != 1 or group[2].count(" style=") != group[2].count("<use "):
        return group[0]
    style = f' style="{styles.pop()}"'
    return f"<g{group[1] or ''}{style}>{group[2].replace(style, '')}</g>"


def scales(axes: Axes, across: str) -> dict[str, str]:
    """Attributes for `to_svg` that tell values from coordinates: two values of each axis, each
    before its pixel.

    Args:
        across: what goes to the right, as "tokens" or "layer".
    """
    height = axes.figure.get_size_inches()[1] * 72  # type: ignore[union-attr]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    (x0, y0), (x1, y1) = axes.transData.transform([(left, low), (right, high)])
    log = {"log": "1"} if axes.get_yscale() == "log" else {}
    return {
        "x": f"{left:.9g} {x0:.2f} {right:.9g} {x1:.2f}",
        "y": f"{low:.9g} {height - y0:.2f} {high:.9g} {height - y1:.2f}",
        "across": across,
        **log,
    }
