"""Gradients by matrix and sequence length, with and without a norm per head.

    python train.py -m attention=standard,diff_v1,diff_v1_no_head_norm,diff_v2,diff_v2_head_norm \
        seed=0,1,2,3 data=packages model=micro steps=1000 seq_len=1024 global_batch_size=1 \
        eval.interval=1000 eval.tokens=1e5 checkpoint.interval=100 checkpoint.keep_every=100 \
        wandb.mode=disabled run.sweep=gradients
    python benchmarks/gradients.py outputs/gradients [--json results/gradients.json]

The runs train on sequences of 1,024 tokens. At the initial values, after 100 steps and after 1,000
steps, the script computes the gradients of one batch of 8,192 held-out tokens, divided into
sequences of 128 to 4,096 tokens. Lengths above 1,024 lie beyond the trained length.

Rules, fixed before the runs: for each of the three steps and for V1 and V2, fit a line per seed to
the log of the ratio of `wo`'s gradient norms (with over without head norm) against the log of the
length. "The head norm raises gradients more for longer sequences" is shown if the slope is above 0,
and refuted if it is below 0 (one-sided t tests over seeds, alpha 0.05, Holm's correction over the
six rules).
"""

import argparse
import json
import math
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from diffllm import build_model, load_config, load_model
from diffllm.config.saved import load_run_config
from diffllm.data.streams import TokenStream
from diffllm.evaluation.load import own_data
from diffllm.statistics.gap_tests import holm

STEPS = (0, 100, 1000)
LENGTHS = [2**n for n in range(7, 13)]
TOKENS = 8192
"""Tokens per measurement, divided into sequences."""
SEEDS = range(4)
VARIANTS = ["standard", "diff_v1", "diff_v1_no_head_norm", "diff_v2", "diff_v2_head_norm"]
PAIRS = {"V1": ("diff_v1", "diff_v1_no_head_norm"), "V2": ("diff_v2_head_norm", "diff_v2")}
"""Variants with and without head norm."""
MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "all")
ALPHA = 0.05


def gradient_norms(run: Path, step: int, length: int, stream: TokenStream) -> list[float]:
    """Return the L2 norm over layers of each entry of MATRICES; "all" means all parameters."""
    cfg = load_run_config(run)
    words = [f"attention={cfg.resolved.choices['attention']}", "model=micro", f"seed={cfg.seed}"]
    model = build_model(load_config([*words, f"seq_len={length}", "steps=2"]))
    if step:
        model.load_state_dict(load_model(run, step)[0].state_dict(), strict=False)
    window = torch.from_numpy(stream.tokens(cfg.seed * TOKENS, (cfg.seed + 1) * TOKENS + 1))
    inputs, targets = window[:-1].reshape(-1, length), window[1:].reshape(-1, length)
    for at in range(len(inputs)):
        out = model.loss(inputs[at : at + 1], targets[at : at + 1])
        (out.objective / TOKENS).backward()
    squares = dict.fromkeys(MATRICES, 0.0)
    for name, param in model.named_parameters():
        if param.grad is not None:
            square, matrix = (param.grad.double() ** 2).sum().item(), name.split(".")[-2]
            squares["all"] += square
            if matrix in squares:
                squares[matrix] += square
    return [math.sqrt(square) for square in squares.values()]


def judge(logs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Apply the rules to log ratios of `wo` (steps, seeds, lengths) for each entry of PAIRS."""
    found = []
    for pair, by_step in logs.items():
        for step, rows in zip(STEPS, by_step, strict=True):
            slopes = [float(np.polyfit(np.log(LENGTHS), row, 1)[0]) for row in rows]
            low, high = stats.t.interval(0.95, len(slopes) - 1, np.mean(slopes), stats.sem(slopes))
            p = float(stats.ttest_1samp(slopes, 0, alternative="greater").pvalue)
            found.append(
                {"pair": pair, "step": step, "slopes": slopes, "slope": float(np.mean(slopes)),
                 "slope_low": float(low), "slope_high": float(high), "p": p}
            )  # fmt: skip
    above, below = (holm(p) for p in ([r["p"] for r in found], [1 - r["p"] for r in found]))
    for rule, shown, refuted in zip(found, above, below, strict=True):
        verdict = "shown" if shown < ALPHA else "refuted" if refuted < ALPHA else "underpowered"
        rule |= {"p_adjusted": shown, "verdict": verdict}
    return found


def main() -> None:
    """Measure, apply the rules, and print tables and verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    first = args.sweep / f"{VARIANTS[0]}-seed0"
    if not first.is_dir():
        parser.error(f"{args.sweep} does not contain {first.name}; train the runs first (--help)")
    data = own_data(first, load_run_config(first))
    stream = data.split("heldout")
    norms = {
        variant: np.array(  # steps, seeds, lengths, matrices
            [
                [
                    [gradient_norms(args.sweep / f"{variant}-seed{seed}", step, n, stream)
                     for n in LENGTHS]
                    for seed in SEEDS
                ]
                for step in STEPS
            ]
        )
        for variant in VARIANTS
    }  # fmt: skip
    ratios = {pair: np.log(norms[a] / norms[b]) for pair, (a, b) in PAIRS.items()}
    rules = judge({pair: of[..., MATRICES.index("wo")] for pair, of in ratios.items()})
    print("Gradient norms with head norm over without, geometric means over seeds\n")
    print("| pair | step | length |", " | ".join(MATRICES), "|")
    print("|---" * (3 + len(MATRICES)) + "|")
    for pair, of in ratios.items():
        for step, means in zip(STEPS, np.exp(of.mean(1)), strict=True):
            for length, row in zip(LENGTHS, means, strict=True):
                cells = " | ".join(f"{value:.2f}" for value in row)
                print(f"| {pair} | {step:,} | {length:,} | {cells} |")
    for rule in rules:
        ends = f"({rule['slope_low']:+.3f} to {rule['slope_high']:+.3f})"
        print(
            f"{rule['pair']}, step {rule['step']:,}: {rule['verdict']}, slope {rule['slope']:+.3f} "
            f"{ends}, adjusted p {rule['p_adjusted']:.2g}"
        )
    if args.json:
        found = {
            "model": "micro", "tokens": TOKENS, "steps": STEPS, "lengths": LENGTHS,
            "seeds": list(SEEDS), "matrices": MATRICES, "alpha": ALPHA, "rules": rules,
            "torch": torch.__version__, "python": platform.python_version(),
            "corpus": data.manifest.corpus, "tokenizer": data.manifest.pieces_hash,
            "norms": {variant: of.tolist() for variant, of in norms.items()},
        }  # fmt: skip
        args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
