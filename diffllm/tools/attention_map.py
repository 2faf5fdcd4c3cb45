"""diffllm attention-map run=<dir> prompt="...": what the heads of a trained run look at."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from diffllm.data import Tokenizer
from diffllm.errors import ConfigError
from diffllm.maps import LayerMaps, layer_maps
from diffllm.run_directory import load_run_config
from diffllm.tools.arguments import parse
from diffllm.tools.generate import load_model

LONGEST = 256
"""Tokens beyond which neither labels nor cells could be told apart."""


@dataclass
class Arguments:
    """What `diffllm attention-map` takes."""

    run: str = field(metadata={"help": "run directory"})
    prompt: str = field(metadata={"help": "text to read, taken verbatim"})
    layer: int = field(default=-1, metadata={"help": "from 0; -1 is the last"})
    head: str = field(default="all", metadata={"help": "from 0, or all"})
    step: int = field(default=0, metadata={"help": "checkpoint; 0 is the newest"})
    out: str = field(default="", metadata={"help": "PNG; empty: in the run directory"})


def main(argv: list[str]) -> None:
    """Draw the figure, print where it is and a line a head."""
    args = parse(Arguments, argv, 'diffllm attention-map run=<dir> prompt="..."')
    run = Path(args.run)
    cfg = load_run_config(run)
    layer = in_range(
        "layer",
        args.layer % cfg.model.n_layers if args.layer == -1 else args.layer,
        cfg.model.n_layers,
    )
    tokenizer = Tokenizer.from_file(run / "tokenizer.model")
    tokens = tokenizer.encode(args.prompt)
    longest = min(LONGEST, cfg.model.seq_len)
    if not 1 <= len(tokens) <= longest:
        raise ConfigError(f"the prompt has {len(tokens)} tokens; a figure takes 1 to {longest}")
    model = load_model(run, args.step).eval()
    shown = layer_maps(model, torch.tensor(tokens), layer)
    n_heads = shown.effective.shape[0]
    heads = list(range(n_heads))
    if args.head != "all":
        if not args.head.isdecimal():
            raise ConfigError(f"head={args.head} is neither a number nor all")
        heads = [in_range("head", int(args.head), n_heads)]
    variant = cfg.run.choices["attention"]
    out = Path(args.out).expanduser() if args.out else run / default_name(layer, args.head)
    save(
        shown, heads, [tokenizer.piece(token) for token in tokens], f"{variant}, layer {layer}", out
    )
    print(table(shown, heads))
    print(f"figure: {out}")


def in_range(name: str, value: int, count: int) -> int:
    """`value`, or a ConfigError that says what there is."""
    if not 0 <= value < count:
        raise ConfigError(f"{name}={value} does not exist: this run has 0 to {count - 1}")
    return value


def default_name(layer: int, head: str) -> str:
    """The figure's file name in the run directory."""
    return f"attention-map-layer{layer:02d}" + (f"-head{head}" if head != "all" else "") + ".png"


def save(shown: LayerMaps, heads: list[int], pieces: list[str], title: str, out: Path) -> None:
    """Write the PNG; raises ConfigError where it cannot be written."""
    from diffllm.tools.attention_map_figure import figure, visible_piece

    try:
        figure(shown, heads, [visible_piece(piece) for piece in pieces], title).savefig(
            out, dpi=200, format="png"
        )
    except OSError as error:
        raise ConfigError(f"out={out}: {error.strerror}") from error


def table(shown: LayerMaps, heads: list[int]) -> str:
    """A line a head: lambda or gate, and where the weight goes."""
    first = next(iter(shown.maps.values()))
    entropy = torch.special.entr(first).sum(-1).mean(-1)
    weight = shown.effective
    negative = weight.clamp_max(0).abs().sum((-2, -1)) / weight.abs().sum((-2, -1)).clamp_min(1e-30)
    columns: dict[str, Tensor] = {}
    if shown.strength is not None:
        name = shown.strength_name
        columns[f"{name} mean"] = shown.strength.mean(-1)
        columns["min"], columns["max"] = shown.strength.amin(-1), shown.strength.amax(-1)
    columns["on first token"] = weight[:, :, 0].mean(-1)
    columns["negative share"] = negative
    columns[f"entropy of {next(iter(shown.maps))}"] = entropy
    lines = ["head" + "".join(f"{name:>{len(name) + 3}}" for name in columns)]
    for head in heads:
        cells = (f"{value[head]:>{len(name) + 3}.3f}" for name, value in columns.items())
        lines.append(f"{head:>4}" + "".join(cells))
    return "\n".join(lines)
