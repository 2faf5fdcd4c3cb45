"""Run train.py with a planted fault, and record its samples.

Usage: `python planted_train.py FAULT RANK STEP overrides...`. The fault happens on that rank at the
start of that step; `none` plants no fault. `scramble` replaces the tokens of that step, and of
every tenth later step, by random tokens, which gives a spike. Every rank appends a line per step to
the file samples-<rank>.jsonl in the directory $SAMPLES (default: run.dir): the step, a hash of each
sequence, and the loss.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """Kind, rank and step of a fault."""

    kind: str = "none"
    rank: int = 0
    step: int = 0


def entry_module() -> ModuleType:
    """Return train.py as a module."""
    spec = importlib.util.spec_from_file_location("entry", ROOT / "train.py")
    assert spec
    assert spec.loader
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    return entry


def main(fault: Fault, words: list[str]) -> int:
    """Run train.py with a planted fault and overrides; return its exit code."""
    entry = entry_module()
    import diffllm.cli.run as command
    import diffllm.training.loop as trainer
    import diffllm.training.measure as heldout
    import diffllm.training.run as run
    from diffllm.checkpoint import writer
    from diffllm.training import process, start, state

    rank, trained = int(os.environ.get("RANK", "0")), threading.Event()
    (directory,) = [word.partition("=")[2] for word in words if word.startswith("run.dir=")]
    samples = Path(os.environ.get("SAMPLES", directory))
    real_step, real_run = trainer.train_step, command.run
    real_add = heldout.DocumentSums.add

    def train_step(t: Any, batches: Iterator[Any], step: int, *args: Any) -> Any:
        trained.set()
        if step + 1 == fault.step and rank == fault.rank:
            strike()
            STRIKES[fault.kind](t)
        wait_at_gate(Path(directory) / f"gate-{step + 1}")
        seen: list[str] = []
        batches = noted(batches, seen)
        steps_since = step + 1 - fault.step
        if fault.kind == "scramble" and steps_since >= 0 and steps_since % 10 == 0:
            strike()
            batches = scrambled(batches)
        out = real_step(t, batches, step, *args)
        line = {"step": step + 1, "samples": seen, "loss": out.nll.item()}
        with (
            contextlib.suppress(FileNotFoundError),  # a test may remove the run directory
            open(samples / f"samples-{rank}.jsonl", "a", encoding="utf-8") as log,
        ):
            log.write(json.dumps(line) + "\n")
        return out

    def other_seed(cfg: Any, *args: Any) -> Any:
        strike()
        cfg.seed += 1
        return real_run(cfg, *args)

    def add(sums: Any, batch: Any) -> None:
        wait_at_gate(Path(directory) / "gate-heldout")
        real_add(sums, batch)

    replace_attribute(trainer, "train_step", train_step)
    replace_attribute(heldout.DocumentSums, "add", add)
    if rank == fault.rank:
        if fault.kind == "seed":
            replace_attribute(command, "run", other_seed)
        elif fault.kind == "code":
            other = {"diffllm": "another", "torch": torch.__version__}
            replace_attribute(start, "code_version", lambda: strike(other))
        elif fault.kind == "corpus":
            facts = start.corpus_facts
            replace_attribute(
                start, "corpus_facts", lambda data: strike({**facts(data), "tokens": "others"})
            )
        elif fault.kind == "slow claim":
            replace_attribute(state, "resume_checkpoint", sleep)
        elif fault.kind == "slow save":
            slow_down(writer.TensorWriter, "write_data", 20)
        elif fault.kind == "endless second save":
            endless_second_call(writer.TensorWriter, "write_data")
        elif fault.kind == "slow end":
            slow_down(process.Display, "stop", 8)
        elif fault.kind == "broken build":
            replace_attribute(run, "build", raise_error)
        elif fault.kind == "start":
            replace_attribute(run, "build", sleep)
    sys.argv[1:] = words
    try:
        return entry.main()
    finally:
        # Without a trained step, a signal stopped the run before the fault.
        if fault.kind != "none" and rank == fault.rank and trained.is_set() and not STRUCK:
            os.write(2, b"planted_train.py: the planted fault did not happen\n")
            os._exit(99)


STRUCK: list[bool] = []
"""Contains an item after the planted fault has happened in this process."""


def strike(result: Any = None) -> Any:
    """Record that the fault has happened, and return `result`."""
    STRUCK.append(True)
    return result


def replace_attribute(owner: Any, name: str, value: Any) -> None:
    """Replace an existing attribute; fail if the attribute has moved, so that no fault is lost."""
    assert hasattr(owner, name), f"{owner} has no attribute {name}"
    setattr(owner, name, value)


def noted(batches: Iterator[Any], seen: list[str]) -> Iterator[Any]:
    for inputs, targets in batches:
        # Stored hashes are from versions in which all ignored targets were -1.
        rows = torch.cat((inputs, targets[:, -1:].clamp_min(-1)), dim=1).numpy()
        seen += [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in rows]
        yield inputs, targets


def scrambled(batches: Iterator[Any]) -> Iterator[Any]:
    for inputs, targets in batches:
        yield torch.randint_like(inputs, 300), torch.randint_like(targets, 300)


def wait_at_gate(gate: Path) -> None:
    """Write "reached" into the gate's file, and wait until a test removes the file."""
    while gate.exists():
        with contextlib.suppress(FileNotFoundError), open(gate, "r+", encoding="utf-8") as file:
            file.write("reached")
        time.sleep(0.005)


def slow_down(owner: Any, name: str, seconds: float) -> None:
    """Delay every call of a method."""
    real = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        strike()
        time.sleep(seconds)
        return real(*args, **kwargs)

    replace_attribute(owner, name, late)


def hang() -> None:
    # A signal just before one long sleep would wait until its end.
    while True:
        time.sleep(0.05)


def endless_second_call(owner: Any, name: str) -> None:
    """Make the second call of a method hang."""
    real, calls = getattr(owner, name), itertools.count()

    def once(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            strike()
            hang()
        return real(*args, **kwargs)

    replace_attribute(owner, name, once)


def raise_error(*_: Any) -> None:
    strike()
    raise ValueError("a planted error")


def sleep(*_: Any) -> None:
    strike()
    hang()


def perturb(t: Any) -> None:
    """Flip the lowest bit of one value in a tensor that other ranks replicate."""
    tensor = t.params["layers.1.attention.wq.weight"].to_local()
    with torch.no_grad():
        tensor.view(torch.int32)[0, 0] ^= 1


STRIKES: dict[str, Callable[[Any], Any]] = {
    "hang": sleep,
    "die": lambda t: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda t: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": raise_error,
    "perturb": perturb,
    "scramble": strike,
}

if __name__ == "__main__":
    kind, rank, step, *overrides = sys.argv[1:]
    sys.exit(main(Fault(kind, int(rank), int(step)), overrides))
