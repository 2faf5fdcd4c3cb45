"""A study that is really run: stopped, gone on with, judged."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE_S
from runs.command import command, tool_command, wait_for

from diffllm.config.saved import load_run_config

pytestmark = pytest.mark.slow


def study_file(path: Path, tiny: list[str]) -> Path:
    """A YAML, which is JSON too: two arms, a learning rate each, two seeds."""
    content = {
        "claim": "half is better",
        "base": [word for word in tiny if not word.startswith("run.")],
        "arms": {"whole": ["attention=standard"], "half": ["attention=standard_half_context"]},
        "baseline": "whole",
        "seeds": [0, 1],
        "lr": {"grid": [1e-3, 2e-3], "seeds": [7], "steps": 2, "extend": 0},
        "rule": {"kind": "difference", "arm": "half", "against": "whole", "below": 0.0},
    }
    path.write_text(json.dumps(content))
    return path


def ended(out: Path) -> set[str]:
    return {str(file.parent.relative_to(out)) for file in out.glob("**/summary.json")}


def test_a_study_is_stopped_gone_on_with_and_judged(tmp_path, tiny, environment):
    path, out = study_file(tmp_path / "study.yaml", tiny), tmp_path / "out"
    words = tool_command(["study", "run", str(path), f"out={out}"])
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(ended(out)) > 1, process, "two ended runs")
    os.kill(process.pid, signal.SIGINT)
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 128 + signal.SIGINT, output
    assert "the same command resumes them" in output
    before = {name: (out / name / "summary.json").stat().st_mtime_ns for name in ended(out)}
    assert all(name.startswith("rates/") for name in before)

    result = command(words, tmp_path, environment)
    assert result.code == 0, result.err
    assert "all runs of" in result.out
    assert {name: (out / name / "summary.json").stat().st_mtime_ns for name in before} == before
    assert ended(out) == {
        *(f"rates/{arm}-lr{lr}-seed7" for arm in ("whole", "half") for lr in ("0.001", "0.002")),
        *(f"{arm}-seed{seed}" for arm in ("whole", "half") for seed in (0, 1)),
    }
    mark = load_run_config(out / "half-seed0").run.study
    assert mark
    assert mark.split("/")[1:] == ["deciding", "half"]

    words = tool_command(["study", "verdict", str(path), f"out={out}", "--json"])
    result = command(words, tmp_path, environment)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    rates = {arm: each["losses"] for arm, each in found["learning_rates"].items()}
    at_the_end = {arm: min(losses, key=losses.get) for arm, losses in rates.items()}
    assert found["verdict"] == "not comparable", "of two rates, the best is at an end"
    assert {arm: f"{each['lr']:g}" for arm, each in found["arms"].items()} == at_the_end
    losses = json.loads((out / "half-seed1" / "summary.json").read_text())["heldout_loss"]
    assert found["arms"]["half"]["values"]["1"] == losses

    path.write_text(path.read_text().replace("half is better", "half is no worse"))
    result = command(words, tmp_path, environment)
    assert json.loads(result.out)["verdict"] == "exploratory"
