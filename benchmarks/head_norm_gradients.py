"""Whether a norm over each head's context magnifies gradients with the length of sequences.

    python benchmarks/head_norm_gradients.py [--json results/head_norm_gradients.json]

At initial values, DIFF V2 with and without V1's head norm, one backward pass over the same tokens:
the L2 norm of the gradients of all `wo`, as a ratio, over sequence lengths. The rule, fixed before
it ran: the slope of log ratio over log length, one a seed, is above 0 (one-sided t test over
seeds, alpha 0.05).
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

from diffllm import build_model, load_config
from diffllm.data import TokenStream, prepare
from diffllm.statistics.gaps import paired

LENGTHS = [2**n for n in range(7, 14)]
TOKENS = 8192
"""Tokens of a measurement: as many sequences as that takes."""
SEEDS = range(8)
WITH, WITHOUT = "diff_v2_head_norm", "diff_v2"
ALPHA = 0.05


def gradient_norm(variant: str, length: int, seed: int, stream: TokenStream) -> float:
    """L2 norm of the gradients of every layer's wo, at initial values."""
    cfg = load_config([f"attention={variant}", *overrides(length), f"seed={seed}"])
    model = build_model(cfg)
    window = torch.from_numpy(stream.tokens(seed * TOKENS, (seed + 1) * TOKENS + 1))
    rows = window[:-1].reshape(-1, length), window[1:].reshape(-1, length)
    inputs, targets = rows
    for at in range(len(inputs)):
        out = model(inputs[at : at + 1], targets[at : at + 1])
        (out.objective / TOKENS).backward()
    squares = [
        (param.grad.double() ** 2).sum().item()
        for name, param in model.named_parameters()
        if name.endswith("attention.wo.weight") and param.grad is not None
    ]
    return math.sqrt(sum(squares))


def overrides(length: int) -> list[str]:
    """The shape that is measured."""
    return ["model=micro", f"seq_len={length}", "steps=2"]


def main() -> None:
    """Measure, judge, print a table and the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    stream = prepare(load_config([*overrides(LENGTHS[0])]).data).split("train")
    logs = np.array(
        [
            [
                math.log(gradient_norm(WITH, n, s, stream) / gradient_norm(WITHOUT, n, s, stream))
                for n in LENGTHS
            ]
            for s in SEEDS
        ]
    )
    slopes = [float(np.polyfit(np.log(LENGTHS), row, 1)[0]) for row in logs]
    gap = paired(dict(zip(SEEDS, slopes, strict=True)), dict.fromkeys(SEEDS, 0.0))
    assert gap
    p = gap.p_above(0.0)
    assert p is not None
    assert gap.high is not None
    verdict = "shown" if p < ALPHA else "refuted" if gap.high < 0 else "underpowered"
    print("| tokens a sequence | ratio of gradient norms, mean of seeds | lowest | highest |")
    print("|---|---|---|---|")
    for n, column in zip(LENGTHS, logs.T, strict=True):
        ratios = np.exp(column)
        print(
            f"| {n:,} | {math.exp(column.mean()):.2f} | {ratios.min():.2f} | {ratios.max():.2f} |"
        )
    print(
        f"\n{verdict}: slope {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f}) of log ratio over "
        f"log length, {len(slopes)} seeds, one-sided p {p:.2g}"
    )
    if args.json:
        found = {
            "with": WITH, "without": WITHOUT, "model": "micro", "tokens": TOKENS,
            "lengths": LENGTHS, "log_ratios": logs.tolist(), "slopes": slopes,
            "slope": gap.mean, "slope_low": gap.low, "slope_high": gap.high, "p": p,
            "alpha": ALPHA, "verdict": verdict, "torch": torch.__version__,
        }  # fmt: skip
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
