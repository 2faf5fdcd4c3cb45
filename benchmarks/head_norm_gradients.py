"""Whether V1's head norm magnifies gradients as sequences get longer.

    python benchmarks/head_norm_gradients.py [--json results/head_norm_gradients_rerun.json]

Initial values, one backward pass over the same tokens with standard attention, DIFF V2, and DIFF V2
with V1's head norm. The script measures two L2 norms per seed and sequence length: the gradients of
all `wo`, and all gradients together.

The rule was fixed before its first run. It concerns `wo` alone: per seed, fit a line to the log of
the ratio (V2 with head norm over V2) against the log of the length. The rule is shown if the slope
is above 0 (one-sided t test over seeds, alpha 0.05). The verdict comes from that first
run, results/head_norm_gradients.json. The ratios to standard attention were added later and have no
rule.
"""

import argparse
import json
import math
import platform
from pathlib import Path

import numpy as np
import torch

from diffllm import build_model, load_config
from diffllm.data import TokenStream, prepare
from diffllm.statistics.gaps import paired

LENGTHS = [2**n for n in range(7, 14)]
TOKENS = 8192
"""Tokens per measurement, divided into sequences."""
SEEDS = range(8)
STANDARD, WITHOUT, WITH = "standard", "diff_v2", "diff_v2_head_norm"
VARIANTS = [STANDARD, WITHOUT, WITH]
GROUPS = {"wo": "attention.wo.weight", "all": ""}
"""Groups of parameters by the end of their names."""
ALPHA = 0.05


def gradient_norms(variant: str, length: int, seed: int, stream: TokenStream) -> list[float]:
    """Return the L2 norm of the gradients of each group at initial values."""
    cfg = load_config([f"attention={variant}", *overrides(length), f"seed={seed}"])
    model = build_model(cfg)
    window = torch.from_numpy(stream.tokens(seed * TOKENS, (seed + 1) * TOKENS + 1))
    inputs, targets = window[:-1].reshape(-1, length), window[1:].reshape(-1, length)
    for at in range(len(inputs)):
        out = model(inputs[at : at + 1], targets[at : at + 1])
        (out.objective / TOKENS).backward()
    squares = {
        name: (param.grad.double() ** 2).sum().item()
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return [
        math.sqrt(sum(square for name, square in squares.items() if name.endswith(end)))
        for end in GROUPS.values()
    ]


def overrides(length: int) -> list[str]:
    """Return the overrides that give the measured shape."""
    return ["model=micro", f"seq_len={length}", "steps=2"]


def main() -> None:
    """Measure, apply the rule, print a table and the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = prepare(load_config([*overrides(LENGTHS[0])]).data)
    stream = data.split("train")
    norms = np.array(  # variants, seeds, lengths, groups
        [[[gradient_norms(v, n, s, stream) for n in LENGTHS] for s in SEEDS] for v in VARIANTS]
    )
    standard, without, with_norm = np.log(norms)
    logs = with_norm[..., 0] - without[..., 0]
    slopes = [float(np.polyfit(np.log(LENGTHS), row, 1)[0]) for row in logs]
    gap = paired(dict(zip(SEEDS, slopes, strict=True)), dict.fromkeys(SEEDS, 0.0))
    assert gap
    p = gap.p_above(0.0)
    assert p is not None
    assert gap.high is not None
    verdict = "shown" if p < ALPHA else "refuted" if gap.high < 0 else "underpowered"
    print("Ratios of gradient norms, geometric means over seeds\n")
    print("| tokens per sequence | wo: over V2 | wo: over standard | all: over standard |")
    print("|---|---|---|---|")
    columns = [logs, *np.moveaxis(with_norm - standard, -1, 0)]
    for n, means in zip(LENGTHS, np.exp([each.mean(0) for each in columns]).T, strict=True):
        print(f"| {n:,} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
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
            "python": platform.python_version(), "corpus": data.manifest.corpus,
            "tokenizer": data.manifest.pieces_hash,
            "norms": {
                variant: {group: of[..., i].tolist() for i, group in enumerate(GROUPS)}
                for variant, of in zip(VARIANTS, norms, strict=True)
            },
        }  # fmt: skip
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
