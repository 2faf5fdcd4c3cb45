"""Measurements that run a command: pytest or train.py."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from harness import compile_cache
from harness.process import ROOT


def tests(file: str, limit: float, at_once: int) -> dict[str, Any]:
    """Run the gpu-marked tests of a file; return outcomes, and names and reasons of failures.

    Args:
        limit: seconds until pytest is killed; results of finished tests are kept.
        at_once: number of parallel tests on a GPU.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-m", "gpu", file]
    command += ["-p", "no:cacheprovider", "--tb=line"]
    if torch.cuda.is_available() and importlib.util.find_spec("xdist"):
        command += ["-n", str(at_once)]
    # The tests compile hundreds of graphs, too many for a cache that is copied between machines.
    env = {name: value for name, value in os.environ.items() if name != compile_cache.VARIABLE}
    with tempfile.TemporaryFile("w+", errors="replace", encoding="utf-8") as output:
        ended = "in time"
        try:
            subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=output, timeout=limit)
        except subprocess.TimeoutExpired:
            ended = f"killed after {limit:.0f} s"
        output.seek(0)
        text = output.read()
    print(text, flush=True)  # `harness.process` writes stdout to the log
    outcomes = test_outcomes(text)
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) (\S+) - (.{,200})", text, re.MULTILINE))
    shown = {name: reasons.get(name, "see the log") for name in failed}
    return {"counts": dict(Counter(outcomes.values())), "ended": ended, "failed": shown}


def test_outcomes(text: str) -> dict[str, str]:
    """Return the outcome of each test from the output of `pytest -v`, with or without xdist."""
    outcome = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
    alone = re.findall(rf"^(\S+::\S.*?) ({outcome})\b", text, re.MULTILINE)
    shared = re.findall(rf"^\[gw\d+\].*? ({outcome}) (\S+::.+?)\s*$", text, re.MULTILINE)
    return dict(alone) | {name: how for how, name in shared}


def training_run(words: list[str], folder: str, limit: float) -> dict[str, Any]:
    """Stop a run of train.py after its first checkpoint, resume the run, and return its results."""
    run = Path(folder).absolute()
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, str(ROOT / "train.py"), *words, f"run.dir={run}"]
    end = time.monotonic() + limit

    def saved() -> list[int]:
        return [int(path.name.partition("-")[2]) for path in run.glob("checkpoints/step-*")]

    first = subprocess.Popen(command, cwd=ROOT)
    while first.poll() is None and time.monotonic() < end:
        if saved():
            first.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    first.wait(max(1, end - time.monotonic()))
    stopped_at, resumed = max(saved(), default=0), time.monotonic()
    second = subprocess.run(command, cwd=ROOT, timeout=max(1, end - time.monotonic()))
    if first.returncode or second.returncode:
        raise RuntimeError(
            f"train.py failed ({first.returncode}, {second.returncode}); see the log"
        )
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {
        "stopped_at": stopped_at,
        "steps": lines[-1]["step"],
        "loss": [lines[0]["train/loss"], lines[-1]["train/loss"]],
        "speed": {key: lines[-1].get(f"perf/{key}") for key in ("tokens_per_s", "mfu")},
        "second_run_s": time.monotonic() - resumed,
    }
