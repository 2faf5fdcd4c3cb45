"""Trainer of transformers trains exports, in a process without diffllm."""

import subprocess
import sys
from pathlib import Path

import pytest
from exported_runs import CASES
from runs.json_files import read_json

from diffllm.cli import main

pytest.importorskip("transformers", "5")
pytest.importorskip("accelerate")
TRAINED = (
    "standard", "diff_v1", "qk_norm", "qwen_mixture",
    "diff_v2", "diff_v2_lambda_scalar", "diff_v1_clamped", "gated", "gated_headwise",
    "standard_sink", "standard_off_by_one", "mixture", "yarn",
)  # fmt: skip
"""Cases of all architectures of transformers, and of all code of the modelling file."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_trainer_reduces_loss_of_exported_model_in_ten_steps(make_run, tmp_path):
    for name in TRAINED:
        run = make_run(name, *CASES[name][1])
        assert main(["export", f"run={run}", f"out={tmp_path / 'hf' / name}"]) == 0
    script, out = str(Path(__file__).with_name("training.py")), tmp_path / "out.json"
    directories = [str(tmp_path / "hf" / name) for name in TRAINED]
    command = [sys.executable, script, *directories, str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    for name, found in zip(TRAINED, read_json(out), strict=True):
        losses = found["losses"]
        assert len(losses) == 10, name
        assert losses[-1] < losses[0] - 1, (name, losses)
        assert found["kept"] == 0, name
        assert found["gradients"] < 1e-5 * max(1, found["largest"]), (name, found)
