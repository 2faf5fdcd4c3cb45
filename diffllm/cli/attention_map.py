"""diffllm attention-map run=<dir> prompt="...": draw the attention of a trained run's heads."""

import hashlib
import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.cli.arguments import RunArguments, argument, parse, write_out
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.printing import Table, echo, echo_json

if TYPE_CHECKING:
    from torch import Tensor

    from diffllm.evaluation.maps import LayerMaps

MOST_TOKENS = 256
"""Maximum tokens of a prompt; labels and cells of more tokens would be too small to read."""
IMAGE_FORMATS = (".png", ".pdf", ".svg")


@dataclass
class AttentionMapArguments(RunArguments):
    prompt: str = argument("text to read, taken verbatim")
    layer: str = argument("index from 0; -1: the last layer; all: one figure per layer", "-1")
    head: str = argument("index from 0, or all", "all")
    step: int | None = argument("step of the checkpoint; 0 or not given: the newest", None)
    out: str = argument(
        "figure file: .png, .pdf or .svg; layer=all adds the layer number to the name; empty: in "
        "the run directory, with a different name for each prompt",
        "",
        path=True,
    )


def attention_map_command(argv: list[str]) -> None:
    args = parse(AttentionMapArguments, argv, 'diffllm attention-map run=<dir> prompt="def "')
    import torch

    from diffllm.config.saved import load_run_config
    from diffllm.data.tokenizer import Tokenizer, tokenizer_of
    from diffllm.evaluation.load import decoder
    from diffllm.evaluation.maps import draw, layer_maps, visible

    run = Path(args.run)
    cfg = load_run_config(run)
    layers = indices("layer", args.layer, cfg.model.n_layers, -1)
    tokenizer = Tokenizer.from_file(tokenizer_of(run))
    tokens = tokenizer.encode(args.prompt)
    check_length(tokens, min(cfg.model.seq_len, MOST_TOKENS))
    if args.out and Path(args.out).suffix.lower() not in IMAGE_FORMATS:
        raise ConfigError(
            f"out={args.out} must end in {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"
        )
    model, step = decoder(run, args.step or 0)
    # Compute the maps of all layers before the first figure, so that an error leaves no figures.
    maps: dict[int, LayerMaps] = {}
    for layer in layers:
        maps[layer] = layer_maps(model, torch.tensor([tokens]), layer)
        check_finite(maps[layer], run, step)
    labels = [visible(tokenizer.piece(token)) for token in tokens]
    variant = cfg.resolved.choices["attention"]
    drawn_layers = []
    for layer, layer_result in maps.items():
        _, n_heads, _, _ = layer_result.effective.shape
        heads = indices("head", args.head, n_heads, 0)
        heads_label = f"head {heads[0]}" if args.head != "all" else f"{n_heads} heads"
        title = f"{variant}, layer {layer}, {heads_label}"
        for name, values in layer_result.by_query.items():
            title += f", mean {name} {values[0, heads].mean():.3f}"
        note = model.layers[layer].attention.maps_note
        if note:
            title += f"\n{note}"
        figure = draw(layer_result, heads, labels, title)
        out = figure_path(args, run, layer, step)
        save_figure(figure, out)
        numbers = head_numbers(layer_result, heads)
        drawn_layers.append({"layer": layer, "figure": str(out), "heads": numbers})
        if not args.json:
            echo(f"{title}\n{heads_text(numbers)}\nfigure: {out}", flush=True)
    if args.json:
        echo_json({"step": step, "tokens": labels, "layers": drawn_layers})


def check_length(tokens: list[int], most: int) -> None:
    if not 0 < len(tokens) <= most:
        raise ConfigError(
            f"prompt has {len(tokens)} tokens, but must have 1 to {most} tokens; change the prompt"
        )


def check_finite(layer: "LayerMaps", run: Path, step: int) -> None:
    """Raise CheckpointError if an attention weight of the layer is not finite."""
    for weights in layer.maps.values():
        if not weights.isfinite().all():
            raise CheckpointError(
                f"run={run}: the attention weights of step {step} contain nan or infinity; choose "
                "an earlier checkpoint with step=N"
            )


