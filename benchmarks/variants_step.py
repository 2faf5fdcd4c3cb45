"""A training step of every main variant over standard's: time, FLOPs, and what is between them.

    python benchmarks/variants_step.py [shape] [--seqs 256 ... 4096] [--rounds 8] [--json FILE]

For every sequence length the variants alternate in one process, at equal heads (only `attention=`
changes) and at equal parameters (`model.match_params_to=diff_v2`). A step has about the same number
of tokens at every length. The ratio of times is paired by round; its quotient with the ratio of
training FLOPs a token is how well a variant's FLOPs run beside standard's: 1 is as well, less is
overhead that FLOPs do not explain.

On a GPU everything is compiled; on a CPU the lengths of --compiled are, and the rest is eager, to
end within minutes. The flags of a shape are in shapes.py; --seq and --batch are set by --seqs and
--tokens here.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from measuring import cells, in_turns, markdown, ratios, run_alone, with_quartiles, write
from shapes import VARIANTS, add_shape, described, flops_per_token, positive, shape_words
from steps import ours

from diffllm.config import TrainConfig, load_config

ARMS = {"heads": [], "parameters": ["model.match_params_to=diff_v2"]}
COLUMNS = (
    "tokens a sequence", "equal", "", "attention", "ms a step", "time (quartiles)", "FLOPs",
    "FLOPs over time",
)  # fmt: skip


def main(device: torch.device) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--seqs", type=positive, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--tokens", type=positive, default=4096, help="of a step, about")
    parser.add_argument("--compiled", type=int, nargs="*", default=[256], help="lengths, on a CPU")
    parser.add_argument("--equal", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, rows = [], []
    for seq in args.seqs:
        args.seq, args.batch = seq, max(1, args.tokens // seq)
        compiled = device.type == "cuda" or seq in args.compiled
        for equal in args.equal:
            words = [*shape_words(args), *ARMS[equal], f"compile={compiled}"]
            cfgs = {v: load_config([f"attention={v}", *words]) for v in VARIANTS}
            how = "compiled" if compiled else "eager"
            for name, result in compared(cfgs, args.rounds, device).items():
                results.append({"seq": seq, "equal": equal, "how": how, "attention": name} | result)
                rows.append(row(results[-1]))
                print(cells(rows[-1]), flush=True)
    shape = described(load_config(shape_words(args)))
    print(f"\n{shape}, or as many in shorter sequences\n\n{markdown(COLUMNS, rows)}")
    if args.json:
        write(args.json, device, results, shape=shape, rounds=args.rounds)


def compared(
    cfgs: dict[str, TrainConfig], rounds: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Each variant's time and FLOPs over standard's, and the quotient of these ratios."""
    torch._dynamo.reset()
    steps = {name: ours(cfg, device) for name, cfg in cfgs.items()}
    times = in_turns(steps, rounds, device)
    flops = {name: flops_per_token(cfg.model).causal for name, cfg in cfgs.items()}
    results = {}
    for name in cfgs:
        time = ratios(times[name], times["standard"])
        work = flops[name] / flops["standard"]
        results[name] = {
            "ms": 1e3 * statistics.median(times[name]),
            "time": time,
            "flops": work,
            "efficiency": work / time["median"],
        }
    return results


def row(result: dict[str, Any]) -> list[str]:
    """The cells of a result."""
    return [
        f"{result['seq']:,}",
        result["equal"],
        result["how"],
        f"`{result['attention']}`",
        f"{result['ms']:,.0f}",
        with_quartiles(result["time"]),
        f"{result['flops']:.2f}",
        f"{result['efficiency']:.2f}",
    ]


if __name__ == "__main__":
    run_alone(main)
