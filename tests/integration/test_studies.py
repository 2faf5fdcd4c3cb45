"""A study from the command line: stopped, resumed and judged."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE_S
from runs.command import (
    assert_same_weights,
    command,
    metric_lines,
    success_of,
    tool_command,
    wait_for,
)
from runs.json_files import read_json, write_json
from runs.written import edit_text

from diffllm.config.saved import load_run_config

pytestmark = pytest.mark.slow


def study_of_two_arms(path: Path, tiny: list[str]) -> Path:
    """Write a study as JSON, which is valid YAML: two arms, two learning rates, two seeds."""
    content = {
        "claim": "half is better",
        "base": [word for word in tiny if not word.startswith("run.")],
        "arms": {"whole": ["attention=standard"], "half": ["attention=standard_half_context"]},
        "baseline": "whole",
        "seeds": [0, 1],
        "lr": {"grid": [1e-3, 2e-3], "seeds": [7], "steps": 2, "extend": 0},
        "rule": {"kind": "difference", "arm": "half", "against": "whole", "below": 0.0},
    }
    write_json(path, content)
    return path


def finished_runs(out: Path) -> set[str]:
    return {str(file.parent.relative_to(out)) for file in out.glob("**/summary.json")}


RATES = [f"rates/{arm}-lr{lr}-seed7" for arm in ("whole", "half") for lr in ("0.001", "0.002")]
DECIDING = [f"{arm}-seed{seed}" for arm in ("whole", "half") for seed in (0, 1)]
STOPS = [
    ("run 1 of ", "KILL"),
    ("run 2 of ", "TERM"),
    ("run 1 of ", "INT"),
    ("out: 4 runs remain", "KILL"),  # the first stage has ended
    ("run 2 of ", "KILL"),
]
"""Lines of the output, and the signal after each line."""


def summary_times(out: Path) -> dict[str, int]:
    return {name: (out / name / "summary.json").stat().st_mtime_ns for name in finished_runs(out)}


def test_interrupted_study_matches_uninterrupted_study(tmp_path, tiny, environment):
    path, out = study_of_two_arms(tmp_path / "study.yaml", tiny), tmp_path / "out"
    words = tool_command(["study", "run", str(path), f"out={out}"])
    before: dict[str, int] = {}
    for line, name in STOPS:
        process = subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        assert any(line in said for said in iter(process.stdout.readline, "")), line
        wait_for(lambda: any(out.rglob("config.yaml")), process, "begun run")
        number = getattr(signal, f"SIG{name}")
        os.kill(process.pid, number)
        if name == "KILL":  # the run still saves and locks its directory
            process.wait(PATIENCE_S)
        else:
            output = process.communicate(timeout=PATIENCE_S)[0]
            assert process.returncode == 128 + number, output
            assert "the same command resumes them" in output
            assert not re.search("Traceback|SIGTERM" if name == "INT" else "Traceback", output)
        assert summary_times(out).items() >= before.items(), line
        before = summary_times(out)

    result = success_of(command(words, tmp_path, environment))
    assert "all runs of" in result.out
    assert summary_times(out).items() >= before.items()
    assert finished_runs(out) == {*RATES, *DECIDING}

    undisturbed = tmp_path / "undisturbed"
    again = tool_command(["study", "run", str(path), f"out={undisturbed}"])
    assert command(again, tmp_path, environment).code == 0
    for name in (*RATES, *DECIDING):
        assert metric_lines(out / name) == metric_lines(undisturbed / name), name
        step = metric_lines(out / name)[-1]["step"]
        assert_same_weights(out / name, undisturbed / name, step)

    for name in (*RATES, *DECIDING):
        facts = read_json(out / name / "run.json")
        row = name.removeprefix("rates/").rpartition("-seed")[0]
        assert facts["wandb_group"] == row.replace("-lr", " lr=")
        variables = facts["environment"]["variables"]
        assert variables["DIFFLLM_WANDB_NAME"] == name
        assert variables["DIFFLLM_WANDB_TAGS"] == "out,study"

    mark = load_run_config(out / "half-seed0").run.study
    assert mark
    assert mark.split("/")[1:] == ["deciding", "half"]

    words = tool_command(["study", "verdict", str(path), f"out={out}", "--json"])
    result = success_of(command(words, tmp_path, environment))
    found = json.loads(result.out)
    rates = {arm: each["losses"] for arm, each in found["learning_rates"].items()}
    at_the_end = {arm: min(losses, key=losses.get) for arm, losses in rates.items()}
    assert found["verdict"] == "not comparable", "the best learning rate is at an end of the grid"
    assert {arm: f"{each['lr']:g}" for arm, each in found["arms"].items()} == at_the_end
    losses = read_json(out / "half-seed1" / "summary.json")["heldout_loss"]
    assert found["arms"]["half"]["values"]["1"] == losses

    edit_text(path, "half is better", "half is no worse")
    result = command(words, tmp_path, environment)
    assert json.loads(result.out)["verdict"] == "exploratory"
