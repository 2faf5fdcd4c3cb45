"""Kill a run again and again, and compare what it becomes with an undisturbed one.

    python benchmarks/chaos.py --kills 50 --saves 20 [--ranks 2] [--faults]
        [--json benchmarks/results/NAME.json]

A run of two ranks under torchrun is killed with SIGKILL: one rank, or everything with torchrun.
After one rank torchrun starts the ranks again; after everything this script starts the same command
again, as a scheduler would. Nothing else is done to help. At least `saves` of the kills fall into a
save: the checkpoint that was being written is still there, hidden, when all ranks are dead. A run
of one rank has no torchrun, and every kill is one of everything.

With --faults each start gets output that fails (full, closed, or with a reader that goes away after
a few lines), and the disk of the run, a small one of its own, which root alone may mount, is filled
up now and then and has room again a moment later. A run that ends with exit code 2 meanwhile is
started again.

In the end every step must have read the samples of the undisturbed run, each time it was made, with
the same loss to the last bit, and the final weights must be equal bit for bit.
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

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from runs.command import checkpoint_tensors, descendants, overrides_of, write_corpus  # noqa: E402

OUTPUTS = {
    "a file": 'exec "$@" >> "$LOG" 2>&1',
    "a full device": 'exec "$@" > /dev/full 2>&1',
    "full for its results": 'exec "$@" > /dev/full 2>> "$LOG"',
    "closed": 'exec "$@" >&- 2>&-',
    "a reader that leaves": 'exec "$@" > >(head -n 3 >> "$LOG") 2>&1',
}
"""Places that output goes to, as a shell has it."""
PATIENCE_S = 300
"""Without progress for so long, something is wrong."""


class Victim:
    """The run under torchrun, started again when all of it was killed."""

    def __init__(self, words: list[str], ranks: int, run: Path, faults: random.Random | None):
        planted = str(ROOT / "tests" / "runs" / "planted_train.py")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += ["--max-restarts=1000"]
        launcher = launcher if ranks > 1 else []
        self.command = [sys.executable, *launcher, planted, "none", "0", "0", *words]
        self.run, self.log, self.ranks = run, run.parent.with_suffix(".log"), ranks
        self.faults = faults
        self.samples = run.parent.with_name(f"{run.parent.name}-samples")
        self.samples.mkdir()
        self.starts = self.refused = 0
        self.outputs: collections.Counter[str] = collections.Counter()

    def start(self) -> None:
        """Start the command."""
        self.starts += 1
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ENABLE_FILE_TIMER": "0"}
        kind = self.faults.choice(list(OUTPUTS)) if self.faults else "a file"
        self.outputs[kind] += 1
        shell = ["bash", "-c", OUTPUTS[kind], "sh", *self.command]
        self.process = subprocess.Popen(
            shell,
            env={**env, "LOG": str(self.log), "SAMPLES": str(self.samples)},
            start_new_session=True,
        )

    def training(self) -> list[int]:
        """The processes of the ranks: torchrun's children, but for what reads its output."""
        if self.ranks == 1:
            return [self.process.pid]
        children = descendants(self.process.pid, deep=False)
        return [pid for pid in children if b"planted_train" in command_of(pid)]

    def steps_made(self) -> int:
        """Lines in the sample logs, over all starts."""
        return sum(file.read_bytes().count(b"\n") for file in self.samples.glob("samples-*.jsonl"))

    def hidden(self) -> list[Path]:
        """Checkpoints that are being written, or were when everything died.

        An old one that is being deleted has such a name, too, with a smaller step.
        """
        directory = self.run / "checkpoints"
        newest = max((p.name for p in directory.glob("step-*")), default="")
        return [p for p in directory.glob(".step-*.incomplete") if p.name[1:] > newest]

    def wait(self, condition: Callable[[], bool], what: str) -> bool:
        """Until it holds; False if the run has ended."""
        made, deadline = self.steps_made(), time.monotonic() + PATIENCE_S
        while not condition():
            if (code := self.process.poll()) is not None:
                if code == (2 if self.ranks == 1 else 1) and self.faults:
                    self.refused += 1
                    self.start()
                    continue
                if code:
                    raise SystemExit(f"the run ended with {code}:\n{self.log.read_text()[-3000:]}")
                return False
            if time.monotonic() > deadline:
                before, made = made, self.steps_made()
                deadline = time.monotonic() + PATIENCE_S
                if made > before:
                    continue
                raise SystemExit(f"no {what}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.0005)
        return True

    def kill_one(self, rng: random.Random) -> None:
        """One rank, at once; then wait until torchrun has buried all of them."""
        ranks = self.training()
        kill(rng.choice(ranks))
        self.wait(lambda: not any(alive(pid) for pid in ranks), "end of the other ranks")

    def kill_all(self) -> None:
        """torchrun, the ranks and what they have started."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            kill(pid)
        self.process.wait()


class Disk:
    """A small disk of its own below a directory, which can be full."""

    def __init__(self, directory: Path):
        self.directory, self.ballast = directory, directory / "ballast"
        self.is_full, self.filled = False, 0
        mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "none", str(directory)]
        subprocess.run(mount, check=True)

    def fill(self) -> None:
        """Leave no room."""
        self.is_full, self.filled = True, self.filled + 1
        with contextlib.suppress(OSError), self.ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Make room again."""
        self.ballast.unlink(missing_ok=True)
        self.is_full = False

    def unmount(self) -> None:
        """Take the disk away."""
        subprocess.run(["umount", "-l", str(self.directory)], check=True)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> bytes:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="at least so many")
    parser.add_argument("--saves", type=int, default=20, help="of them during a save, at least")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults", action="store_true", help="of outputs and of the disk")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = compare(args, Path(directory))
    print(json.dumps(result, indent=2))
    if args.json:
        machine = {"device": "cpu", "torch": torch.__version__, "date": f"{date.today()}"}
        args.json.write_text(json.dumps({**machine, **result}, indent=2) + "\n")
    return 0 if result["equal"] else 1


