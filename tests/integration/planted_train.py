"""train.py with a fault planted and its samples recorded.

As a command: `python planted_train.py FAULT RANK STEP overrides...`. The fault strikes that rank as
it begins that step; `none` plants nothing. Every rank appends what it trained on to
samples-<rank>.jsonl in the directory given by run.dir=: the step, a hash of each sequence, and the
loss.
"""

import hashlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """What goes wrong, where and when."""

    kind: str = "none"
    rank: int = 0
    step: int = 0


def main(fault: Fault, words: list[str]) -> int:
    """What train.py does with these overrides, faults and all."""
    spec = importlib.util.spec_from_file_location("entry", ROOT / "train.py")
    assert spec
    assert spec.loader
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    import diffllm.run.start as run
    import diffllm.trainer as trainer
    from diffllm.checkpoint import writer
    from diffllm.run import continuation, session

    rank = int(os.environ.get("RANK", "0"))
    (directory,) = [word.partition("=")[2] for word in words if word.startswith("run.dir=")]
    real_step, real_run = trainer.train_step, run.run

    def train_step(t: Any, batches: Iterator[Any], step: int, *args: Any) -> Any:
        if step + 1 == fault.step and rank == fault.rank:
            STRIKES[fault.kind](t)
        seen: list[str] = []
        out = real_step(t, noted(batches, seen), step, *args)
        with open(Path(directory) / f"samples-{rank}.jsonl", "a") as log:
            line = {"step": step + 1, "samples": seen, "loss": out.nll.item()}
            log.write(json.dumps(line) + "\n")
        return out

    def other_seed(cfg: Any) -> None:
        cfg.seed += 1
        real_run(cfg)

    trainer.train_step = train_step
    if rank == fault.rank:
        if fault.kind == "seed":
            run.run = other_seed
        elif fault.kind == "code":
            session.code_version = lambda: {"diffllm": "another", "torch": torch.__version__}
        elif fault.kind == "corpus":
            real_facts = session.corpus_facts
            session.corpus_facts = lambda data: {**real_facts(data), "tokens": "others"}
        elif fault.kind == "slow claim":
            continuation.resume_checkpoint = lambda *_: time.sleep(60)
        elif fault.kind == "slow save":
            slow(writer.TensorWriter, "write_data", 20)
        elif fault.kind == "slow end":
            slow(session.Display, "stop", 8)
        elif fault.kind == "broken build":
            run.build = raise_error
        elif fault.kind == "start":
            run.build = lambda *args: time.sleep(3600)
    sys.argv[1:] = words
    return entry.main()


def noted(batches: Iterator[Any], seen: list[str]) -> Iterator[Any]:
    for inputs, targets in batches:
        rows = torch.cat((inputs, targets[:, -1:]), dim=1).numpy()
        seen += [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in rows]
        yield inputs, targets


def slow(owner: Any, name: str, seconds: float) -> None:
    """Have a method begin late."""
    real = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    setattr(owner, name, late)


def raise_error(*_: Any) -> None:
    raise ValueError("a planted error")


def perturb(t: Any) -> None:
    """Another lowest bit in one value of a tensor that other ranks hold too."""
    tensor = t.params["layers.1.attention.wq.weight"].to_local()
    with torch.no_grad():
        tensor.view(torch.int32)[0, 0] ^= 1


STRIKES: dict[str, Callable[[Any], Any]] = {
    "hang": lambda t: time.sleep(3600),
    "die": lambda t: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda t: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": raise_error,
    "perturb": perturb,
}

if __name__ == "__main__":
    kind, rank, step, *overrides = sys.argv[1:]
    sys.exit(main(Fault(kind, int(rank), int(step)), overrides))
