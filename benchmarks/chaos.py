"""Kill a run again and again, and compare what it becomes with an undisturbed one.

    python benchmarks/chaos.py --kills 50 --saves 20 [--json benchmarks/results/NAME.json]

A run of two ranks under torchrun is killed with SIGKILL: one rank, or everything with torchrun.
After one rank torchrun starts the ranks again; after everything this script starts the same command
again, as a scheduler would. Nothing else is done to help. At least `saves` of the kills fall into a
save: the checkpoint that was being written is still there, hidden, when all ranks are dead.

In the end every step must have read the samples of the undisturbed run, each time it was made, with
the same loss to the last bit, and the final weights must be equal bit for bit.
"""

import argparse
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
sys.path[:0] = [str(ROOT / "tests" / "integration")]

from runs import checkpoint_tensors, descendants, overrides_of, write_corpus  # noqa: E402

PATIENCE_S = 300
"""Without progress for so long, something is wrong."""


class Victim:
    """The run under torchrun, started again when all of it was killed."""

    def __init__(self, words: list[str], ranks: int, run: Path):
        planted = str(ROOT / "tests" / "integration" / "planted_train.py")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += ["--max-restarts=1000"]
        self.command = [sys.executable, *launcher, planted, "none", "0", "0", *words]
        self.run, self.log = run, run.with_suffix(".log")
        self.starts = 0

    def start(self) -> None:
        """Start the command."""
        self.starts += 1
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ENABLE_FILE_TIMER": "0"}
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self.command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def training(self) -> list[int]:
        """The processes of the ranks: torchrun's children."""
        return descendants(self.process.pid, deep=False)

    def steps_made(self) -> int:
        """Lines in the sample logs, over all starts."""
        return sum(file.read_bytes().count(b"\n") for file in self.run.glob("samples-*.jsonl"))

    def hidden(self) -> list[Path]:
        """Checkpoints that are being written, or were when everything died.

        An old one that is being deleted has such a name, too, with a smaller step.
        """
        directory = self.run / "checkpoints"
        newest = max((p.name for p in directory.glob("step-*")), default="")
        return [p for p in directory.glob(".step-*.incomplete") if p.name[1:] > newest]

    def wait(self, condition: Callable[[], bool], what: str) -> bool:
        """Until it holds; False if the run has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if (code := self.process.poll()) is not None:
                if code:
                    raise SystemExit(f"the run ended with {code}:\n{self.log.read_text()[-3000:]}")
                return False
            if time.monotonic() > deadline:
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


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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
    straight, broken = directory / "straight", directory / "broken"
    rng = random.Random(args.seed)
    undisturbed, victim = (
        Victim([*overrides_of(corpus, run), "seq_len=128", "seq_len=128", *words], args.ranks, run)
        for run in (straight, broken)
    )
    undisturbed.start()
    undisturbed.wait(lambda: False, "end")
    victim.start()
    one = everything = saves = 0
    while one + everything < args.kills or saves < args.saves:
        made = victim.steps_made()
        if not victim.wait(lambda made=made: victim.steps_made() > made, "step"):
            raise SystemExit(
                f"finished after {one + everything} kills: more --every or fewer --kills"
            )
        time.sleep(rng.random() * 0.3)  # up to several checkpoints further
        if rng.random() < 0.6:
            if not victim.wait(lambda: bool(victim.hidden()), "save"):
                raise SystemExit("finished too early")
            time.sleep(rng.random() * 0.03)
        if rng.random() < 0.5:
            victim.kill_one(rng)
            saves += bool(victim.hidden())
            one += 1
        else:
            victim.kill_all()
            saves += bool(victim.hidden())
            everything += 1
            victim.start()
        print(f"kill {one + everything}: {saves} during a save", file=sys.stderr, flush=True)
    victim.wait(lambda: False, "end")
    mine, theirs = trained_on(straight, args.ranks), trained_on(broken, args.ranks)
    again = sum(len(seen) - 1 for seen in theirs.values())
    wrong = [key for key, seen in mine.items() if set(theirs.get(key, [])) != set(seen)]
    a, b = checkpoint_tensors(straight, steps), checkpoint_tensors(broken, steps)
    different = [name for name in a if not a[name].equal(b[name])]
    return {
        "ranks": args.ranks, "steps": steps, "kills": one + everything, "one_rank": one,
        "everything": everything, "during_a_save": saves, "starts_of_torchrun": victim.starts,
        "steps_made_again": again // args.ranks, "steps_with_other_samples_or_loss": len(wrong),
        "tensors_that_differ": len(different), "equal": not wrong and not different,
    }  # fmt: skip


def trained_on(run: Path, ranks: int) -> dict[tuple[int, int], list[tuple[object, ...]]]:
    """By rank and step: samples and loss, once for every time that the step was made."""
    seen: dict[tuple[int, int], list[tuple[object, ...]]] = {}
    for rank in range(ranks):
        for line in (run / f"samples-{rank}.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut short by a kill: the step is made again
                entry = json.loads(line)
                found = (*entry["samples"], entry["loss"])
                seen.setdefault((rank, entry["step"]), []).append(found)
    return seen


if __name__ == "__main__":
    sys.exit(main())
