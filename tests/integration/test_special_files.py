"""Commands print one error line for special files in a run directory, and never hang."""

import shutil
from itertools import cycle

import pytest
from hostile.damage import SPECIAL
from runs.command import tool, train
from tiers import slow_but

STEP = "checkpoints/step-00000004"
CHECKPOINT = ("config.yaml", f"{STEP}/manifest.json", f"{STEP}/state.json", f"{STEP}/.metadata")
RECORDS = ("config.yaml", "metrics.jsonl", "run.json", "summary.json")
READERS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "train": (
        ("metrics.jsonl", "saved.json", f"{STEP}/state.json"),
        ["steps=6", "run.allow_changes=[steps]", "run.dir={run}", "attention=standard"],
    ),
    "checkpoints": (CHECKPOINT, ["run={run}"]),
    "consolidate": (("tokenizer.model", *CHECKPOINT), ["run={run}", "out={out}"]),
    "generate": (
        (*CHECKPOINT, "tokenizer.model"), ["run={run}", "prompt=a", "max_new_tokens=2"],
    ),
    "report": (RECORDS, ["{run}", "out={out}"]),
}  # fmt: skip
"""Files that a command reads, and its arguments, by command."""


@pytest.mark.parametrize("command", slow_but(["train", "generate"], READERS))
def test_command_ignores_or_refuses_special_file_in_run_directory(
    finished_run, tiny, tmp_path, environment, command
):
    """Each file gets another kind; the readers of the files are tested with all kinds."""
    (names, words), out = READERS[command], tmp_path / "out"
    for name, kind in zip(names, cycle(["fifo", "terabyte", "loop", "device"])):
        run = shutil.copytree(finished_run, tmp_path / kind / name)
        SPECIAL[kind](run / name)
        arguments = [word.format(run=run, out=out) for word in words]
        if command == "train":
            result = train([*tiny, *arguments], tmp_path, environment)
        else:
            result = tool([command, *arguments], tmp_path, environment)
        assert result.code in ((0, 1, 2) if command == "checkpoints" else (0, 2)), (name, result)
        lines = [line for line in result.err.splitlines() if not line.startswith("warning: ")]
        assert [line[:7] for line in lines] == ["error: "] * (result.code == 2), (name, result)
        shutil.rmtree(out, ignore_errors=True)
