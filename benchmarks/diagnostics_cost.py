"""What in-block diagnostics cost at their default interval, on against off in one run.

    python benchmarks/diagnostics_cost.py [overrides] [--rounds 12] [--json FILE]

Both sides share one model and optimizer; blocks of 10 steps alternate between "off" and "every
10th step diagnosed", in changing order, and the ratio of their times is taken pair by pair.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from diffllm.config import load_config
from diffllm.diagnostics import named_values
from diffllm.distributed.world import join
from diffllm.trainer import Training, build, train_step


def block_seconds(t: Training, diagnose: bool, steps: int) -> float:
    """Time of `steps` steps, the last one diagnosed and read by the host or not."""
    cfg = t.cfg
    start = time.perf_counter()
    for i in range(steps):
        tokens = torch.randint(0, cfg.model.vocab_size, (cfg.global_batch_size, cfg.seq_len + 1))
        batch = iter([(tokens[:, :-1], tokens[:, 1:])])
        out = train_step(t, batch, 0, diagnose=diagnose and i == steps - 1)
        if i == steps - 1:
            named_values(out.stats)
            out.grad_norm.item()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cfg = load_config([*args.overrides, "micro_batch_size=null"])
    world = join(cfg.distributed)
    device = world.device()
    world.init_process_group(device, cfg.distributed)
    t = build(cfg, device)
    interval = cfg.diagnostics.interval
    for diagnose in (True, False):
        block_seconds(t, diagnose, 2)
    ratios = []
    for round_ in range(args.rounds):
        order = (True, False) if round_ % 2 else (False, True)
        seconds = {diagnose: block_seconds(t, diagnose, interval) for diagnose in order}
        ratios.append(seconds[True] / seconds[False])
    cost = statistics.median(ratios) - 1
    choices = cfg.run.choices
    print(
        f"{choices['model']} {choices['attention']}: {100 * cost:+.2f}% step time "
        f"(median of {args.rounds} pairs; {100 * min(ratios) - 100:+.1f}% to "
        f"{100 * max(ratios) - 100:+.1f}%), one step in {interval} diagnosed"
    )
    if args.json:
        result = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "model": choices["model"],
            "attention": choices["attention"],
            "interval": interval,
            "cost_median": cost,
            "ratios": ratios,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
