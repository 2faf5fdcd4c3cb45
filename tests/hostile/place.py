"""A finished run, a sweep of two and their corpus, of which every case gets a copy of its own."""

import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hostile import commands

if TYPE_CHECKING:
    from diffllm.data import Prepared

SECRET = b"nobody reads this\n" * 20


@dataclass(frozen=True)
class Place:
    """A directory to work in, and what its commands need."""

    path: Path
    environment: Mapping[str, str]
    tiny: tuple[str, ...]
    """Overrides of a run that takes a moment, but for its name."""

    @property
    def run(self) -> Path:
        return self.path / "outputs" / "run"

    @property
    def sweep(self) -> Path:
        return self.path / "outputs" / "sweep"

    @property
    def outside(self) -> Path:
        """A directory that no command has a reason to write to."""
        return self.path / "outside"

    def copied(self, to: Path) -> "Place":
        """Return a copy for one case, whose files it may damage; the corpus is shared."""
        shutil.copytree(self.path, to, symlinks=True)
        return Place(to, self.environment, self.tiny)


def corpus(path: Path, count: int = 300) -> Path:
    """Write documents of small functions as JSON lines."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(120)]

    def function() -> str:
        name, a, b, c = rng.sample(words, 4)
        return f"def {name}({a}, {b}):\n    {c} = {a}[{rng.randrange(9)}] + {b}\n    return {c}\n"

    with path.open("w") as file:
        for _ in range(count):
            text = "\n".join(function() for _ in range(5))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def make(directory: Path) -> Place:
    """Train the run and the sweep; raises RuntimeError where that fails."""
    shared, path = directory / "shared", directory / "place"
    for made in (shared, path / "outside"):
        made.mkdir(parents=True)
    (path / "outside" / "secret.txt").write_bytes(SECRET)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    environment = {
        **kept, "DIFFLLM_CACHE": str(shared / "cache"), "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HOME": str(path),
    }  # fmt: skip
    place = Place(path, environment, tiny(corpus(shared / "corpus.jsonl")))
    for words in (
        ["run.name=run", "run.report=true"],
        ["-m", "run.sweep=sweep", "seed=0,1"],
    ):
        ended = commands.forked(train, [*words, *place.tiny], path, environment)
        if ended.code != 0:
            raise RuntimeError(f"{words} ended with {ended.code}: {ended.out}{ended.err}")
    for name in ("said-out", "said-err"):
        (path / name).unlink(missing_ok=True)
    return place


def tiny(data: Path) -> tuple[str, ...]:
    """Return overrides of a run of four steps."""
    return (
        "model=tiny", "model.vocab_size=512", "data=files", f"data.paths=[{data}]",
        "data.num_workers=0", "data.heldout_fraction=0.1", "seq_len=32", "global_batch_size=4",
        "steps=4", "optim.warmup_steps=1", "log_interval=2", "diagnostics.interval=2",
        "eval.interval=2", "eval.sequences=4", "eval.tokens=200", "checkpoint.interval=2",
        "wandb.mode=disabled", "run.report=false",
    )  # fmt: skip


def train(words: object) -> int:
    """Be `train.py` with these words."""
    import sys

    from diffllm.cli import train

    sys.argv = ["train.py", *words]  # type: ignore[misc]
    return train.main()


def tool(words: object) -> int:
    """Be `diffllm` with these words."""
    from diffllm import cli as tools

    return tools.main(list(words))  # type: ignore[call-overload]


def texts(words: object) -> int:
    """Print the texts that were prepared for these overrides, sorted, as JSON."""
    from diffllm import load_config
    from diffllm.data import prepare

    data = prepare(load_config(list(words)).data)  # type: ignore[call-overload]
    print(json.dumps(documents(data)))
    return 0


def documents(data: "Prepared") -> list[str]:
    """List the texts of both splits, sorted."""
    read, found = data.tokenizer(), []
    for split in ("train", "heldout"):
        stream = data.split(split)
        document: list[int] = []
        for token in stream.tokens(0, len(stream)).tolist():
            if token == read.eos_id:
                found.append(read.decode(document))
                document = []
            else:
                document.append(token)
    return sorted(found)
