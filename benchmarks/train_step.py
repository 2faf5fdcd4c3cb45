"""A training step of ours against the transformers library's, alternating in one process.

    python benchmarks/train_step.py [--rounds 15] [--json benchmarks/results/NAME.json]

6 layers, 256 wide, 8/4 heads, sequence 512, batch 8, vocabulary 8192; forward, loss, backward,
gradient clipping and fused AdamW. Ours is the trainer's own step: FSDP2 over one process, float32
master weights, float32 loss. Theirs runs in three precisions (float32, bf16 autocast, bf16
weights) and the fastest of them is what ours is compared with.
"""

import argparse
from pathlib import Path

import torch
from steps import PRECISIONS, against, fastest, in_turns, ours, run_alone, theirs, write

FFN = 768


def main(device: torch.device) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for attention, peer in (("standard", "Llama"), ("diff_v1", "DiffLlama")):
        shape = (f"attention={attention}", f"model.ffn_dim={FFN}")
        peers = {
            f"{peer}, {precision}": theirs(peer, precision, device, intermediate_size=FFN)
            for precision in PRECISIONS
        }
        steps = {
            f"{attention}, eager": ours(device, *shape, "compile=false"),
            f"{attention}, compiled": ours(device, *shape, "compile=true"),
            **peers,
        }
        times = in_turns(steps, args.rounds, device)
        results |= against(fastest(times, peers), times)
    if args.json:
        write(args.json, device, args.rounds, results)


if __name__ == "__main__":
    run_alone(main)
