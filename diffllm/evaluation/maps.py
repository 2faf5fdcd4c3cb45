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

ROUNDING = 1e-4
"""Tolerance for the sum of a float32 softmax, which should be 1."""
PERCENTILE = 99
"""Percentile of magnitudes at which colours end, because a few keys have very large weights."""
SYMBOL = {"lambda": "λ"}
GREY = "#707070"
SMALL, NORMAL, LARGE = 7.0, 8.5, 11.0
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
        return list(self.maps.values())[-1]


@torch.no_grad()
def layer_maps(model: Transformer, tokens: Tensor, layer: int) -> LayerMaps:
    """Compute the attention maps of layer `layer`, counted from 0, for token ids (B, T)."""
    return attention_maps(*next(islice(attention_inputs(model, tokens), layer, None)))


@torch.no_grad()
def last_maps(model: Transformer, tokens: Tensor, lengths: Tensor) -> Iterator[Maps]:
    """Yield for each layer the attention weights of the last token of each row.

    Each item is a dict from the name of an attention map, such as "map 1", to weights (B, h, T).

    Args:
        tokens: token ids (B, T) int64; each row is one document, padded at the end.
        lengths: number of tokens of each row without padding, (B,) int64.
    """
    at = torch.arange(len(tokens), device=tokens.device)[:, None], lengths[:, None] - 1
    visible = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    layers = attention_inputs(model, tokens)
    for _, (attention, x, rope) in zip(model.layers, layers, strict=False):
        q, k, _ = attention.project(x, rope)
        maps = attention.maps(x[at], q[at], k, visible[:, None, None])
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
    shown: Aux = {}
    attention(x, rope, mask, aux=shown)
    layer = LayerMaps(attention.maps(x, q, k, mask), {})
    batch, heads, length = layer.effective.shape[:3]
    if "lambda" in shown:
        by_head = shown["lambda"].expand(batch, length, heads)
        layer.by_query["lambda"] = by_head.transpose(1, 2)
    elif "gate" in shown:
        layer.by_query["gate"] = shown["gate"].mean(-1).transpose(1, 2)
    else:
        missing = 1 - layer.effective.sum(-1)
        if (missing > ROUNDING).any():
            layer.by_query["sink"] = missing
    return layer


