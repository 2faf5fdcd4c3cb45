"""Running the commands, in this process or as real ones, and proving what they left alone."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from processes import PATIENCE_S

REPO = Path(__file__).parents[2]
TRAIN = REPO / "train.py"


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


@cache
def train_module() -> ModuleType:
    """train.py, imported once."""
    spec = importlib.util.spec_from_file_location("diffllm_train_entry", TRAIN)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(main: Callable[[], int], capfd: pytest.CaptureFixture[str]) -> Result:
    """Run `main` here as its process would: an exception is a traceback and exit code 1."""
    capfd.readouterr()
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    captured = capfd.readouterr()
    return Result(code, captured.out, captured.err)


def command(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: int = PATIENCE_S
) -> Result:
    """Run a real command; its output is piped."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def train_command(words: Sequence[str]) -> list[str]:
    """`python train.py ...` with this interpreter."""
    return [sys.executable, str(TRAIN), *words]


def tool_command(words: Sequence[str]) -> list[str]:
    """`diffllm ...`: the console script beside this interpreter."""
    return [str(Path(sys.executable).with_name("diffllm")), *words]


def clean_environment(cache_dir: Path) -> dict[str, str]:
    """This environment without what a launcher would have set, with a cache of its own."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "DIFFLLM_CACHE": str(cache_dir), "OMP_NUM_THREADS": "1"}


def snapshot(*roots: Path) -> dict[str, str]:
    """Every file and directory under `roots`, with its times: whatever is written changes one.

    Size and times of a lock file are ignored, because its content names the last holder.
    """
    entries: dict[str, str] = {}
    for root in roots:
        entries[str(root)] = describe(root)
        entries |= {str(path): describe(path) for path in root.rglob("*")}
    return entries


def describe(path: Path) -> str:
    """The kernel sets the time of the last change; no program can set it back."""
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if not path.exists():
        return "absent"
    if path.is_dir():
        return "directory"
    found = path.stat()
    if path.suffix == ".lock" or path.name == ".lock":
        return "lock"
    return f"{found.st_size} bytes, inode {found.st_ino}, {found.st_mtime_ns}, {found.st_ctime_ns}"


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List entries that appeared, vanished or changed between two snapshots."""
    return [
        f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def documents(count: int, seed: int = 0) -> list[str]:
    """Distinct small functions that fill a vocabulary of 512 pieces."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(3, 7))) for _ in range(120)]

    def function() -> str:
        name, a, b, c = rng.sample(words, 4)
        return f"def {name}({a}, {b}):\n    {c} = {a}[{rng.randrange(9)}] + {b}\n    return {c}\n"

    return ["\n".join(function() for _ in range(5)) for _ in range(count)]


def write_jsonl(path: Path, texts: Sequence[str], column: str = "text") -> Path:
    """One {"<column>": ..., "n": ...} a line."""
    lines = [json.dumps({column: text, "n": i}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half done