def save_figure(figure: Any, out: Path) -> None:
    # Draw into memory, so that a failure leaves no partly written file.
    image = BytesIO()
    figure.savefig(image, format=out.suffix[1:].lower(), dpi=200)
    write_out(out, image.getvalue())


def indices(key: str, text: str, count: int, lowest: int) -> list[int]:
    """Convert `text`, the value of the argument `key`, to a list of indices.

    The text "all" gives all indices, 0 to `count` - 1. A number in this range gives one index. If
    `lowest` is -1, the number -1 gives the last index. Raises ConfigError for any other text.
    """
    if text == "all":
        return list(range(count))
    if not text.removeprefix("-").isdecimal() or not lowest <= int(text) < count:
        last = ", -1 for the last" if lowest < 0 else ""
        raise ConfigError(f"{key}={text} must be 0 to {count - 1}{last}, or all")
    return [int(text) % count]


def figure_path(args: AttentionMapArguments, run: Path, layer: int, step: int) -> Path:
    """Return the file for the figure of `layer`: args.out, or else a file in the directory `run`.

    If args.layer is "all", the layer number is added to the name of args.out. The name of a file in
    `run` contains layer, head and prompt. If args.step is set, the name also contains `step`.
    """
    if args.out:
        out = Path(args.out)
        if args.layer == "all":
            return out.with_name(f"{out.stem}-layer{layer:02d}{out.suffix}")
        return out
    name = f"attention-map-layer{layer:02d}"
    if args.head != "all":
        name += f"-head{args.head.zfill(2)}"
    if args.step is not None:
        name += f"-step{step}"
    words = re.sub(r"[^A-Za-z0-9]+", "-", args.prompt)
    # The cut to 24 characters can leave a new "-" at the end.
    words = words.strip("-")[:24].strip("-")
    if words:
        name += f"-{words}"
    # Prompts may have equal words, or none; the digest makes the name unique.
    prompt_bytes = args.prompt.encode(errors="surrogatepass")
    digest = hashlib.sha256(prompt_bytes).hexdigest()
    return run / f"{name}-{digest[:6]}.png"


def head_numbers(layer: "LayerMaps", heads: list[int]) -> list[dict[str, float]]:
    """Return the numbers of each head by name, such as "entropy of map 1"; NaN if undefined."""
    from diffllm.model.stats import entropy, negative_share

    first, *_ = layer.maps
    columns: dict[str, Tensor] = {}
    for name, values in layer.by_query.items():
        columns[f"{name} mean"] = values.mean(-1)
        columns["min"] = values.amin(-1)
        columns["max"] = values.amax(-1)
    # Skip the first query, which sees only the first token. A single token gives NaN.
    on_first_token = layer.effective[..., 1:, 0]
    columns["on first token"] = on_first_token.mean(-1)
    columns["negative share"] = negative_share(layer.effective).mean(-1)
    columns[f"entropy of {first}"] = entropy(layer.maps[first]).mean(-1)
    rows = []
    for head in heads:
        numbers: dict[str, float] = {"head": head}
        for name, values in columns.items():
            numbers[name] = float(values[0, head])
        rows.append(numbers)
    return rows


def heads_text(numbers: list[dict[str, float]]) -> str:
    heads = list(numbers[0])
    rows = []
    for head_row in numbers:
        head, *values = head_row.values()
        cells = [str(head)]
        for value in values:
            # "z" prints a rounded -0.000 as 0.000.
            cells.append(f"{value:z.3f}")
        rows.append(cells)
    table = str(Table.of(heads, rows, left=()))
    # Spaces before the dash keep the width of the column.
    table = table.replace("nan", "  -")
    return (
        f"{table}\n"
        "Means over queries. on first token: weight on that token; negative share: of the sum of "
        "|weights|; entropy: in nats, ln n for equal weights on n keys."
    )
