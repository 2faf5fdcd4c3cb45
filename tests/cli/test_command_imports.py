"""Heavy libraries that commands import: counted in a process of their own, after a real command."""

import subprocess
import sys
from pathlib import Path

import pytest
from runs.one_rank import write_checkpoint
from runs.written import study_file, write_arms

RULE = "{kind: difference, arm: v2, against: half, below: 0.0}"
LOSSES = {"half": [4.40, 4.41, 4.39], "v2": [4.30, 4.312, 4.289]}
HEAVY = (
    "datasets", "matplotlib", "scipy", "torch", "torch.distributed.checkpoint", "torchdata",
    "transformers", "wandb",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a study, its ended runs and a checkpoint."""
    place = tmp_path_factory.mktemp("imports")
    study = study_file(place / "study.yaml", RULE)
    write_arms(study, place / "out", LOSSES)
    write_checkpoint(place / "run" / "checkpoints", 3)
    return place


def heavy_after(code: str, place: Path) -> set[str]:
    """The heavy libraries that a new process has imported after this code, which must not fail."""
    script = f"import sys\n{code}\nprint('\\n', *sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=place, capture_output=True, text=True, check=True
    )
    return {*HEAVY} & {*done.stderr.split()}


def heavy_after_command(words: list[str], place: Path) -> set[str]:
    return heavy_after(f"from diffllm.cli import main\nassert main({words}) == 0", place)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["checkpoints", "run=run"],
        ["checkpoints", "run=run", "verify=false"],
    ],
)
def test_command_that_reads_no_config_imports_no_heavy_library(
    place: Path, words: list[str]
) -> None:
    assert heavy_after_command(words, place) == set()


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["power", "out", "gap=0.02"], {"scipy"}),
        (["study", "run", "study.yaml", "out=out", "--dry-run"], set()),
        (["study", "verdict", "study.yaml", "out=out"], {"scipy", "matplotlib"}),
        (["report", "out"], {"scipy", "matplotlib"}),
    ],
)
def test_command_that_reads_configs_imports_only_torch_and_what_it_uses(
    place: Path, words: list[str], allowed: set[str]
) -> None:
    """A config of a run is read with the class of its variant, which the file of the variant
    defines next to its module. So these commands import torch, but not its checkpoints."""
    assert heavy_after_command(words, place) <= {"torch", *allowed}
