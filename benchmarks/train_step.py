"""A training step of ours against the transformers library's, alternating in one process.

    python benchmarks/train_step.py [shape] [--rounds 15] [--json benchmarks/results/NAME.json]

Forward, loss, backward, gradient clipping and fused AdamW. Ours is the trainer's own step: float32
master weights, float32 loss. Theirs is tried in three precisions (float32, bf16 autocast, bf16
weights), and the fastest of them then runs as it comes and compiled; ours is compared with both.
`--model dense_1p3b --seq 4096 --batch 4 --precisions "bf16 autocast"` is a size for a GPU. The
flags of a shape and what they are without are in shapes.py.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measuring import in_turns, run_alone, write
from shapes import add_shape, described, flops_per_token, shape_words
from steps import PRECISIONS, against, best_precision, ours, theirs

from diffllm.config import load_config


def main(device: torch.device) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    words = shape_words(args)
    results: dict[str, Any] = {}
    for attention, peer in (("standard", "Llama"), ("diff_v1", "DiffLlama")):
        cfg = load_config([f"attention={attention}", *words])
        precision = best_precision(peer, cfg, device, args.precisions)
        name = f"{peer}, {precision}"
        steps = {
            f"{attention}, {how}": ours(
                load_config([*words, f"attention={attention}", f"compile={how == 'compiled'}"]),
                device,
            )
            for how in ("eager", "compiled")
        }
        steps[name] = theirs(peer, cfg, precision, device)
        steps[f"{name}, compiled"] = theirs(peer, cfg, precision, device, compiled=True)
        times = in_turns(steps, args.rounds, device)
        tokens = cfg.global_batch_size * cfg.seq_len
        for best in (name, f"{name}, compiled"):
            compared = against(best, times, tokens, flops_per_token(cfg.model), device)
            results[f"{attention} against {best}"] = compared
        del steps
    if args.json:
        write(args.json, device, results, shape=described(cfg), rounds=args.rounds)


if __name__ == "__main__":
    run_alone(main)
