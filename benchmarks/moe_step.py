"""A training step of our mixture of experts against the transformers library's Qwen3Moe.

    python benchmarks/moe_step.py [--rounds 15] [--json benchmarks/results/NAME.json]

6 layers, 256 wide, 8/4 heads, 16 experts of width 256, top 4, sequence 512, batch 8, vocabulary
8192; forward, loss, backward, gradient clipping and fused AdamW, all in turns in one process. Ours
is the trainer's own step: FSDP2 over one process, float32 master weights, float32 loss and router;
"looped" has one product an expert in place of grouped ones. Theirs has its default experts
implementation and the fastest of three precisions (float32, bf16 autocast, bf16 weights), found out
first, as it comes and compiled.
"""

import argparse
from pathlib import Path

import torch
from steps import PRECISIONS, Step, against, fastest, in_turns, ours, run_alone, theirs, write

from diffllm.model.ffn import experts

EXPERTS, TOP_K, WIDTH = 16, 4, 256
TRIES = 3
OURS = (
    "attention=standard",
    "model=moe_mini",
    "model.qk_norm=true",
    "model.moe.score=softmax",
    f"model.moe.n_experts={EXPERTS}",
    f"model.moe.top_k={TOP_K}",
    f"model.moe.expert_dim={WIDTH}",
)
THEIRS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
    "output_router_logits": False,
}


def looped(step: Step) -> Step:
    """`step` with one product an expert."""

    def run() -> None:
        grouped, experts.takes_groups = experts.takes_groups, lambda *_: False
        step()
        experts.takes_groups = grouped

    return run


def main(device: torch.device) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    precisions = {
        precision: theirs("Qwen3Moe", precision, device, **THEIRS) for precision in PRECISIONS
    }
    tried = in_turns(precisions, TRIES, device)
    precision = fastest(tried, PRECISIONS)
    results = {"Qwen3Moe by precision": against(precision, tried)}
    peer, compiled = f"Qwen3Moe, {precision}", f"Qwen3Moe, {precision}, compiled"
    eager = ours(device, *OURS, "compile=false")
    steps = {
        "grouped, eager": eager,
        "looped, eager": looped(eager),
        "grouped, compiled": ours(device, *OURS, "compile=true"),
        peer: precisions[precision],
        compiled: theirs("Qwen3Moe", precision, device, compile=True, **THEIRS),
    }
    times = in_turns(steps, args.rounds, device)
    results |= {f"against {name}": against(name, times) for name in (peer, compiled)}
    if args.json:
        write(args.json, device, args.rounds, results)


if __name__ == "__main__":
    run_alone(main)