def draw(layer: LayerMaps, heads: list[int], labels: list[str], title: str) -> "Figure":
    """Draw the attention maps of the given heads for the first sequence of the batch.

    Rows of a drawn map are queries, and columns are keys.

    Args:
        labels: one label per token, without line breaks.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = {
        name: values[0, heads].double().cpu().numpy()
        for name, values in (layer.maps | layer.by_query).items()
    }
    # The side of a map gives each token a line of text, within limits that shrink with more heads.
    side = min(max(len(labels) * SMALL / 72 * 1.3, 1.3), max(5.0 * len(heads) ** -0.35, 2.0))
    widths = [side if name in layer.maps else STRIP for name in columns]
    blocks = heads_per_row(len(heads), side, sum(widths))
    rows = len(heads) // blocks
    # Below 5 points, labels are omitted instead of drawn smaller.
    points = min(max(side / len(labels) * 72 / 1.3, 5.0), SMALL)
    # Margin for token labels and the name of the axis.
    beside = max(map(len, labels)) * points / 72 * 0.62 + 0.4
    width = beside + blocks * (sum(widths) + 0.13 * len(widths))
    height = beside + rows * (side + 0.35) + 0.2 * len(title.splitlines()) + 0.6
    engine = ConstrainedLayoutEngine(h_pad=0.06)
    fig = Figure(figsize=(max(width, NARROWEST), height), layout=engine)
    fig.suptitle(title, x=0.02, ha="left", size=LARGE)
    grid = fig.subplots(rows, blocks * len(columns), squeeze=False, width_ratios=widths * blocks)
    colours = colours_of(np.stack([columns[name] for name in layer.maps]))
    step = math.ceil(len(labels) * points * 1.1 / 72 / side)
    for index, axes_of_head in enumerate(grid.reshape(len(heads), -1)):
        for (name, values), axes in zip(columns.items(), axes_of_head, strict=True):
            lowest, leftmost = axes in grid[-1], axes in grid[:, 0]
            axes.tick_params(length=1.5, width=0.4, pad=1.5, color=GREY)
            if name in layer.maps:
                caption = f"head {heads[index]}: {name}" if axes is axes_of_head[0] else name
                draw_map(axes, values[index], colours)
                axes.set_box_aspect(1)
                name_tokens(axes.xaxis, "key", labels if lowest else [], step, points)
            else:
                caption = f"{SYMBOL.get(name, name)}, mean {values[index].mean():.2f}"
                within = min(0.0, values.min()), max(1.0, values.max())
                draw_strip(axes, values[index], within, named=lowest)
                axes.set_box_aspect(side / STRIP)
            name_tokens(axes.yaxis, "query", labels if leftmost else [], step, points)
            axes.set_title(caption, size=NORMAL, loc="left", pad=4)
    draw_colour_bar(fig, grid, colours)
    return fig


def heads_per_row(n_heads: int, height: float, width: float) -> int:
    """Return how many heads to draw in each row of a figure with `n_heads` heads.

    The result divides `n_heads`. Among the divisors, choose the one for which the width of the
    figure is closest to 1.4 times its height. `height` and `width` are the size of the drawing of
    one head in inches.
    """
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    return min(divisors, key=lambda n: abs(math.log(1.4 * n_heads * height / n / (n * width))))


def colours_of(weights: np.ndarray) -> "ScalarMappable":
    """Return a colour scale for attention weights (..., T, T).

    The scale is linear in the signed square root of a weight. Its largest value is the percentile
    PERCENTILE of |weight|. Weights of keys after the query are excluded.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import FuncNorm, ListedColormap

    seen = weights[..., *np.tril_indices(weights.shape[-1])].ravel()
    limit = float(np.percentile(np.abs(seen), PERCENTILE, method="higher")) or 1.0
    signed = bool((seen < 0).any())
    root = (lambda w: np.sign(w) * np.sqrt(np.abs(w)), lambda r: np.sign(r) * np.square(r))
    norm = FuncNorm(root, vmin=-limit if signed else 0.0, vmax=limit)
    both = colormaps["RdBu_r"]
    positive = ListedColormap(both(np.linspace(0.5, 1, 256)), "RdBu_r, upper half")
    colours = ScalarMappable(norm, both if signed else positive)
    colours.set_array(seen)
    return colours


def draw_map(axes: "Axes", weights: np.ndarray, colours: "ScalarMappable") -> None:
    """Draw one attention map (T, T); the cells of keys after the query stay blank."""
    n = len(weights)
    shown = np.ma.masked_array(weights, np.triu(np.ones((n, n), dtype=bool), 1))
    image = axes.imshow(shown, interpolation="nearest", aspect="auto")
    image.set(cmap=colours.cmap, norm=colours.norm)
    stairs = np.repeat(np.arange(n + 1), 2) - 0.5
    xs, ys = np.append(stairs[1:], -0.5), np.append(stairs[:-1], n - 0.5)
    axes.plot([*xs, -0.5], [*ys, -0.5], color=GREY, linewidth=0.5, clip_on=False)
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


def draw_strip(axes: "Axes", values: np.ndarray, within: tuple[float, float], named: bool) -> None:
    axes.barh(np.arange(len(values)), values, height=0.86, color=GREY, linewidth=0)
    axes.axvline(values.mean(), color="black", linewidth=0.7)
    axes.set(xlim=within, ylim=(len(values) - 0.5, -0.5))
    ticks = sorted({*within, 0.0})
    axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks] if named else [], size=SMALL)
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
    ticks = [tick for tick in (-limit, -limit / 4, 0, limit / 4, limit) if tick >= low]
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

    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        piece = chr(int(byte[1], 16))
    glyphs = {} if byte and piece > "\x7f" else get_font(findfont(FONT)).get_charmap()
    text = ""
    for c in piece:
        alone = c.isprintable() and not unicodedata.category(c).startswith("M")
        drawn = c if alone and ord(c) in glyphs else c.encode("unicode_escape").decode()
        text += MARKS.get(c, drawn)
    return text if len(text) <= LABEL_LENGTH else text[: LABEL_LENGTH - 1] + "…"
