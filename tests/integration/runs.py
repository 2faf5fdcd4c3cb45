"""Small runs of train.py: their corpus, their overrides, and what they leave behind."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import torch
from processes import wait_until

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
    """The command line of a small run, for what cannot be forked."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(ROOT / "train.py"), *overrides_of(corpus, run), *overrides]


def overrides_of(corpus: Path, run: Path) -> list[str]:
    """Return overrides that make a run small."""
    return [
        "data=files",
        f"data.paths=[{corpus}]",
        f"data.cache_dir={corpus.parent / 'cache'}",
        "model=tiny",
        "model.vocab_size=512",
        "data.vocab_size=300",
        "seq_len=64",
        "global_batch_size=8",
        "optim.warmup_steps=5",
        "eval.sequences=4",
        "eval.tokens=200",
        "wandb.mode=disabled",
        "run.report=false",
        f"run.dir={run}",
    ]


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


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    """Poll until `condition()`; the process must not end before."""

    def met() -> bool:
        found = bool(condition())
        assert found or process.poll() is None, f"the process ended before {what}"
        return found

    wait_until(met, what)


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
