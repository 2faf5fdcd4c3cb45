"""Provenance in run.json: command, commit and environment, without secrets."""

import json
import subprocess
from pathlib import Path

import pytest

from diffllm.core.git import git_state
from diffllm.core.secrets import command_text
from diffllm.training.provenance import provenance


def git(directory: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", directory, *who, *words]
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    return done.stdout.strip()


def test_git_state_returns_commit_and_detects_uncommitted_changes(tmp_path):
    git(tmp_path, "init")
    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("a = 1\n", encoding="utf-8")
    assert git_state(package) is None  # The package has no tracked files yet.
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(package) == {"commit": commit, "dirty": False}
    (package / "other.py").write_text("b = 1\n", encoding="utf-8")
    assert git_state(package) == {"commit": commit, "dirty": False}
    (package / "code.py").write_text("a = 2\n", encoding="utf-8")
    assert git_state(package) == {"commit": commit, "dirty": True}


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["python", "train.py", "data.paths=[a b.txt]"], "python train.py 'data.paths=[a b.txt]'"),
        (["python", "x.py", "--api-key", "hidden", "seed=1"], "python x.py --api-key ... seed=1"),
        (["python", "x.py", "--hf_token=hidden"], "python x.py --hf_token=..."),
    ],
)
def test_recorded_command_line_hides_values_of_secret_options(argv, shown):
    assert command_text(argv) == shown


def test_provenance_records_only_relevant_environment_variables(monkeypatch):
    kept = ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "HF_HUB_OFFLINE")
    left = ("HF_TOKEN", "WANDB_API_KEY", "HOME", "DIFFLLM_API_KEY", "TORCH_SECRET", "HTTP_PROXY")
    for name in (*kept, *left):
        monkeypatch.setenv(name, f"value of {name}")
    found = json.loads(json.dumps(provenance()))
    assert found["environment"]["variables"].items() >= {n: f"value of {n}" for n in kept}.items()
    assert not any(f"value of {name}" in json.dumps(found) for name in left)
    assert found["environment"]["packages"]["torch"].startswith("2.")
