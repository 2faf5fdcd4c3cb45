"""The figure of diffllm attention-map: heads in rows; maps, and lambda or the gate, in columns."""

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, FuncNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from diffllm.maps import LayerMaps

SMALL, NORMAL, LARGE = 6.5, 9.0, 10.5
LINE = SMALL / 72 * 1.2  # inches that a label needs
MONO = FontProperties(family="DejaVu Sans Mono", size=SMALL)
STRIP, GAP, BAR = 0.55, 0.12, 0.10  # inches


def figure(layer: LayerMaps, heads: list[int], labels: list[str], title: str) -> Figure:
    """Heat maps of `heads`, tokens on both axes.

    Maps that cannot be negative share one colour scale, a signed one has its own, symmetric about
    white. Both scales are square roots, because a few keys have most of the weight.

    Args:
        labels: what the T tokens are called.
    """
    side = map_side(len(labels), len(heads))
    columns = [*layer.maps, *([layer.strength_name] if layer.strength is not None else [])]
    widths = [side if name in layer.maps else STRIP for name in columns]
    margin = 0.25 + SMALL / 72 * 0.65 * max(map(len, labels))  # inches for labels
    left, top, bottom, right = margin + 0.25, 0.75, margin + 0.75, 0.35
    width = left + sum(widths) + GAP * (len(columns) - 1) + right
    height = top + side * len(heads) + GAP * (len(heads) - 1) + bottom
    width = max(width, 4.0)
    fig = Figure(figsize=(width, height))
    fig.text(left / width, 1 - 0.25 / height, title, fontsize=LARGE, va="center")
    step = max(1, math.ceil(len(labels) * LINE / side))
    for row, head in enumerate(heads):
        y = (height - top - side * (row + 1) - GAP * row) / height
        for column, name in enumerate(columns):
            x = (left + sum(widths[:column]) + GAP * column) / width
            axes = fig.add_axes((x, y, widths[column] / width, side / height))
            if name in layer.maps:
                draw_map(axes, layer.maps[name][head].numpy(), *scale(layer, name, heads))
                name_tokens(axes.xaxis, labels if row == len(heads) - 1 else [], step)
            else:
                assert layer.strength is not None
                draw_strip(axes, layer.strength[head].numpy(), layer.strength[heads].numpy())
                axes.xaxis.set_visible(row == len(heads) - 1)
            name_tokens(axes.yaxis, labels if column == 0 else [], step)
            if row == 0:
                axes.set_title(name, fontsize=NORMAL)
            if column == 0:
                axes.set_ylabel(f"head {head}: query", fontsize=NORMAL)
            if row == len(heads) - 1 and name in layer.maps:
                axes.set_xlabel("key", fontsize=NORMAL)
    add_bars(fig, layer, heads, left, widths, (width, height))
    return fig


def map_side(tokens: int, heads: int) -> float:
    """Inches of one map: a line of text a token if that gives a handy figure."""
    most = 7.0 if heads == 1 else 2.6 if heads <= 8 else 1.8
    return min(max(tokens * LINE, 1.6), most)


def signed(name: str, layer: LayerMaps) -> bool:
    """Whether a map has negative weights."""
    return bool((layer.maps[name] < 0).any())


def scale(layer: LayerMaps, name: str, heads: list[int]) -> tuple[Colormap, FuncNorm]:
    """Colours of a map, the same in all heads shown and in all maps of its kind."""
    kind = signed(name, layer)
    alike = [m[heads] for other, m in layer.maps.items() if signed(other, layer) == kind]
    most = max(float(m.abs().max()) for m in alike) or 1.0
    colours = matplotlib.colormaps["RdBu_r" if kind else "Blues"].with_extremes(bad="#f0f0f0")
    roots = (lambda w: np.sign(w) * np.sqrt(np.abs(w)), lambda r: np.sign(r) * r**2)
    return colours, FuncNorm(roots, vmin=-most if kind else 0.0, vmax=most)


def draw_map(axes: Axes, weights: np.ndarray, colours: Colormap, norm: FuncNorm) -> None:
    """weights (T, T); the future is grey."""
    future = np.triu(np.ones_like(weights, dtype=bool), 1)
    axes.imshow(np.ma.masked_array(weights, future), cmap=colours, norm=norm, aspect="auto")
    frame(axes)


def draw_strip(axes: Axes, values: np.ndarray, shown: np.ndarray) -> None:
    """values (T,), a bar a query, on the scale of all `shown`."""
    axes.barh(np.arange(len(values)), values, height=0.9, color="#D55E00", linewidth=0)
    low, high = min(0.0, float(shown.min())), max(1e-6, float(shown.max()))
    axes.set_xlim(low * 1.05, high * 1.05)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xticks([low, high] if low else [0, high])
    axes.set_xticklabels([f"{tick:.2g}" for tick in axes.get_xticks()], fontsize=SMALL)
    frame(axes)


def frame(axes: Axes) -> None:
    """Thin grey lines around."""
    for spine in axes.spines.values():
        spine.set_linewidth(0.4)
        spine.set_color("#888888")
    axes.tick_params(length=1.5, width=0.4, pad=1.5)


def name_tokens(axis: object, labels: list[str], step: int) -> None:
    """Every `step`-th token along an axis; no ticks without labels."""
    ticks = range(0, len(labels), step)
    axis.set_ticks(list(ticks))  # type: ignore[attr-defined]
    vertical = axis.axis_name == "x"  # type: ignore[attr-defined]
    axis.set_ticklabels(  # type: ignore[attr-defined]
        [labels[i] for i in ticks],
        fontproperties=MONO,
        rotation=90 if vertical else 0,
        parse_math=False,
    )


def add_bars(
    fig: Figure,
    layer: LayerMaps,
    heads: list[int],
    left: float,
    widths: list[float],
    size: tuple[float, float],
) -> None:
    """A colour bar under the columns of each kind of map."""
    kinds: dict[bool, list[int]] = {}
    for column, name in enumerate(layer.maps):
        kinds.setdefault(signed(name, layer), []).append(column)
    for columns in kinds.values():
        name = list(layer.maps)[columns[0]]
        colours, norm = scale(layer, name, heads)
        start = left + sum(widths[: columns[0]]) + GAP * columns[0]
        box = (start / size[0], 0.45 / size[1], widths[columns[0]] / size[0], BAR / size[1])
        bar = fig.colorbar(
            ScalarMappable(norm, colours), cax=fig.add_axes(box), orientation="horizontal"
        )
        most = float(norm.vmax or 0)
        ticks = [-most, -most / 4, 0, most / 4, most] if name and norm.vmin else [0, most / 4, most]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
        bar.ax.tick_params(labelsize=SMALL, length=1.5, width=0.4, pad=1.5)
        bar.outline.set_linewidth(0.4)
        bar.set_label("weight (square-root colours)", fontsize=SMALL)


def visible_piece(piece: str) -> str:
    """A token's text in one line: marks for white space, escapes for what the font lacks."""
    marks = {" ": "·", "\n": "⏎", "\t": "⇥", "▁": "·"}
    known = get_font(findfont(MONO))
    shown = [
        marks.get(c, c if known.get_char_index(ord(c)) and c.isprintable() else f"\\u{ord(c):x}")
        for c in piece
    ]
    text = "".join(shown)
    return text if len(text) <= 14 else text[:13] + "…"
