"""Training speed of a small run against the number and the waiting of OpenMP's threads, on a CPU.

    python benchmarks/threads.py --out benchmarks/results/threads_cpu.json

A waiting thread of GNU's OpenMP spins, by default 300,000 times (about 3 ms), and then sleeps. A
spinning thread takes CPU time from other processes. Each setting trains `model=tiny`:

- alone
- as two equal runs at the same time; the slower one counts
- next to another process that trains with GNU's defaults
- alone with a CPU quota of 1.5 cores, as in a container (needs root and cgroups of version 1)

All cases are repeated in a new random order in each round. Results are ratios of tokens per second
to those of GNU's defaults in the same situation and round: median, minimum and maximum.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness.machine import facts

GNU = "300,000 spins"
SETTINGS = {
    GNU: {"GOMP_SPINCOUNT": "300000"},
    "3,000 spins": {"GOMP_SPINCOUNT": "3000"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "300 spins": {"GOMP_SPINCOUNT": "300"},
    "100 spins": {"GOMP_SPINCOUNT": "100"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
SITUATIONS = ("alone", "two runs", "next to defaults", "quota")
QUOTA = 1.5
GROUP = Path("/sys/fs/cgroup/cpu/diffllm-threads")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
ROOT = Path(__file__).parents[1]


class Measured(NamedTuple):
    tokens_per_s: float
    cpu_seconds: float
    heldout_loss: float


def start(setting: str, directory: Path, words: list[str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    threads = str(len(os.sched_getaffinity(0)))  # a quota must not reduce the number here
    env |= {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT), **SETTINGS[setting]}
    command = [sys.executable, "-m", "diffllm", "train", *words, f"run.dir={directory}"]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)


def result(process: subprocess.Popen[bytes], directory: Path) -> Measured:
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the run in {directory} failed")
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    seconds = usage.ru_utime + usage.ru_stime
    return Measured(summary["tokens_per_s"], seconds, summary["heldout_loss"])


@contextmanager
def quota():
    """Limit the processes started inside the `with` block to QUOTA cores."""
    GROUP.mkdir(exist_ok=True)
    (GROUP / "cpu.cfs_quota_us").write_text(str(int(QUOTA * 100_000)), encoding="utf-8")
    tasks = "cgroup.procs"
    (GROUP / tasks).write_text(str(os.getpid()), encoding="utf-8")
    try:
        yield
    finally:
        (GROUP.parent / tasks).write_text(str(os.getpid()), encoding="utf-8")


def measure(situation: str, setting: str, folder: Path, words: list[str]) -> Measured:
    shutil.rmtree(folder, ignore_errors=True)
    paths = [folder / "first", folder / "second"]
    if situation == "alone":
        return result(start(setting, paths[0], words), paths[0])
    if situation == "quota":
        with quota():
            return result(start(setting, paths[0], words), paths[0])
    other = setting if situation == "two runs" else GNU
    processes = [start(setting, paths[0], words), start(other, paths[1], words)]
    first, second = [result(*pair) for pair in zip(processes, paths, strict=True)]
    if situation == "two runs":
        return min(first, second)
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--only", nargs="+", default=SITUATIONS, choices=SITUATIONS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    words = [
        f"model={args.model}", f"steps={args.steps}", "log_interval=5", "eval.tokens=1000",
        "eval.interval=100000", "run.report=false", "wandb.mode=disabled",
    ]  # fmt: skip
    situations = list(args.only)
    if "quota" in situations and not os.access(GROUP.parent / "cpu.cfs_quota_us", os.W_OK):
        print("no CPU quota: this needs root and cgroups of version 1")
        situations.remove("quota")
    cases = [(situation, setting) for situation in situations for setting in SETTINGS]
    runs: dict[tuple[str, str], list[Measured]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        measure("alone", GNU, Path(folder, "run"), words)  # prepares the corpus
        for round_ in range(args.rounds):
            for case in random.Random(round_).sample(cases, len(cases)):
                runs[case].append(measure(*case, Path(folder, "run"), words))
                print(round_, *case, runs[case][-1], flush=True)
    # Only the number of threads may change results, in the last bits.
    several = {m.heldout_loss for case, ms in runs.items() for m in ms if case[1] != "1 thread"}
    assert len(several) == 1, f"held-out losses differ: {several}"
    table: dict[str, Any] = {}
    for situation, setting in cases:
        pairs = list(zip(runs[situation, setting], runs[situation, GNU], strict=True))
        ratios = [run.tokens_per_s / base.tokens_per_s for run, base in pairs]
        table.setdefault(situation, {})[setting] = {
            "speed": [statistics.median(ratios), min(ratios), max(ratios)],
            "tokens_per_s": statistics.median(run.tokens_per_s for run, _ in pairs),
            "cpu_seconds": statistics.median(run.cpu_seconds for run, _ in pairs),
        }
    content = {"words": words, "rounds": args.rounds, "ratios": table, "machine": facts()}
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
