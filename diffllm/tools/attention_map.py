"""diffllm attention-map run=<dir> prompt="...": what the heads of a trained run attend to."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from diffllm.analysis.attention_map_figure import draw
from diffllm.analysis.maps import LayerMaps, layer_maps
from diffllm.analysis.token_labels import visible
from diffllm.config.saved import load_run_config
from diffllm.data import Tokenizer
from diffllm.errors import CheckpointError, ConfigError
from diffllm.model.probes import entropy, negative_share
from diffllm.run.model import load_model
from diffllm.tools.arguments import parse, plugins_field

MOST_TOKENS = 256
"""Beyond this neither labels nor cells could be told apart."""
FORMATS = (".png", ".pdf", ".svg")


@dataclass
class Arguments:
    """The arguments of `diffllm attention-map`."""

    run: str = field(metadata={"help": "run directory"})
    prompt: str = field(metadata={"help": "text to read, taken verbatim"})
    layer: int = field(default=-1, metadata={"help": "from 0; -1 is the last"})
    head: str = field(default="all", metadata={"help": "from 0, or all"})
    step: int = field(default=0, metadata={"help": "checkpoint; 0 is the newest"})
    out: str = field(
        default="", metadata={"help": "figure, .png, .pdf or .svg; empty: in the run directory"}
    )
    plugins: str = plugins_field()


def main(argv: list[str]) -> None:
    """Write the figure; print a line a head and where the figure is."""
    args = parse(Arguments, argv, 'diffllm attention-map run=<dir> prompt="def "')
    run = Path(args.run)
    cfg = load_run_config(run)
    layer = layer_index(args.layer, cfg.model.n_layers)
    tokenizer = Tokenizer.from_file(run / "tokenizer.model")
    tokens = prompt_tokens(tokenizer, args.prompt, cfg.model.seq_len)
    out = figure_path(args, run, layer)
    model, _ = load_model(run, args.step)
    shown = layer_maps(model, torch.tensor([tokens]), layer)
    if not all(m.isfinite().all() for m in shown.maps.values()):
        raise CheckpointError(f"layer {layer} of {run} gives weights that are not finite numbers")
    heads = head_indices(args.head, shown.effective.shape[1])
    which = f"head {heads[0]}" if args.head != "all" else f"{len(heads)} heads"
    title = f"{cfg.run.choices['attention']}, layer {layer}, {which}"
    for name, values in shown.by_query.items():
        title += f", mean {name} {values[0, heads].mean():.3f}"
    note = model.layers[layer].attention.maps_note
    title += f"\n{note}" if note else ""
    figure = draw(shown, heads, [visible(tokenizer.piece(token)) for token in tokens], title)
    try:
        figure.savefig(out, dpi=200)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}") from None
    print(f"{title}\n{table(shown, heads)}\nfigure: {out}")


def layer_index(layer: int, n_layers: int) -> int:
    """From 0; raises ConfigError for a layer that the run does not have."""
    if not -1 <= layer < n_layers:
        raise ConfigError(f"layer={layer}: this run has layers 0 to {n_layers - 1} (-1: the last)")
    return layer % n_layers


def head_indices(head: str, n_heads: int) -> list[int]:
    """One or all; raises ConfigError for a head that the variant does not have."""
    if head == "all":
        return list(range(n_heads))
    if not head.isdecimal() or int(head) >= n_heads:
        raise ConfigError(f"head={head}: this run has heads 0 to {n_heads - 1}, or all")
    return [int(head)]


def prompt_tokens(tokenizer: Tokenizer, prompt: str, seq_len: int) -> list[int]:
    """Token ids; raises ConfigError where there are none or too many."""
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise ConfigError("prompt= is empty: there is nothing to attend to")
    if len(tokens) > seq_len:
        raise ConfigError(f"the prompt has {len(tokens)} tokens, but the model reads {seq_len}")
    if len(tokens) > MOST_TOKENS:
        raise ConfigError(f"the prompt has {len(tokens)} tokens; a figure holds {MOST_TOKENS}")
    return tokens


def figure_path(args: Arguments, run: Path, layer: int) -> Path:
    """Where the figure goes; raises ConfigError for a format that is none of ours."""
    head = "" if args.head == "all" else f"-head{args.head.zfill(2)}"
    out = Path(args.out or run / f"attention-map-layer{layer:02d}{head}.png").expanduser()
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"out={out} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    return out


def table(shown: LayerMaps, heads: list[int]) -> str:
    """A line a head: lambda, gate or sink, and where the weight goes."""
    first, *_ = shown.maps
    columns: dict[str, torch.Tensor] = {}
    for name, values in shown.by_query.items():
        columns |= {f"{name} mean": values.mean(-1), "min": values.amin(-1), "max": values.amax(-1)}
    # of the queries that could look elsewhere; a single token has none
    columns["on first token"] = shown.effective[..., 1:, 0].mean(-1)
    columns["negative share"] = negative_share(shown.effective).mean(-1)
    columns[f"entropy of {first}"] = entropy(shown.maps[first]).mean(-1)
    lines = ["head  " + "  ".join(f"{name:>6}" for name in columns)]
    for head in heads:
        cells = ((float(values[0, head]), max(len(name), 6)) for name, values in columns.items())
        lines.append(f"{head:>4}  " + "  ".join(f"{x:z{width}.3f}" for x, width in cells))
    return "\n".join(lines).replace("nan", "  -")
