"""The figure of diffllm attention-map: a row a head; its maps, and lambda or the gate, in columns.

A weight has the same colour in every map of the figure: red above zero, blue below.
"""

import math
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import FuncNorm, ListedColormap
from matplotlib.figure import Figure

from diffllm.analysis.maps import LayerMaps
from diffllm.analysis.token_labels import families

PERCENTILE = 99
"""Of the magnitudes in the maps shown: where colours end. A few keys, the first token above all,
have weights that would leave the others pale."""
SYMBOL = {"lambda": "λ"}
SIGNED = colormaps["RdBu_r"]
POSITIVE = ListedColormap(SIGNED(np.linspace(0.5, 1, 256)), "RdBu_r, upper half")

# Inches, but for the fonts' points.
LARGEST, SMALLEST = {1: 5.0, 2: 3.6, 4: 3.0, 8: 2.4}, 2.0  # side of a map, by heads
NARROWEST, TALLEST = 4.8, 1.4  # the second is height over width
SMALL, NORMAL, LARGE = 7.0, 8.5, 11.0
GAP, STRIP, BAR = 0.16, 0.8, 0.09
TITLE, ROW_TITLE, AXIS_LABEL, FOOT, MARGIN = 0.22, 0.24, 0.2, 0.62, 0.2
GREY = "#707070"

Box = tuple[float, float, float, float]
"""Left, top or bottom, width and height."""


@dataclass
class Layout:
    """Where everything is, in inches from the top left corner."""

    n_tokens: int
    n_heads: int
    n_maps: int
    n_strips: int
    label_length: int
    """Characters of the longest token label."""
    title_lines: int

    @property
    def head_room(self) -> float:
        """Above the first row."""
        return TITLE * (self.title_lines + 1)

    @property
    def side(self) -> float:
        """Of a map: a line of text a token, if that makes a handy figure."""
        largest = next((side for n, side in LARGEST.items() if self.n_heads <= n), SMALLEST)
        return min(max(self.n_tokens * SMALL / 72 * 1.3, 1.3), largest)

    @property
    def font(self) -> float:
        """Points of token labels: smaller before some are left out."""
        return min(max(self.side / self.n_tokens * 72 / 1.3, 5.0), SMALL)

    @property
    def step(self) -> int:
        """Every which token has a label."""
        return math.ceil(self.n_tokens * self.font / 72 * 1.1 / self.side)

    @property
    def labels(self) -> float:
        """Room for token labels and the name of their axis."""
        return self.label_length * self.font / 72 * 0.62 + 0.08 + AXIS_LABEL

    @property
    def block_width(self) -> float:
        columns = self.n_maps * self.side + self.n_strips * STRIP
        return self.labels + columns + (self.n_maps + self.n_strips - 1) * GAP + MARGIN

    @property
    def rows(self) -> int:
        """Heads below each other: all, or fewer in blocks that stand side by side."""
        for blocks in range(1, self.n_heads):
            rows = math.ceil(self.n_heads / blocks)
            width, height = self.size_with(rows)
            if height <= TALLEST * width:
                return rows
        return 1

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure."""
        return self.size_with(self.rows)

    def size_with(self, rows: int) -> tuple[float, float]:
        """Width and height of a figure with that many rows."""
        maps = rows * (ROW_TITLE + self.side) + (rows - 1) * GAP
        width = math.ceil(self.n_heads / rows) * self.block_width + MARGIN
        return max(width, NARROWEST), self.head_room + maps + self.labels + FOOT

    def place(self, index: int, column: int) -> Box:
        """Left, top, width and height of a column's axes, for the `index`-th head shown."""
        block, row = divmod(index, self.rows)
        left = MARGIN / 2 + block * self.block_width + self.labels + column * (self.side + GAP)
        if column > self.n_maps:
            left += (column - self.n_maps) * (STRIP - self.side)
        top = self.head_room + row * (ROW_TITLE + self.side + GAP) + ROW_TITLE
        return left, top, self.side if column < self.n_maps else STRIP, self.side

    def fraction(self, box: Box) -> Box:
        """A box as matplotlib wants it: shares of the figure, from the bottom left corner."""
        (left, top, width, height), (w, h) = box, self.size
        return left / w, 1 - (top + height) / h, width / w, height / h


def draw(layer: LayerMaps, heads: list[int], labels: list[str], title: str) -> Figure:
    """The maps of `heads` for the first sequence, queries downwards and keys to the right.

    Args:
        labels: T names of tokens, without line breaks.
    """
    maps = {name: m[0, heads].double().cpu().numpy() for name, m in layer.maps.items()}
    strips = {name: v[0, heads].double().cpu().numpy() for name, v in layer.by_query.items()}
    layout = Layout(
        n_tokens=len(labels),
        n_heads=len(heads),
        n_maps=len(maps),
        n_strips=len(strips),
        label_length=max(map(len, labels)),
        title_lines=len(title.splitlines()),
    )
    limit = colour_limit(list(maps.values()))
    fig = Figure(figsize=layout.size)
    fig.text(MARGIN / layout.size[0], 1 - 0.12 / layout.size[1], title, size=LARGE, va="top")
    for index, head in enumerate(heads):
        lowest = index % layout.rows == layout.rows - 1 or index == len(heads) - 1
        for column, (name, values) in enumerate((maps | strips).items()):
            axes = fig.add_axes(layout.fraction(layout.place(index, column)))
            prefix = f"head {head}: " if column == 0 else ""
            if name in maps:
                draw_map(axes, values[index], limit, signed(values))
                axes.set_title(prefix + name, size=NORMAL, loc="left", pad=4)
                name_tokens(axes.xaxis, labels if lowest else [], layout)
                axes.set_xlabel("key" if lowest else "", size=NORMAL, labelpad=2)
            else:
                draw_strip(axes, values[index], strip_range(values), lowest)
                mean = f"{SYMBOL.get(name, name)}, mean {values[index].mean():.2f}"
                axes.set_title(mean, size=NORMAL, loc="left", pad=4)
            name_tokens(axes.yaxis, labels if column == 0 else [], layout)
            axes.set_ylabel("query" if column == 0 else "", size=NORMAL, labelpad=2)
    add_colour_bars(fig, layout, maps, limit)
    return fig


