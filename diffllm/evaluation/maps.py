"""Attention maps (weights of queries on keys) of a layer as tensors, and figures of these maps.

For each head, a figure shows the attention maps and, if the variant has them, the values of lambda,
gate or sink. All maps of a figure use the same colours: red above zero, blue below.

Shapes: B batch, T tokens, h heads of an attention map: n_heads, or n_heads / 2 for DIFF V1. Maps
are (B, h, T, T): the axis of queries, then the axis of keys.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diffllm.model import Transformer
from diffllm.model.attention.base import Attention, Aux, Maps
from diffllm.model.rope import Rope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

SUM_TOLERANCE = 1e-4
"""Tolerance for the sum of a float32 softmax, which should be 1."""
PERCENTILE = 99
"""Percentile of magnitudes at which colours end, because a few keys have very large weights."""
SYMBOL = {"lambda": "λ"}
GREY = "#707070"
SMALL, NORMAL, LARGE = 7.0, 8.5, 11.0
POINTS_PER_INCH = 72
LINE_SPACING = 1.3
"""Distance between the lines of two token labels, relative to the size of the labels."""
STRIP, NARROWEST, SCALE = 0.8, 4.8, 2.6
"""Widths in inches: column of lambda or the gate, minimum of the figure, colour bar."""
FONT = "DejaVu Sans Mono"
LABEL_LENGTH = 12
MARKS = {" ": "·", "\u2581": "·", "\n": "↵", "\t": "⇥"}


@dataclass
class LayerMaps:
    """The attention maps of one layer, and the lambda, gate or sink value of each query."""

    maps: Maps
    """"map", or "map 1", "map 2" and "difference": (B, h, T, T) each, float32 or wider."""
    by_query: dict[str, Tensor]
    """Values (B, h, T) of "lambda", "gate" (mean over channels) or "sink"; may be empty."""

    @property
    def effective(self) -> Tensor:
        """The last attention map in `maps`, which multiplies the value vectors, (B, h, T, T)."""
        *_, effective = self.maps.values()
        return effective


@torch.no_grad()
def layer_maps(model: Transformer, tokens: Tensor, layer: int) -> LayerMaps:
    """Compute the attention maps of layer `layer`, counted from 0, for token ids (B, T)."""
    # The generator has no name, so that its tensors are freed before the maps are computed.
    attention, x, rope = next(islice(attention_inputs(model, tokens), layer, None))
    return attention_maps(attention, x, rope)


@torch.no_grad()
def last_maps(model: Transformer, tokens: Tensor, lengths: Tensor) -> Iterator[Maps]:
    """Yield for each layer the attention weights of the last token of each row.

    Each item is a dict from the name of an attention map, such as "map 1", to weights (B, h, T).

    Args:
        tokens: token ids (B, T) int64; each row is one document, padded at the end.
        lengths: number of tokens of each row without padding, (B,) int64.
    """
    batch, length = tokens.shape
    # The pair of indices (B, 1) selects one query per row, and keeps an axis of queries.
    rows = torch.arange(batch, device=tokens.device)[:, None]
    last = lengths[:, None] - 1
    # The last token sees all keys that are not padding; heads and queries share this mask.
    positions = torch.arange(length, device=tokens.device)
    is_token = positions < lengths[:, None]
    visible_keys = is_token[:, None, None]  # (B, 1, 1, T)
    layers = attention_inputs(model, tokens)
    # `zip` ends before it requests another item of `layers`, so the last block does not run.
    for _, (attention, x, rope) in zip(model.layers, layers, strict=False):
        q, k, _ = attention.project(x, rope)
        last_inputs = x[rows, last]  # (B, 1, D)
        last_queries = q[rows, last]
        maps = attention.maps(last_inputs, last_queries, k, visible_keys)
        yield {name: weights.squeeze(2) for name, weights in maps.items()}


@torch.no_grad()
def attention_inputs(
    model: Transformer, tokens: Tensor
) -> Iterator[tuple[Attention, Tensor, Rope]]:
    """Yield (attention module, normalised input (B, T, D), rotary tables) for each layer.

    A transformer block runs only when the caller requests the inputs of the next layer.
    """
    x = model.tok_embeddings(tokens)
    rope = model.rope(0, tokens.shape[1])
    for block in model.layers:
        yield block.attention, block.attention_norm(x), rope
        x, *_ = block(x, rope)


def attention_maps(
    attention: Attention, x: Tensor, rope: Rope, mask: Tensor | None = None
) -> LayerMaps:
    """Compute the attention maps of an attention module, and its lambda, gate or sink, if any.

    An attention variant has at most one of these three. If it has one, the result also contains a
    value for each query and head: lambda, the mean gate, or the sink (1 minus the sum of the
    weights).

    Args:
        x: normalised input of the attention module, (B, T, D).
        mask: boolean, True for visible keys; None for causal attention over all T tokens.
    """
    q, k, _ = attention.project(x, rope)
    aux: Aux = {}
    attention(x, rope, mask, aux=aux)
    maps = attention.maps(x, q, k, mask)
    *_, effective = maps.values()
    batch, heads, length = effective.shape[:3]
    by_query: dict[str, Tensor] = {}
    if "lambda" in aux:
        # In DIFF V1, all heads and tokens share one lambda.
        by_head = aux["lambda"].expand(batch, length, heads)
        by_query["lambda"] = by_head.transpose(1, 2)
    elif "gate" in aux:
        mean_gate = aux["gate"].mean(-1)  # (B, T, h)
        by_query["gate"] = mean_gate.transpose(1, 2)
    else:
        missing = 1 - effective.sum(-1)
        if (missing > SUM_TOLERANCE).any():
            by_query["sink"] = missing
    return LayerMaps(maps, by_query)


def draw(layer: LayerMaps, heads: list[int], labels: list[str], title: str) -> "Figure":
    """Draw the attention maps of the given heads for the first sequence of the batch.

    Rows of a drawn map are queries, and columns are keys.

    Args:
        labels: one label per token, without line breaks.
    """
    columns: dict[str, np.ndarray] = {}
    for name, batch in (layer.maps | layer.by_query).items():
        first_sequence = batch[0, heads]
        columns[name] = first_sequence.double().cpu().numpy()
    # The side of a map gives each token a line of text, within limits that shrink with more heads.
    side_for_labels = len(labels) * SMALL / POINTS_PER_INCH * LINE_SPACING
    longest_side = 5.0 * len(heads) ** -0.35
    side = min(max(side_for_labels, 1.3), max(longest_side, 2.0))
    widths = [side if name in layer.maps else STRIP for name in columns]
    # Below 5 points, labels are omitted instead of drawn smaller.
    points_for_all_labels = side / len(labels) * POINTS_PER_INCH / LINE_SPACING
    points = min(max(points_for_all_labels, 5.0), SMALL)
    step = math.ceil(len(labels) * points * 1.1 / POINTS_PER_INCH / side)
    # Margin for token labels and the name of the axis.
    longest_label = max(map(len, labels))
    margin = longest_label * points / POINTS_PER_INCH * 0.62 + 0.4
    fig, grid = figure_with_axes(len(heads), side, widths, margin, title)
    # All maps of the figure share the colours, so that equal weights look equal.
    drawn_maps = [columns[name] for name in layer.maps]
    colours = colours_of(np.stack(drawn_maps))
    axes_by_head = grid.reshape(len(heads), -1)
    for index, axes_of_head in enumerate(axes_by_head):
        for (name, values), axes in zip(columns.items(), axes_of_head, strict=True):
            axes.tick_params(length=1.5, width=0.4, pad=1.5, color=GREY)
            # Only the axes at the borders of the figure have labels.
            is_lowest = axes in grid[-1]
            is_leftmost = axes in grid[:, 0]
            key_labels = labels if is_lowest else []
            query_labels = labels if is_leftmost else []
            if name in layer.maps:
                is_first = axes is axes_of_head[0]
                caption = f"head {heads[index]}: {name}" if is_first else name
                draw_map(axes, values[index], colours)
                axes.set_box_aspect(1)
                name_tokens(axes.xaxis, "key", key_labels, step, points)
            else:
                symbol = SYMBOL.get(name, name)
                caption = f"{symbol}, mean {values[index].mean():.2f}"
                # All heads have the same limits, at least 0 to 1.
                lowest = min(0.0, values.min())
                highest = max(1.0, values.max())
                draw_strip(axes, values[index], (lowest, highest), is_lowest)
                axes.set_box_aspect(side / STRIP)
            name_tokens(axes.yaxis, "query", query_labels, step, points)
            axes.set_title(caption, size=NORMAL, loc="left", pad=4)
    draw_colour_bar(fig, grid, colours)
    return fig


def figure_with_axes(
    n_heads: int, side: float, widths: list[float], margin: float, title: str
) -> "tuple[Figure, np.ndarray]":
    """Create a figure with a title and a grid of empty axes: one per head and column.

    In each row of the grid, the columns of a head are neighbours. All lengths are in inches.

    Args:
        side: side of a map.
        widths: width of each column of a head.
        margin: width of the labels at the left, and height of the labels at the bottom.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    heads_in_row = heads_per_row(n_heads, side, sum(widths))
    rows = n_heads // heads_in_row
    width_of_head = sum(widths) + 0.13 * len(widths)
    width = margin + heads_in_row * width_of_head
    title_height = 0.2 * len(title.splitlines())
    height = margin + rows * (side + 0.35) + title_height + 0.6
    size = max(width, NARROWEST), height
    fig = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.06))
    fig.suptitle(title, x=0.02, ha="left", size=LARGE)
    columns = heads_in_row * len(widths)
    ratios = widths * heads_in_row
    grid = fig.subplots(rows, columns, squeeze=False, width_ratios=ratios)
    return fig, grid


