"""Whole runs of train.py in processes of their own, on a small corpus."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from diffllm import load_config
from diffllm.checkpoint import load_tensors, read_state
from diffllm.data import prepare

ROOT = Path(__file__).parents[2]
PERF = ("perf/",)


def write_corpus(directory: Path) -> Path:
    """A few hundred documents of arithmetic prose, as jsonl."""
    path = directory / "corpus.jsonl"
    with open(path, "w") as file:
        for i in range(400):
            words = " ".join(f"{i % 7} times {k} is {i % 7 * k}, so" for k in range(i % 13 + 4))
            file.write(json.dumps({"text": f"Document {i}: {words} the end.\n"}) + "\n")
    return path


def prepared_corpus(directory: Path) -> Path:
    """The same, with its tokens in the cache."""
    path = write_corpus(directory)
    prepare(load_config(overrides_of(path, directory / "none")).data)
    return path


def command(corpus: Path, run: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """The command line of a small run."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(ROOT / "train.py"), *overrides_of(corpus, run), *overrides]


def overrides_of(corpus: Path, run: Path) -> list[str]:
    """What makes a run small."""
    return [
        "data=files",
        f"data.paths=[{corpus}]",
        f"data.cache_dir={corpus.parent / 'cache'}",
        "model=tiny",
        "model.vocab_size=512",
        "data.vocab_size=300",
        "seq_len=128",
        "global_batch_size=8",
        "optim.warmup_steps=5",
        "eval.sequences=4",
        "wandb.mode=disabled",
        "run.report=false",
        f"run.dir={run}",
    ]


def start(words: list[str]) -> subprocess.Popen:
    """The run, in a process group of its own."""
    env = dict(os.environ)
    if "torch.distributed.run" in words:
        env["OMP_NUM_THREADS"] = "1"  # as torchrun would, without saying so; else all cores
    return subprocess.Popen(
        words,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """Its output, once it has ended with this exit code."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def kill_everything(process: subprocess.Popen) -> None:
    """SIGKILL to the run and to every process below it; torchrun's workers have own sessions."""
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(parent: int, deep: bool = True) -> list[int]:
    """Process ids of children, and if `deep` of grandchildren and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(ppid, []).append(int(path.name))
    found = list(children.get(parent, []))
    for pid in found if deep else []:
        found += children.get(pid, [])
    return found


def pid_of_rank(process: subprocess.Popen, rank: int) -> int:
    """The training process of one rank below a launcher."""
    for pid in descendants(process.pid):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise AssertionError(f"no process of rank {rank}")


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    """Poll until `condition()`; the run must not end before."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"the run ended before {what}:\n{process.stdout.read()}"
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.005)


def metric_lines(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the machine's speed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(PERF)} for line in lines]


def checkpoint_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every parameter of a checkpoint, whole."""
    path = run / "checkpoints" / f"step-{step:08d}"
    shapes = read_state(path)["parameters"]
    tensors = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
    load_tensors(path, tensors, no_dist=True)
    return tensors


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    mine, theirs = checkpoint_tensors(one, step), checkpoint_tensors(other, step)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def reached(run: Path, step: int) -> bool:
    """Whether a step's line has been written."""
    file = run / "metrics.jsonl"
    return file.exists() and f'"step": {step},' in file.read_text()
