"""Kill a run repeatedly, and compare its result with an undisturbed run.

    python benchmarks/chaos.py --kills 50 --saves 20 [--ranks 2] [--faults]
        [--json benchmarks/results/NAME.json]

SIGKILL is sent to one rank, after which torchrun restarts all ranks, or to torchrun and all ranks,
after which this script restarts the run, like a scheduler. A run of one rank has no torchrun. At
least `saves` of the kills happen during a save and leave the hidden directory of an unfinished
checkpoint.

With --faults each start has a failing output. The run's disk is a small tmpfs (mounting needs root)
that is full from time to time. A run that then exits with code 2 is restarted.

At the end, every execution of a step must have read the samples of the undisturbed run with the
same loss, and the final weights must be bit-identical.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from processes import has_ended  # noqa: E402
from runs import command  # noqa: E402

OUTPUTS = {
    "a file": 'exec "$@" >> "$LOG" 2>&1',
    "a full device": 'exec "$@" > /dev/full 2>&1',
    "full for its results": 'exec "$@" > /dev/full 2>> "$LOG"',
    "closed": 'exec "$@" >&- 2>&-',
    "a reader that leaves": 'exec "$@" > >(head -n 3 >> "$LOG") 2>&1',
}
"""Shell redirections of the output."""
PATIENCE_S = 300  # after this time without progress, the script fails


class Victim:
    """A run that is killed and restarted."""

    def __init__(self, words: list[str], ranks: int, run: Path, faults: random.Random | None):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher = [*launcher, "--max-restarts=1000"] if ranks > 1 else []
        planted = str(ROOT / "tests" / "runs" / "planted_train.py")
        self.command = [sys.executable, *launcher, planted, "none", "0", "0", *words]
        self.run, self.ranks, self.faults = run, ranks, faults
        self.log = run.parent.with_suffix(".log")
        self.samples = run.parent.with_name(f"{run.parent.name}-samples")
        self.samples.mkdir()
        self.starts = self.refused = 0
        self.outputs: collections.Counter[str] = collections.Counter()

    def start(self) -> None:
        self.starts += 1
        kind = self.faults.choice(list(OUTPUTS)) if self.faults else "a file"
        self.outputs[kind] += 1
        paths = {"LOG": str(self.log), "SAMPLES": str(self.samples)}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ENABLE_FILE_TIMER": "0", **paths}
        shell = ["bash", "-c", OUTPUTS[kind], "sh", *self.command]
        self.process = subprocess.Popen(shell, env=env, start_new_session=True)

    def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks, which are children of torchrun."""
        if self.ranks == 1:
            return [self.process.pid]
        found = []
        for pid in command.descendants(self.process.pid, deep=False):
            with contextlib.suppress(OSError):  # the process has ended
                if b"planted_train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def steps_made(self) -> int:
        """Return the number of lines in the sample logs of all starts."""
        return sum(file.read_bytes().count(b"\n") for file in self.samples.glob("samples-*.jsonl"))

    def saving(self) -> bool:
        """Return whether a checkpoint is being written, or was being written at the last kill.

        A hidden directory with a smaller step belongs to a checkpoint that is being deleted.
        """
        directory = self.run / "checkpoints"
        newest = max((p.name for p in directory.glob("step-*")), default="")
        return any(p.name[1:] > newest for p in directory.glob(".step-*.incomplete"))

    def wait(self, condition: Callable[[], bool], what: str) -> bool:
        """Wait until `condition` is true; return False if the run ends first.

        Restart the run if faults are enabled and it exits with a disk error. Exit with an error if
        the run makes no step for a long time.
        """
        made, deadline = self.steps_made(), time.monotonic() + PATIENCE_S
        while not condition():
            code = self.process.poll()
            if code == (2 if self.ranks == 1 else 1) and self.faults:
                self.refused += 1
                self.start()
            elif code:
                text = self.log.read_text(encoding="utf-8")[-3000:]
                raise SystemExit(f"error: the run exited with code {code}:\n{text}")
            elif code == 0:
                return False
            if time.monotonic() > deadline:
                before, made = made, self.steps_made()
                deadline = time.monotonic() + PATIENCE_S
                if made == before:
                    text = self.log.read_text(encoding="utf-8")[-3000:]
                    raise SystemExit(
                        f"error: no step in {PATIENCE_S} s while waiting for the {what}:\n{text}"
                    )
            time.sleep(0.0005)
        return True

    def kill_one(self, rng: random.Random) -> None:
        """Kill one rank, and wait until torchrun has stopped all ranks."""
        ranks = self.rank_pids()
        kill(rng.choice(ranks))
        self.wait(lambda: all(map(has_ended, ranks)), "end of the other ranks")

    def kill_all(self) -> None:
        for pid in [self.process.pid, *command.descendants(self.process.pid)]:
            kill(pid)
        self.process.wait()


