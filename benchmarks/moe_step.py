"""A training step of our mixture of experts against the transformers library's Qwen3Moe.

    python benchmarks/moe_step.py [shape] [--rounds 15] [--json benchmarks/results/NAME.json]

Forward, loss, backward, gradient clipping and fused AdamW, all in turns in one process. Ours is the
trainer's own step: float32 master weights, float32 loss and router; "looped" has one product an
expert in place of grouped ones. Theirs has its default experts implementation and the fastest of
three precisions (float32, bf16 autocast, bf16 weights), found out first, as it comes and compiled.
Without flags 16 experts of width 256, top 4, in the shape of shapes.py.
"""

import argparse
from pathlib import Path

import torch
from measuring import Step, in_turns, run_alone, write
from shapes import SMALL, add_shape, described, flops_per_token, shape_words
from steps import PRECISIONS, against, best_precision, ours, theirs

from diffllm.config import load_config
from diffllm.model.ffn import experts

PEER = "Qwen3Moe"
MIXTURE = {**SMALL, "experts": 16, "top_k": 4, "expert_dim": 256}
AS_THE_PEER = ["attention=standard", "model.qk_norm=true", "model.moe.score=softmax"]


def looped(step: Step) -> Step:
    """`step` with one product an expert."""

    def run() -> None:
        grouped, experts.takes_groups = experts.takes_groups, lambda *_: False
        step()
        experts.takes_groups = grouped

    return run


def main(device: torch.device) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    words = [*AS_THE_PEER, *shape_words(args, "moe_mini", MIXTURE)]
    cfg = load_config(words)
    precision = best_precision(PEER, cfg, device, args.precisions)
    peer, compiled = f"{PEER}, {precision}", f"{PEER}, {precision}, compiled"
    eager = ours(load_config([*words, "compile=false"]), device)
    steps = {
        "grouped, eager": eager,
        "looped, eager": looped(eager),
        "grouped, compiled": ours(load_config([*words, "compile=true"]), device),
        peer: theirs(PEER, cfg, precision, device),
        compiled: theirs(PEER, cfg, precision, device, compiled=True),
    }
    times = in_turns(steps, args.rounds, device)
    tokens, flops = cfg.global_batch_size * cfg.seq_len, flops_per_token(cfg.model)
    results = {
        f"against {name}": against(name, times, tokens, flops, device) for name in (peer, compiled)
    }
    if args.json:
        write(args.json, device, results, shape=described(cfg), rounds=args.rounds)


if __name__ == "__main__":
    run_alone(main)
