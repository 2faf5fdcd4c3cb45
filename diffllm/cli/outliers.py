"""diffllm outliers run=<dir>: measure outliers and attention sinks of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.cli.arguments import RunArguments, argument, parse
from diffllm.core.printing import Table, echo, echo_json
from diffllm.evaluation import TOKENS

OUTLIERS_USAGE = """\
diffllm outliers run=<dir> [key=value ...]: measure outliers and attention sinks per layer

Reads the first sequences of the run's held-out split once, in float32. The tables contain:
- hidden states (layer outputs): largest magnitudes, percentiles of magnitudes, kurtosis
- logits of each attention map before the softmax: the same statistics
- first visible token of a query: signed weight in each map, and the share of |weight|
- context: RMS, and RMS divided by the RMS of the values

diffllm outliers run=outputs/mine step=400 tokens=65536 --json"""
SINK_HEADS = (
    "map", "weight", "of |weight|", "context RMS", "over values' RMS", "smallest", "largest"
)  # fmt: skip
READING = """\
Top-k and percentiles: of |value|, percentiles within 0.1%. Kurtosis: of all values together, 3 for
a normal distribution. Over channels: kurtosis of one token, mean over tokens. Channel: of top-1.
Logits: q k / sqrt(d) for the visible keys of a query. Weights on the first token: means over heads,
sequences, and queries that see two or more tokens."""


@dataclass
class OutliersArguments(RunArguments):
    step: int = argument("step of the checkpoint; 0: the newest complete checkpoint", 0)
    tokens: int = argument(
        "tokens to read, in whole sequences; at most the held-out split", TOKENS, least=1
    )


def outliers_command(argv: list[str]) -> None:
    args = parse(OutliersArguments, argv, OUTLIERS_USAGE)
    import torch

    from diffllm.config.saved import load_run_config
    from diffllm.evaluation.load import decoder, first_sequences, sequences_for
    from diffllm.evaluation.outliers import measure_outliers

    run = Path(args.run)
    cfg = load_run_config(run)
    model, step = decoder(run, args.step)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    requested = sequences_for(args.tokens, cfg.seq_len)
    sequences = first_sequences(run, cfg, requested, device)
    # A short held-out split has fewer sequences than requested.
    count = len(sequences)
    layers = measure_outliers(model.to(device), sequences, name=f"{run}, step {step}")
    content = {
        "run": str(run),
        "variant": cfg.resolved.choices["attention"],
        "step": step,
        "sequences": count,
        "tokens": count * cfg.seq_len,
        "percentiles": "of magnitudes, from a histogram: within 0.1%",
        "layers": [{"layer": i, **numbers} for i, numbers in enumerate(layers)],
    }
    if args.json:
        echo_json(content)
    else:
        print_outliers(content)


def print_outliers(content: dict[str, Any]) -> None:
    from diffllm.evaluation.outliers import TOP

    keys_by_head = {f"top-{k}": f"top_{k}" for k in TOP}
    keys_by_head |= {name: name for name in ("median", "p99", "p99.9", "rms", "kurtosis")}
    run, variant, step = content["run"], content["variant"], content["step"]
    tokens, sequences = content["tokens"], content["sequences"]
    text = f"{tokens:,} held-out tokens ({sequences} sequences), float32"
    echo(f"{run}: {variant}, step {step}, the first {text}")
    hidden_rows = []
    logit_rows = []
    sink_rows = []
    for layer in content["layers"]:
        number = str(layer["layer"])
        states = layer["hidden"]
        sizes = [cell(states[key]) for key in keys_by_head.values()]
        kurtosis = cell(states["kurtosis_over_channels"])
        channel = str(states["top_1_channel"])
        hidden_rows.append([number, *sizes, kurtosis, channel])
        for map_name, map_logits in layer["logits"].items():
            sizes = [cell(map_logits[key]) for key in keys_by_head.values()]
            logit_rows.append([number, map_name, *sizes])
        sink_rows += layer_sink_rows(number, layer)
    tables = (
        ("Hidden states, magnitudes", [*keys_by_head, "over channels", "channel"], hidden_rows),
        ("Attention logits, magnitudes", ["map", *keys_by_head], logit_rows),
        ("First token, and context", SINK_HEADS, sink_rows),
    )
    for title, heads, rows in tables:
        table = Table.of(["layer", *heads], rows)
        echo(f"\n{title}\n{table}")
    echo(f"\n{READING}")


def layer_sink_rows(number: str, layer: dict[str, Any]) -> list[list[str]]:
    """Return a row per attention map: weight and share of the first token, and the context."""
    ratio = layer["context_over_value_rms"]
    context = [
        cell(layer["context_rms"]),
        cell(ratio["mean"]),
        cell(ratio["min"]),
        cell(ratio["max"]),
    ]
    rows = []
    for map_name, sink in layer["sinks"].items():
        weight = cell(sink["weight"])
        share = cell(sink["share"])
        rows.append([number, map_name, weight, share, *context])
        # The context belongs to the layer, so only the row of the first map shows it.
        context = [""] * len(context)
    return rows


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
