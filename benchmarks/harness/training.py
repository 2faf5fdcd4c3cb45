"""The cost of diagnostics, peak memory and a whole run of train.py, each one call of a worker."""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffllm.config import TrainConfig, load_config
from diffllm.metrics.diagnostics import named_values
from diffllm.plan.simulate import EVERYTHING, simulate
from diffllm.training.build import Training, build
from diffllm.training.record import grad_norm_by_group
from diffllm.training.step import Due, train_step
from harness.machine import with_path
from harness.measuring import alone, synchronize
from harness.records import ROOT, read
from harness.steps import micro_batches
from harness.worker import State

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


def diagnostics(state: State, words: list[str], rounds: int) -> dict[str, Any]:
    """Measure the cost of diagnostics at their default intervals, on against off in one run.

    Three kinds of steps alternate, in changing order: one that measures nothing; one with in-block
    statistics, update norm and gradient norms by group, read by the host (every 10th step of a
    run); one with probes as well (every 100th). The cost is the extra time at these rates over the
    time of a step that measures nothing.
    """
    with alone(state["device"]) as device:
        return cost_of_diagnostics(build(load_config(words), device), rounds)


def cost_of_diagnostics(t: Training, rounds: int) -> dict[str, Any]:
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


def memory(state: State, attention: str, checkpointing: bool, words: list[str]) -> dict[str, Any]:
    """Peak bytes of a step: the plan of one rank, and on a GPU the most that tensors held at once.

    Measured is a step that takes all measurements, from before the model was built, by torch's CUDA
    allocator: without CUDA's context and fragments.
    """
    cfg = load_config(
        [f"attention={attention}", f"activation_checkpointing={checkpointing}", *words]
    )
    plan = simulate(cfg, 1).peak.total  # before there is a process group: a plan has its own
    with alone(state["device"]) as device:
        return {"plan": plan, "measured": peak_of_step(cfg, device)}


def peak_of_step(cfg: TrainConfig, device: torch.device) -> int | None:
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


def training_run(state: State, words: list[str], folder: str, limit: float) -> dict[str, Any]:
    """A run of train.py that is stopped after its first save, and then continued to its end."""
    run = Path(folder).absolute()
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, str(ROOT / "train.py"), *words, f"run.dir={run}"]
    if state["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    end = time.monotonic() + limit

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, env=with_path())

    first = start()
    while first.poll() is None and time.monotonic() < end:
        if list(run.glob("checkpoints/step-*")):
            first.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    first.wait(max(1, end - time.monotonic()))
    steps = [int(path.name.partition("-")[2]) for path in run.glob("checkpoints/step-*")]
    stopped_at = max(steps, default=0)
    begun = time.monotonic()
    second = start()
    second.wait(max(1, end - time.monotonic()))
    if first.returncode or second.returncode:
        raise RuntimeError(f"exit codes {first.returncode}, {second.returncode}; see the log")
    lines = read(run / "metrics.jsonl")
    return {
        "stopped_at": stopped_at,
        "steps": lines[-1]["step"],
        "loss": [lines[0]["train/loss"], lines[-1]["train/loss"]],
        "speed": {key: lines[-1].get(f"perf/{key}") for key in ("tokens_per_s", "mfu")},
        "second_run_s": time.monotonic() - begun,
        "summary": run.joinpath("summary.json").read_text()[:2000],
    }