class Disk:
    """A small disk that can be filled, mounted at a directory; not mounted without faults."""

    def __init__(self, directory: Path, faults: bool):
        self.directory, self.faults = directory, faults
        self.is_full, self.filled = False, 0
        if faults:
            mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "none", str(directory)]
            subprocess.run(mount, check=True)

    def fill(self) -> None:
        self.is_full, self.filled = True, self.filled + 1
        ballast = self.directory / "ballast"
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.directory / "ballast").unlink(missing_ok=True)
        self.is_full = False

    def unmount(self) -> None:
        if self.faults:
            subprocess.run(["umount", "-l", str(self.directory)], check=True)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def compare(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train without kills and with kills; return the numbers of kills, starts and differences."""
    corpus = command.write_corpus(directory)
    steps = max(20, 3 * args.every * args.kills)
    words = [f"steps={steps}", f"checkpoint.interval={args.every}", "log_interval=1"]
    words += ["eval.interval=1000000", "seq_len=64", "attention=diff_v2"]
    straight, broken = directory / "straight" / "run", directory / "broken" / "run"
    broken.parent.mkdir()
    faults = random.Random(args.seed + 1) if args.faults else None
    undisturbed, victim = (
        Victim([*command.overrides_of(corpus, run), *words], args.ranks, run, of_run)
        for run, of_run in ((straight, None), (broken, faults))
    )
    undisturbed.start()
    undisturbed.wait(lambda: False, "end")
    disk = Disk(broken.parent, args.faults)
    try:
        kills = disturb(args, victim, disk)
        a, b = (command.checkpoint_tensors(run, steps) for run in (straight, broken))
    finally:
        disk.unmount()
    mine, theirs = command.trained_on(undisturbed.samples), command.trained_on(victim.samples)
    again = sum(len(seen) - 1 for seen in theirs.values())
    wrong = [key for key, seen in mine.items() if set(theirs.get(key, [])) != set(seen)]
    different = [name for name in a if not a[name].equal(b[name])]
    return {
        "ranks": args.ranks, "steps": steps, "kills": kills["one_rank"] + kills["everything"],
        **kills, "starts": victim.starts, "outputs": dict(victim.outputs),
        "disk_filled": disk.filled, "ended_while_full": victim.refused,
        "steps_made_again": again // args.ranks, "steps_with_other_samples_or_loss": len(wrong),
        "tensors_that_differ": len(different), "equal": not wrong and not different,
    }  # fmt: skip


def disturb(args: argparse.Namespace, victim: Victim, disk: Disk) -> dict[str, int]:
    """Kill and restart a run, and wait for its end; return the number of kills by kind."""
    rng = random.Random(args.seed)
    victim.start()
    one = everything = saves = 0
    while one + everything < args.kills or saves < args.saves:
        made = victim.steps_made()
        if not victim.wait(lambda made=made: victim.steps_made() > made, "step"):
            raise SystemExit(
                f"error: the run ended after {one + everything} kills; increase --every"
            )
        time.sleep(rng.random() * 0.3)  # the run can save several checkpoints in this time
        if args.faults and rng.random() < 0.3:
            disk.fill()
            time.sleep(rng.random() * 0.5)
            if rng.random() < 0.7:
                disk.free()
        if rng.random() < 0.6 and not disk.is_full:
            if not victim.wait(victim.saving, "save"):
                raise SystemExit("error: the run ended before the last kill; increase --every")
            time.sleep(rng.random() * 0.03)
        of_one = args.ranks > 1 and rng.random() < 0.5 and victim.rank_pids()
        if of_one:
            victim.kill_one(rng)
            one += 1
        else:
            victim.kill_all()
            everything += 1
        saves += victim.saving()
        if not of_one:
            victim.start()
        if disk.is_full:
            time.sleep(rng.random() * 2.0)
            disk.free()
        print(f"kill {one + everything}: {saves} during a save", file=sys.stderr, flush=True)
    victim.wait(lambda: False, "end")
    return {"one_rank": one, "everything": everything, "during_a_save": saves}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="minimum number of kills")
    parser.add_argument("--saves", type=int, default=20, help="minimum number of kills in a save")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults", action="store_true", help="make outputs and the disk fail")
    parser.add_argument("--seed", type=int, default=0, help="seed of kill times and killed ranks")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = compare(args, Path(directory))
    print(json.dumps(result, indent=2))
    if args.json:
        result = {"device": "cpu", "torch": torch.__version__, "date": f"{date.today()}", **result}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