def heads_per_row(n_heads: int, height: float, width: float) -> int:
    """Return how many heads to draw in each row of a figure with `n_heads` heads.

    The result divides `n_heads`. Among the divisors, choose the one for which the width of the
    figure is closest to 1.4 times its height. `height` and `width` are the size of the drawing of
    one head in inches.
    """

    def distance(n: int) -> float:
        # A logarithm, because twice too wide is as bad as twice too high.
        wanted_width = 1.4 * n_heads * height / n
        return abs(math.log(wanted_width / (n * width)))

    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    return min(divisors, key=distance)


def colours_of(weights: np.ndarray) -> "ScalarMappable":
    """Return a colour scale for attention weights (..., T, T).

    The scale is linear in the signed square root of a weight. Its largest value is the percentile
    PERCENTILE of |weight|. Weights of keys after the query are excluded.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import FuncNorm, ListedColormap

    queries, keys = np.tril_indices(weights.shape[-1])
    seen_weights = weights[..., queries, keys].ravel()
    magnitudes = np.abs(seen_weights)
    limit = float(np.percentile(magnitudes, PERCENTILE, method="higher"))
    if limit == 0:
        # Nearly all weights are 0, but a scale needs a range.
        limit = 1.0

    def signed_root(weight: np.ndarray) -> np.ndarray:
        return np.sign(weight) * np.sqrt(np.abs(weight))

    def signed_square(root: np.ndarray) -> np.ndarray:
        return np.sign(root) * np.square(root)

    has_negative = bool((seen_weights < 0).any())
    lowest = -limit if has_negative else 0.0
    norm = FuncNorm((signed_root, signed_square), vmin=lowest, vmax=limit)
    red_and_blue = colormaps["RdBu_r"]
    # Without negative weights, the scale starts at the neutral middle colour.
    upper_half = red_and_blue(np.linspace(0.5, 1, 256))
    red = ListedColormap(upper_half, "RdBu_r, upper half")
    colours = ScalarMappable(norm, red_and_blue if has_negative else red)
    colours.set_array(seen_weights)
    return colours


def draw_map(axes: "Axes", weights: np.ndarray, colours: "ScalarMappable") -> None:
    """Draw one attention map (T, T); the cells of keys after the query stay blank."""
    n = len(weights)
    everywhere = np.ones((n, n), dtype=bool)
    is_future = np.triu(everywhere, 1)
    drawn_weights = np.ma.masked_array(weights, is_future)
    image = axes.imshow(drawn_weights, interpolation="nearest", aspect="auto")
    image.set(cmap=colours.cmap, norm=colours.norm)
    # The outline has a step at each cell of the diagonal, then two sides, then closes.
    stairs = np.repeat(np.arange(n + 1), 2) - 0.5
    first_edge = -0.5
    last_edge = n - 0.5
    xs = [*stairs[1:], first_edge, first_edge]
    ys = [*stairs[:-1], last_edge, first_edge]
    axes.plot(xs, ys, color=GREY, linewidth=0.5, clip_on=False)
    axes.spines[:].set_visible(False)


def name_tokens(axis: "Axis", name: str, labels: list[str], step: int, points: float) -> None:
    from matplotlib.axis import XAxis

    axis.set_ticks(
        range(0, len(labels), step),
        labels[::step],
        family=FONT,
        size=points,
        rotation=90 if isinstance(axis, XAxis) else 0,
        rotation_mode="anchor",
        ha="right",
        va="center_baseline",  # Align baselines instead of the drawn shapes.
        parse_math=False,  # A dollar sign is an ordinary token.
    )
    axis.set_label_text(name if labels else "", size=NORMAL)
    axis.labelpad = 2


def draw_strip(
    axes: "Axes", values: np.ndarray, limits: tuple[float, float], has_labels: bool
) -> None:
    queries = np.arange(len(values))
    axes.barh(queries, values, height=0.86, color=GREY, linewidth=0)
    axes.axvline(values.mean(), color="black", linewidth=0.7)
    # The first query is at the top, as in a map.
    axes.set(xlim=limits, ylim=(len(values) - 0.5, -0.5))
    ticks = sorted({*limits, 0.0})
    labels = [f"{tick:.2g}" for tick in ticks] if has_labels else []
    axes.set_xticks(ticks, labels, size=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.4, color=GREY)
    axes.spines["left"].set_position(("data", 0.0))


def draw_colour_bar(fig: "Figure", grid: np.ndarray, colours: "ScalarMappable") -> None:
    low, limit = colours.get_clim()
    bar = fig.colorbar(
        colours,
        ax=list(grid.flat),
        location="bottom",
        shrink=SCALE / fig.get_figwidth(),
        aspect=30,
        pad=0.1 / fig.get_figheight(),
        anchor=(0.0, 0.5),
    )
    # On a scale of square roots, a quarter of the limit is half as far from 0 as the limit.
    middle = limit / 4
    both_signs = (-limit, -middle, 0, middle, limit)
    ticks = [tick for tick in both_signs if tick >= low]
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.ax.tick_params(labelsize=SMALL, length=1.5, width=0.4, pad=1.5)
    bar.outline.set_linewidth(0.4)
    label = f"weight, square-root scale up to the {PERCENTILE}th percentile"
    bar.set_label(label, size=SMALL, labelpad=1)


def visible(piece: str) -> str:
    """Return the text of a token as one printable line of at most LABEL_LENGTH characters.

    White space is replaced by visible symbols, and other invisible characters by escape sequences.
    """
    from matplotlib.font_manager import findfont, get_font

    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    if byte:
        piece = chr(int(byte[1], 16))
    # A byte above 127 is a part of a character: it is shown as an escape sequence.
    is_partial = bool(byte) and piece > "\x7f"
    glyphs = {} if is_partial else get_font(findfont(FONT)).get_charmap()
    text = ""
    for c in piece:
        # A combining mark would be drawn over the character before it.
        is_mark = unicodedata.category(c).startswith("M")
        has_glyph = c.isprintable() and not is_mark and ord(c) in glyphs
        escaped = c.encode("unicode_escape").decode()
        text += MARKS.get(c, c if has_glyph else escaped)
    if len(text) > LABEL_LENGTH:
        text = text[: LABEL_LENGTH - 1] + "…"
    return text
