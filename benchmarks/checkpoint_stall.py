"""How much longer training takes around a save, in steps, on this machine's device.

    python benchmarks/checkpoint_stall.py [overrides] [--rounds 5] [--plain 5] [--json FILE]

In every round, steps without a save, then for each way to save a save and the steps until it is
complete: ours, DCP's `async_save` as it comes, and DCP's `save`, which blocks. The stall is by how
much these steps and the save call took longer than as many steps without one. Ours also hashes
every file; the others leave no manifest. TMPDIR chooses the disk.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measuring import meta

from diffllm.checkpoint import CheckpointConfig, Checkpointer, list_checkpoints, verify
from diffllm.config import load_config
from diffllm.distributed.world import join
from diffllm.training.build import Training, build
from diffllm.training.state import LoopState, save
from diffllm.training.step import train_step

DONE: Future[None] = Future()
DONE.set_result(None)
Save = Callable[[int], Future[Any]]


def step_seconds(t: Training) -> float:
    """Time of one training step, its loss on the host."""
    cfg = t.cfg
    tokens = torch.randint(0, cfg.model.vocab_size, (cfg.global_batch_size, cfg.seq_len + 1))
    start = time.perf_counter()
    out = train_step(t, iter([(tokens[:, :-1], tokens[:, 1:])]), 0)
    out.nll.item()  # waits for a GPU
    return time.perf_counter() - start


def ways(t: Training, directory: Path, checkpointer: Checkpointer) -> dict[str, Save]:
    """Each starts a save and returns what is done when it is complete."""

    def ours(number: int) -> Future[Any]:
        save(t, LoopState(step=number), checkpointer)
        assert checkpointer.pending, "there was no room for a checkpoint"
        return checkpointer.pending

    def async_save(number: int) -> Future[Any]:
        target = directory / f"async-{number}"
        made = dcp.async_save(t.tensors(), checkpoint_id=target, process_group=checkpointer.group)
        assert isinstance(made, Future)
        return made

    def blocking(number: int) -> Future[Any]:
        dcp.save(t.tensors(), checkpoint_id=directory / f"blocking-{number}")
        return DONE

    return {"ours": ours, "DCP async_save": async_save, "DCP save": blocking}


def measure(t: Training, saving: Save, number: int, median: float) -> dict[str, float]:
    """One save: seconds that the call blocks, the stall in seconds, steps until it is complete."""
    start = time.perf_counter()
    pending = saving(number)
    blocked = time.perf_counter() - start
    steps = [step_seconds(t)]
    while not pending.done():
        steps.append(step_seconds(t))
    pending.result()
    stall = blocked + sum(steps) - len(steps) * median
    return {"blocked_s": blocked, "stall_s": stall, "steps": len(steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", type=int, default=5)
    parser.add_argument("--json", type=Path, help="add the results to this file")
    args = parser.parse_args()
    cfg = load_config(args.overrides)
    world = join(cfg.distributed)
    device = world.device()
    world.init_process_group(device, cfg.distributed)
    t = build(cfg, device)
    plain: list[float] = []
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        checkpointer = Checkpointer(directory, CheckpointConfig(keep_last=1))
        for round_ in range(args.rounds + 1):
            taken = [step_seconds(t) for _ in range(args.plain)]
            for name, saving in ways(t, directory, checkpointer).items():
                # The first round warms up.
                one = measure(t, saving, round_ + 1, statistics.median(taken))
                if round_:
                    results.setdefault(name, []).append({**one, "step_s": statistics.median(taken)})
                for old in directory.glob("[ab]*-*"):
                    shutil.rmtree(old)
            plain += taken if round_ else []
        checkpointer.close()
        (newest,) = list_checkpoints(directory)
        assert verify(newest) == []
        size = sum(file.stat().st_size for file in newest.iterdir())
    report(t, plain, results, size, args.json)
    torch.distributed.destroy_process_group()


def report(
    t: Training,
    plain: list[float],
    results: dict[str, list[dict[str, float]]],
    size: int,
    file: Path | None,
) -> None:
    """Print ratios to a step without a save; write them."""
    choices = t.cfg.run.choices
    tokens = t.cfg.global_batch_size * t.cfg.seq_len
    print(
        f"{choices['model']} {choices['attention']}: {size / 1e6:,.0f} MB, a step of {tokens} "
        f"tokens {1e3 * statistics.median(plain):.0f} ms ({1e3 * min(plain):.0f} to "
        f"{1e3 * max(plain):.0f}); in such steps, median (min to max) of {len(results['ours'])}:"
    )
    print(f"{'':16}{'the call blocks':>26}{'stall in all':>26}{'complete after':>26}")
    summary: dict[str, Any] = {}
    for name, rounds in results.items():
        columns = {
            "blocked": [one["blocked_s"] / one["step_s"] for one in rounds],
            "stall": [one["stall_s"] / one["step_s"] for one in rounds],
            "complete_after": [one["steps"] for one in rounds],
        }
        print(f"{name:16}" + "".join(f"{spread(values):>26}" for values in columns.values()))
        summary[name] = {
            key: {"median": statistics.median(values), "values": values}
            for key, values in columns.items()
        }
    if file:
        written = json.loads(file.read_text()) if file.exists() else {}
        written[choices["model"]] = {
            **meta(t.device),
            "attention": choices["attention"],
            "tokens": tokens,
            "bytes": size,
            "step_seconds": plain,
            "in_steps": summary,
        }
        file.write_text(json.dumps(written, indent=2) + "\n")


def spread(values: list[float]) -> str:
    """Median, and from where to where."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
