"""The preset that is there to show spikes."""

import json
import subprocess
import sys

import pytest
from runs.command import ROOT


@pytest.mark.slow
def test_loss_and_gradient_spike(tmp_path):
    run = tmp_path / "run"
    words = ["experiment=large_lr", f"run.dir={run}", "wandb.mode=disabled"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words, f"data.cache_dir={tmp_path / 'cache'}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["spikes/loss_total"] >= 1
    assert summary["spikes/grad_total"] >= 1
