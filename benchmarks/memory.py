"""Peak memory of a training step by variant, beside what `diffllm plan` says.

    python benchmarks/memory.py [shape] [--attention standard ...] [--json FILE]

The plan is of one rank, `diffllm.plan.simulate`. Measured is the most that tensors held at once in
a step which takes all measurements, from before the model was built, by torch's CUDA allocator:
neither CUDA's context nor fragments are in it. A CPU's allocator does not tell, so there only the
plan's figure stands. Each variant runs with and without activation checkpointing.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from measuring import markdown, run_alone, write
from shapes import VARIANTS, add_shape, described, shape_words
from steps import micro_batches

from diffllm.config import TrainConfig, load_config
from diffllm.plan.estimate import GIB
from diffllm.plan.simulate import EVERYTHING, simulate
from diffllm.training.build import build
from diffllm.training.step import train_step

COLUMNS = ("attention", "checkpointing", "plan, GiB", "measured, GiB", "measured over plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--attention", nargs="+", default=VARIANTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    words = shape_words(args)
    # Before there is a process group: a plan has one of its own.
    plans = {(a, c): planned(config(a, c, words)) for a in args.attention for c in (False, True)}

    def measure(device: torch.device) -> None:
        results, rows = [], []
        for (attention, checkpointing), plan in plans.items():
            peak = measured(config(attention, checkpointing, words), device)
            results.append(
                {"attention": attention, "checkpointing": checkpointing, "plan": plan,
                 "measured": peak}
            )  # fmt: skip
            rows.append(row(results[-1]))
        print(f"{described(config('standard', False, words))}\n\n{markdown(COLUMNS, rows)}")
        if device.type == "cpu":
            print("\nMeasured on GPUs only: a CPU's allocator does not tell its peak.")
        if args.json:
            write(args.json, device, results, shape=described(config("standard", False, words)))

    run_alone(measure)


def config(attention: str, checkpointing: bool, words: list[str]) -> TrainConfig:
    """The config of one variant, with or without activation checkpointing."""
    return load_config(
        [f"attention={attention}", f"activation_checkpointing={checkpointing}", *words]
    )


def planned(cfg: TrainConfig) -> int:
    """Bytes at the peak of a step of one rank, simulated; outside of any process group."""
    return simulate(cfg, 1).peak.total


def measured(cfg: TrainConfig, device: torch.device) -> int | None:
    """Bytes that tensors held at most in a step that measures everything; None on a CPU."""
    if device.type != "cuda":
        return None
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    t = build(cfg, device)

    def step(number: int) -> None:
        train_step(t, iter(micro_batches(cfg, device)), number, EVERYTHING)
        torch.cuda.synchronize(device)

    step(0)  # compiles, and tries kernels out
    torch.cuda.reset_peak_memory_stats(device)
    step(1)
    return torch.cuda.max_memory_allocated(device) - before


def row(result: dict[str, Any]) -> list[str]:
    """The cells of a result."""
    plan, peak = result["plan"], result["measured"]
    return [
        f"`{result['attention']}`",
        "yes" if result["checkpointing"] else "no",
        f"{plan / GIB:.2f}",
        "not on a CPU" if peak is None else f"{peak / GIB:.2f}",
        "" if peak is None else f"{peak / plan:.2f}",
    ]


if __name__ == "__main__":
    main()
