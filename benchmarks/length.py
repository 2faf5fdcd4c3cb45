"""Training speed and kept memory against sequence length, on a CPU.

    python benchmarks/length.py --out benchmarks/results/length_cpu.json

Speed: one step of 16,384 tokens, in sequences of 1,024 to 16,384 tokens, with whole sequences and
with masked documents of 500 tokens on average. All steps are repeated in a new random order in each
round. Results are ratios to the step with 1,024 tokens of the same round. The ratios of FLOPs per
token are listed next to them.

Memory: bytes that the forward pass keeps per token, from the events of torch's allocator, with each
policy of activation checkpointing, next to the figure of `diffllm plan`; and the time of a step.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness.machine import Step, facts, join_alone, seconds
from harness.steps import DOCUMENT_END, build_step, micro_batches
from torch.profiler import ProfilerActivity, profile

from diffllm import load_config
from diffllm.model import without_storage
from diffllm.model.attention.masks import Documents
from diffllm.plan.simulate import simulate
from diffllm.training.build import build

TOKENS = 16_384
LENGTHS = [1024, 2048, 4096, 8192, 16_384]
VARIANTS = ["standard", "diff_v1", "diff_v2"]
DOCUMENTS = {"whole": None, "documents": 500}
"""Mean length of documents by the name of the mask; None for whole sequences."""
POLICIES = ["none", "selective", "full"]
LONG = 4096
"""Sequence length of the measurement of checkpointing policies."""
CPU = torch.device("cpu")


def words(variant: str, length: int, *more: str) -> list[str]:
    return [
        "model=micro", f"attention={variant}", f"seq_len={length}", "steps=10", "precision=fp32",
        f"global_batch_size={TOKENS // length}", "micro_batch_size=1", "compile=false", *more,
    ]  # fmt: skip


def flops(variant: str, length: int, mask: str) -> float:
    """Return training FLOPs per token; with documents, from the visible keys of one batch."""
    cfg = load_config(words(variant, length))
    visible = None
    if document_length := DOCUMENTS[mask]:
        torch.manual_seed(0)
        batches = micro_batches(cfg, CPU, document_length)
        pairs = sum(int(Documents.of(x, DOCUMENT_END).visible_keys()) for x, _ in batches)
        visible = pairs / TOKENS
    return without_storage(cfg.model).flops_per_token(visible)


def speed(rounds: int) -> dict[str, Any]:
    """Return ratios to sequences of LENGTHS[0] tokens: of tokens per second, and of FLOPs."""

    @cache
    def step_of(variant: str, length: int, mask: str) -> Step:
        step = build_step(CPU, words(variant, length), document_length=DOCUMENTS[mask])[1]
        step()
        return step

    times: dict[tuple[str, int, str], list[float]] = {}
    keys = [(v, length, mask) for v in VARIANTS for length in LENGTHS for mask in DOCUMENTS]
    for round_ in range(rounds):
        for key in random.Random(round_).sample(keys, len(keys)):
            times.setdefault(key, []).append(seconds(step_of(*key), CPU))
            print(key, f"{times[key][-1]:.2f} s", flush=True)
    found: dict[str, Any] = {}
    for variant, length, mask in keys:
        base = times[variant, LENGTHS[0], mask]
        ratios = [b / own for own, b in zip(times[variant, length, mask], base, strict=True)]
        found.setdefault(mask, {}).setdefault(variant, {})[length] = {
            "speed": [statistics.median(ratios), min(ratios), max(ratios)],
            "flops": flops(variant, length, mask) / flops(variant, LENGTHS[0], mask),
            "tokens_per_s": TOKENS / statistics.median(times[variant, length, mask]),
        }
    return found


def with_policy(variant: str, name: str) -> list[str]:
    return words(variant, LONG, f"activation_checkpointing={name}")


def kept_per_token(overrides: list[str], documents: int | None = None) -> float:
    """Return the bytes that one forward pass keeps for the backward pass, per token."""
    cfg = load_config(overrides)
    t = build(cfg, CPU, DOCUMENT_END if documents else None)
    (x, y), *_ = micro_batches(cfg, CPU, documents)
    of_batch = t.documents and t.documents(x)
    kept = t.model.loss(x, y, of_batch)  # allocates buffers that later passes reuse
    del kept
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = t.model.loss(x, y, of_batch)
    assert kept is not None
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages()) / cfg.seq_len


def policies(rounds: int, planned: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return kept bytes, planned bytes and time of a step of each checkpointing policy.

    `planned` contains the bytes that a planned forward pass keeps, by variant and policy.
    """
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        steps = {name: build_step(CPU, with_policy(variant, name))[1] for name in POLICIES}
        for step in steps.values():
            step()
        times: dict[str, list[float]] = {name: [] for name in POLICIES}
        for round_ in range(rounds):
            for name in random.Random(round_).sample(POLICIES, len(POLICIES)):
                times[name].append(seconds(steps[name], CPU))
        for name in POLICIES:
            ratios = [own / base for own, base in zip(times[name], times["none"], strict=True)]
            found.setdefault(variant, {})[name] = {
                "kept_per_token": kept_per_token(with_policy(variant, name)),
                "planned_per_token": planned[variant, name] / LONG,
                "time": [statistics.median(ratios), min(ratios), max(ratios)],
            }
            print(variant, name, found[variant][name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # Plans create a process group, so they precede the real one.
    planned = {
        (variant, name): simulate(load_config(with_policy(variant, name)), 1).activations
        for variant in VARIANTS
        for name in POLICIES
    }
    join_alone()
    found = {
        "machine": facts(),
        "policies": policies(args.rounds, planned),
        "kept_per_token": {
            mask: {length: kept_per_token(words("diff_v2", length), mean) for length in LENGTHS}
            for mask, mean in DOCUMENTS.items()
        },
        "speed": speed(args.rounds),
    }
    args.out.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