def compare(args: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Both runs, and what they have in common."""
    corpus = write_corpus(directory)
    steps = max(20, 3 * args.every * args.kills)
    words = [f"steps={steps}", f"checkpoint.interval={args.every}", "log_interval=1"]
    words += ["eval.interval=1000000", "seq_len=64", "attention=diff_v2"]
    straight, broken = directory / "straight" / "run", directory / "broken" / "run"
    broken.parent.mkdir()
    rng = random.Random(args.seed)
    faults = random.Random(args.seed + 1) if args.faults else None
    undisturbed, victim = (
        Victim([*overrides_of(corpus, run), *words], args.ranks, run, of_run)
        for run, of_run in ((straight, None), (broken, faults))
    )
    undisturbed.start()
    undisturbed.wait(lambda: False, "end")
    disk = Disk(broken.parent) if args.faults else None
    try:
        return disturbed(args, rng, undisturbed, victim, disk, steps)
    finally:
        if disk:
            disk.unmount()


def disturbed(
    args: argparse.Namespace,
    rng: random.Random,
    undisturbed: Victim,
    victim: Victim,
    disk: Disk | None,
    steps: int,
) -> dict[str, object]:
    """Disturb one run until it ends, and compare it with the other."""
    straight, broken = undisturbed.run, victim.run
    victim.start()
    one = everything = saves = 0
    while one + everything < args.kills or saves < args.saves:
        made = victim.steps_made()
        if not victim.wait(lambda made=made: victim.steps_made() > made, "step"):
            raise SystemExit(
                f"finished after {one + everything} kills: more --every or fewer --kills"
            )
        time.sleep(rng.random() * 0.3)  # up to several checkpoints further
        if disk and rng.random() < 0.3:
            disk.fill()
            time.sleep(rng.random() * 0.5)
            if rng.random() < 0.7:
                disk.free()
        if rng.random() < 0.6 and not (disk and disk.is_full):
            if not victim.wait(lambda: bool(victim.hidden()), "save"):
                raise SystemExit("finished too early")
            time.sleep(rng.random() * 0.03)
        if args.ranks > 1 and rng.random() < 0.5 and victim.training():
            victim.kill_one(rng)
            saves += bool(victim.hidden())
            one += 1
        else:
            victim.kill_all()
            saves += bool(victim.hidden())
            everything += 1
            victim.start()
        if disk and disk.is_full:
            time.sleep(rng.random() * 2.0)
            disk.free()
        print(f"kill {one + everything}: {saves} during a save", file=sys.stderr, flush=True)
    victim.wait(lambda: False, "end")
    mine, theirs = (trained_on(each.samples, args.ranks) for each in (undisturbed, victim))
    again = sum(len(seen) - 1 for seen in theirs.values())
    wrong = [key for key, seen in mine.items() if set(theirs.get(key, [])) != set(seen)]
    a, b = checkpoint_tensors(straight, steps), checkpoint_tensors(broken, steps)
    different = [name for name in a if not a[name].equal(b[name])]
    return {
        "ranks": args.ranks, "steps": steps, "kills": one + everything, "one_rank": one,
        "everything": everything, "during_a_save": saves, "starts": victim.starts,
        "outputs": dict(victim.outputs), "disk_filled": disk.filled if disk else 0,
        "ended_while_full": victim.refused,
        "steps_made_again": again // args.ranks, "steps_with_other_samples_or_loss": len(wrong),
        "tensors_that_differ": len(different), "equal": not wrong and not different,
    }  # fmt: skip


def trained_on(samples: Path, ranks: int) -> dict[tuple[int, int], list[tuple[object, ...]]]:
    """By rank and step: samples and loss, once for every time that the step was made."""
    seen: dict[tuple[int, int], list[tuple[object, ...]]] = {}
    for rank in range(ranks):
        for line in (samples / f"samples-{rank}.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut short by a kill: the step is made again
                entry = json.loads(line)
                found = (*entry["samples"], entry["loss"])
                seen.setdefault((rank, entry["step"]), []).append(found)
    return seen


if __name__ == "__main__":
    sys.exit(main())
