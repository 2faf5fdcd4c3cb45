"""Heavy libraries that commands import, measured after a real command in a new process."""

import os
import sys
from pathlib import Path

import pytest
from runs.command import command, success_of
from runs.one_rank import write_checkpoint
from runs.written import study_file, write_arms

from diffllm.cli import COMMANDS

RULE = "{kind: difference, arm: v2, against: half, below: 0.0}"
LOSSES = {"half": [4.40, 4.41, 4.39], "v2": [4.30, 4.312, 4.289]}
HEAVY = (
    "datasets", "matplotlib", "scipy", "torch", "torch.distributed.checkpoint", "torchdata",
    "transformers", "wandb",
)  # fmt: skip
LATER = ("sympy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")


@pytest.fixture(scope="module")
def study_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with a study, finished runs of the study, and a checkpoint."""
    place = tmp_path_factory.mktemp("imports")
    study = study_file(place / "study.yaml", RULE)
    write_arms(study, place / "out", LOSSES)
    write_checkpoint(place / "run" / "checkpoints", 3)
    return place


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["--help"], set()),
        (["--version"], set()),
        (["checkpoints", "run=run"], set()),
        (["checkpoints", "run=run", "verify=false"], set()),
        (["power", "out", "gap=0.02"], {"torch", "scipy"}),
        (["study", "run", "study.yaml", "out=out", "--dry-run"], {"torch"}),
        (["study", "verdict", "study.yaml", "out=out"], {"torch", "scipy", "matplotlib"}),
        (["report", "out"], {"torch", "scipy", "matplotlib"}),
    ],
)
def test_command_does_not_import_unneeded_heavy_libraries(study_directory, words, allowed):
    """Commands that read a config import torch, because the variant's file defines its class."""
    assert {*HEAVY} & output_and_modules(words, study_directory, 0)[1] <= allowed


def test_help_of_commands_imports_no_heavy_libraries(tmp_path):
    """The help of `train` and `prepare` shows defaults of a composed config, which needs torch."""
    names = [name for name in COMMANDS if name not in ("train", "prepare")]
    script = f"""
import sys
from contextlib import redirect_stdout, suppress
from diffllm.cli import main
for name in {names}:
    with suppress(SystemExit), redirect_stdout(sys.stderr):
        assert main([name, "--help"]) == 0
    print(name, *{{*{HEAVY}}} & {{*sys.modules}})
"""
    done = success_of(command([sys.executable, "-c", script], tmp_path, os.environ))
    assert done.out.split() == names
    assert done.err.count("diffllm") >= len(names)


def test_train_command_imports_no_heavy_library_at_start_except_torch(study_directory):
    """The preparation fails after the first line, because all documents are equal."""
    (study_directory / "equal.txt").write_text("a b c\n" * 9, encoding="utf-8")
    words = ["model=tiny", "data.paths=equal.txt", "data.sample_by=line", "data.cache_dir=cache"]
    stdout, loaded = output_and_modules(["train", *words, "run.name=a"], study_directory, 2)
    assert stdout == "run outputs/a: preparing data\n"
    assert {*HEAVY, *LATER} & loaded == {"torch"}


def output_and_modules(words: list[str], place: Path, code: int) -> tuple[str, set[str]]:
    """Run a command in a new process; return stdout and the names of the imported modules."""
    call = f"from diffllm.cli import main\nassert main({words}) == {code}"
    script = f"import sys\n{call}\nprint('\\n', *sys.modules, file=sys.stderr)"
    done = success_of(command([sys.executable, "-c", script], place, os.environ))
    return done.out, {*done.err.split()}