def signed(weights: np.ndarray) -> bool:
    """Whether any weight is below zero."""
    return bool((weights < 0).any())


def colour_limit(maps: list[np.ndarray]) -> float:
    """The magnitude at which colours end: a percentile of what the queries of all maps see."""
    seen = [np.abs(m[..., *np.tril_indices(m.shape[-1])]).ravel() for m in maps]
    limit = float(np.percentile(np.concatenate(seen), PERCENTILE, method="higher"))
    return limit or 1.0


def norm_of(limit: float, negative: bool) -> FuncNorm:
    """Square roots of weights, with their sign, up to `limit`."""
    root = (lambda w: np.sign(w) * np.sqrt(np.abs(w)), lambda r: np.sign(r) * np.square(r))
    return FuncNorm(root, vmin=-limit if negative else 0.0, vmax=limit)


def draw_map(axes: Axes, weights: np.ndarray, limit: float, negative: bool) -> None:
    """weights (T, T) up to the diagonal; the future stays blank."""
    n = len(weights)
    future = np.triu(np.ones_like(weights, dtype=bool), 1)
    axes.imshow(
        np.ma.masked_array(weights, future),
        cmap=SIGNED if negative else POSITIVE,
        norm=norm_of(limit, negative),
        interpolation="nearest",
        aspect="auto",
    )
    stairs = np.repeat(np.arange(n + 1), 2) - 0.5
    xs, ys = np.append(stairs[1:], -0.5), np.append(stairs[:-1], n - 0.5)
    axes.plot([*xs, -0.5], [*ys, -0.5], color=GREY, linewidth=0.5, clip_on=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=1.5, width=0.4, pad=1.5, color=GREY)


def strip_range(values: np.ndarray) -> tuple[float, float]:
    """From 0 to 1 if all values are in between, else as far as they go."""
    return min(0.0, float(values.min())), max(1.0, float(values.max()))


def draw_strip(axes: Axes, values: np.ndarray, within: tuple[float, float], named: bool) -> None:
    """values (T,): a bar a query, from zero."""
    axes.barh(np.arange(len(values)), values, height=0.86, color=GREY, linewidth=0)
    axes.axvline(values.mean(), color="black", linewidth=0.7)
    axes.set_xlim(within)
    axes.set_ylim(len(values) - 0.5, -0.5)
    ticks = sorted({within[0], 0.0, within[1]})
    axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks] if named else [], size=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.4, color=GREY)
    axes.spines["left"].set_position(("data", 0.0))
    axes.tick_params(length=1.5, width=0.4, pad=1.5, color=GREY)


def name_tokens(axis: Axis, labels: list[str], layout: Layout) -> None:
    """Labels along an axis, thinned where they would overlap; no ticks without labels."""
    ticks = range(0, len(labels), layout.step)
    axis.set_ticks(list(ticks))
    axis.set_ticklabels(
        [labels[i] for i in ticks],
        family=families(),
        size=layout.font,
        rotation=90 if isinstance(axis, XAxis) else 0,
        rotation_mode="anchor",
        ha="right",
        va="center_baseline",  # by the line, not by each label's ink
        parse_math=False,  # a dollar is a token like others
    )


def add_colour_bars(fig: Figure, layout: Layout, maps: dict[str, np.ndarray], limit: float) -> None:
    """One bar for the maps that are nowhere negative, one for those that are."""
    columns = {signed(m): column for column, m in reversed(list(enumerate(maps.values())))}
    top = layout.size[1] - FOOT + 0.12
    for negative, column in columns.items():
        left, _, width, _ = layout.place(0, column)
        box = (left, top, min(width, 2.6), BAR)
        beyond = [m for m in maps.values() if signed(m) == negative]
        over = max(float(m.max()) for m in beyond) > limit
        under = min(float(m.min()) for m in beyond) < -limit
        bar = fig.colorbar(
            ScalarMappable(norm_of(limit, negative), SIGNED if negative else POSITIVE),
            cax=fig.add_axes(layout.fraction(box)),
            orientation="horizontal",
            extend={(0, 0): "neither", (1, 0): "max", (0, 1): "min", (1, 1): "both"}[over, under],
        )
        ticks = [0, limit / 4, limit]
        ticks = [-limit, -limit / 4, *ticks] if negative else ticks
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
        bar.ax.tick_params(labelsize=SMALL, length=1.5, width=0.4, pad=1.5)
        bar.outline.set_linewidth(0.4)
        clipped = f", cut at the {PERCENTILE}th percentile" if over or under else ""
        bar.set_label(f"weight, square-root scale{clipped}", size=SMALL, labelpad=1)
