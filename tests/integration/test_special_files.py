"""Pipes, directories, links, devices and huge files in place of files of a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs.command import tool, train
from tiers import slow_but


def special(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


SPECIAL: dict[str, Callable[[Path], object]] = {
    "fifo": special(os.mkfifo),
    "directory": special(Path.mkdir),
    "loop": special(lambda file: file.symlink_to(file.name)),
    "dangling link": special(lambda file: file.symlink_to("/nonexistent/disk")),
    "device": special(lambda file: file.symlink_to("/dev/zero")),
    "terabyte": lambda file: os.truncate(file, 2**40),
    "unreadable": lambda file: file.chmod(0),
}
STEP = "checkpoints/step-00000004"
CHECKPOINT = ("config.yaml", f"{STEP}/manifest.json", f"{STEP}/state.json", f"{STEP}/.metadata")
RECORDS = ("config.yaml", "metrics.jsonl", "run.json", "summary.json")
READERS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "train": (
        ("metrics.jsonl", "saved.json", f"{STEP}/state.json"),
        ["steps=6", "run.allow_changes=[steps]", "run.dir={run}", "attention=standard"],
    ),
    "checkpoints": (CHECKPOINT, ["run={run}"]),
    "consolidate": ((*CHECKPOINT, "tokenizer.model"), ["run={run}", "out={out}"]),
    "generate": (
        (*CHECKPOINT, "tokenizer.model"), ["run={run}", "prompt=a", "max_new_tokens=2"],
    ),
    "report": (RECORDS, ["{run}", "out={out}"]),
}  # fmt: skip
"""Files that a command reads, and its arguments, by command."""
KINDS = [(command, kind) for command in READERS for kind in SPECIAL]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("command", "kind"), slow_but([("train", "fifo"), ("generate", "loop")], KINDS)
)
def test_command_ignores_or_refuses_special_file_in_run_directory(
    finished_run, tiny, tmp_path, environment, command, kind
):
    (names, words), out = READERS[command], tmp_path / "out"
    for number, name in enumerate(names):
        run = shutil.copytree(finished_run, tmp_path / f"run{number}")
        SPECIAL[kind](run / name)
        given = [word.format(run=run, out=out) for word in words]
        if command == "train":
            result = train([*tiny, *given], tmp_path, environment)
        else:
            result = tool([command, *given], tmp_path, environment)
        assert result.code in ((0, 1, 2) if command == "checkpoints" else (0, 2)), (name, result)
        lines = [line for line in result.err.splitlines() if not line.startswith("warning: ")]
        assert [line[:7] for line in lines] == ["error: "] * (result.code == 2), (name, result)
        shutil.rmtree(out, ignore_errors=True)
