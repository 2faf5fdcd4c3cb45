"""What diagnostics cost at their default intervals, on against off in one run.

    python benchmarks/diagnostics_cost.py [overrides] [--rounds 40] [--json FILE]

Three kinds of steps alternate, in changing order: one that measures nothing; one with in-block
statistics, update norm and gradient norms by group, read by the host (every 10th step of a run);
one with probes as well (every 100th). The cost is that of the extra time at these rates over the
time of a step that measures nothing.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from diffllm.config import load_config
from diffllm.diagnostics import Due, named_values
from diffllm.distributed.world import join
from diffllm.recorder import grad_norm_by_group
from diffllm.trainer import Training, build, train_step

KINDS = {
    "off": Due(),
    "statistics": Due(statistics=True, update=True),
    "probes": Due(statistics=True, probes=True, update=True),
}


def step_seconds(t: Training, due: Due) -> float:
    """Time of one step, its measurements on the host."""
    cfg = t.cfg
    tokens = torch.randint(0, cfg.model.vocab_size, (cfg.global_batch_size, cfg.seq_len + 1))
    start = time.perf_counter()
    out = train_step(t, iter([(tokens[:, :-1], tokens[:, 1:])]), 0, due)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cfg = load_config([*args.overrides, "micro_batch_size=null"])
    world = join(cfg.distributed)
    device = world.device()
    world.init_process_group(device, cfg.distributed)
    t = build(cfg, device)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = list(KINDS)
    for round_ in range(args.rounds + 2):
        random.Random(round_).shuffle(order)
        for kind in order:
            taken = step_seconds(t, KINDS[kind])
            if round_ >= 2:  # the first two warm up
                seconds[kind].append(taken)
    times = {kind: np.array(values) for kind, values in seconds.items()}
    low, high = interval(t, times)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    choices = cfg.run.choices
    print(
        f"{choices['model']} {choices['attention']}: {100 * cost(t, times):+.2f}% of a step "
        f"({100 * low:+.2f}% to {100 * high:+.2f}%, {args.rounds} rounds); "
        + ", ".join(f"{kind} {1e3 * value:.0f} ms" for kind, value in medians.items())
    )
    if args.json:
        result = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "model": choices["model"],
            "attention": choices["attention"],
            "interval": cfg.diagnostics.interval,
            "probe_interval": cfg.diagnostics.probe_interval,
            "cost": cost(t, times),
            "cost_95": [low, high],
            "seconds": {kind: values.tolist() for kind, values in times.items()},
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
