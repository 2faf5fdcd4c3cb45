"""Cost of diagnostics at their default intervals, on against off in one run.

    python benchmarks/diagnostics_cost.py [shape] [overrides] [--rounds 40] [--json FILE]

Three kinds of steps alternate, in changing order: one that measures nothing; one with in-block
statistics, update norm and gradient norms by group, read by the host (every 10th step of a run);
one with probes as well (every 100th). The cost is that of the extra time at these rates over the
time of a step that measures nothing. Without flags of a shape (shapes.py) or overrides it is the
quickstart's model.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import run_alone, synchronize, write
from shapes import add_shape, described, shape_given, shape_words
from steps import micro_batches

from diffllm.config import load_config
from diffllm.metrics.diagnostics import named_values
from diffllm.training.build import Training, build
from diffllm.training.record import grad_norm_by_group
from diffllm.training.schedule import Due
from diffllm.training.step import train_step

KINDS = {
    "off": Due(),
    "statistics": Due(statistics=True, update=True),
    "probes": Due(statistics=True, probes=True, update=True),
}


def step_seconds(t: Training, due: Due) -> float:
    """Time of one step, its measurements on the host."""
    batches = micro_batches(t.cfg, t.device)
    synchronize(t.device)
    start = time.perf_counter()
    out = train_step(t, iter(batches), 0, due)
    if due.update:
        named_values(out.stats)
        grad_norm_by_group(out.grad_norms)
    out.nll.item()  # waits for a GPU
    return time.perf_counter() - start


def cost(t: Training, times: dict[str, np.ndarray]) -> float:
    """Extra time over a step's time, from medians."""
    off, taken, probed = (float(np.median(times[kind])) for kind in KINDS)
    probes = 1 / t.cfg.diagnostics.probe_interval
    taken_only = 1 / t.cfg.diagnostics.interval - probes
    return (taken_only * (taken - off) + probes * (probed - off)) / off


def interval(t: Training, times: dict[str, np.ndarray], draws: int = 2000) -> tuple[float, float]:
    """95% of `cost` over rounds drawn with replacement."""
    rng = np.random.default_rng(0)
    rounds = len(times["off"])
    costs = []
    for _ in range(draws):
        drawn = rng.integers(0, rounds, rounds)
        costs.append(cost(t, {kind: values[drawn] for kind, values in times.items()}))
    low, high = np.quantile(costs, (0.025, 0.975))
    return float(low), float(high)


def measured(t: Training, rounds: int) -> dict[str, Any]:
    """Seconds of every kind of step, and the cost with its interval."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = list(KINDS)
    for round_ in range(rounds + 2):
        random.Random(round_).shuffle(order)
        for kind in order:
            taken = step_seconds(t, KINDS[kind])
            if round_ >= 2:  # the first two warm up
                seconds[kind].append(taken)
    times = {kind: np.array(values) for kind, values in seconds.items()}
    return {
        "interval": t.cfg.diagnostics.interval,
        "probe_interval": t.cfg.diagnostics.probe_interval,
        "cost": cost(t, times),
        "cost_95": interval(t, times),
        "seconds": seconds,
    }


def main(device: torch.device) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    add_shape(parser)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shaped = shape_words(args) if shape_given(args) else []
    cfg = load_config([*shaped, *args.overrides])
    result = measured(build(cfg, device), args.rounds)
    choices, (low, high) = cfg.run.choices, result["cost_95"]
    medians = {kind: statistics.median(values) for kind, values in result["seconds"].items()}
    print(
        f"{choices['attention']}, {described(cfg)}: {100 * result['cost']:+.2f}% of a step "
        f"({100 * low:+.2f}% to {100 * high:+.2f}%, {args.rounds} rounds); "
        + ", ".join(f"{kind} {1e3 * value:.0f} ms" for kind, value in medians.items())
    )
    if args.json:
        write(args.json, device, result, shape=described(cfg), attention=choices["attention"])


if __name__ == "__main__":
    run_alone(main)
