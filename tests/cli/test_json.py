"""`--json` and `json=true` of all commands, as documented in docs/tools.md."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs.json_files import write_json
from runs.written import study_file, write_arms

import diffllm
from diffllm.cli import COMMANDS, run, train
from diffllm.core.standard_streams import messages_on_stderr
from diffllm.training.run import Outcome

PAGE = Path(diffllm.__file__).parents[1] / "docs" / "tools.md"
RULE = "{kind: difference, arm: v2, against: half, below: 0.0}"
LOSSES = {"standard": [4.5, 4.51, 4.49], "half": [4.4, 4.41, 4.39], "v2": [4.3, 4.312, 4.289]}
FULL_NAMES = [*(name for name in COMMANDS if name != "study"), "study run", "study verdict"]


@pytest.mark.parametrize("name", FULL_NAMES)
def test_every_command_accepts_both_spellings_of_json(name, error_of):
    """An accepted word does not change the error about another word."""
    words, wrong = name.split(), "--nonsense"
    expected = error_of(*words, wrong)
    assert wrong in expected
    for word in ("--json", "json=true", "--json=true", "json=false"):
        assert error_of(*words, word, wrong) == expected
    assert "--jsn" in error_of(*words, "--jsn", wrong)
    assert "json='yes' must be true or false" in error_of(*words, "json=yes")


def test_every_command_has_documented_json():
    rows = re.findall(
        r"^\| `([\w -]+?)` \| (?:object|list) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {re.sub(r" --?[a-z].*", "", row) for row in rows} == {*FULL_NAMES}


@pytest.mark.parametrize(
    ("outcome", "expected", "status"),
    [
        (Outcome(Path("a"), {"steps": 3}), {"run": "a", "signal": None, "steps": 3}, 0),
        (Outcome(Path("a"), stopped=signal.SIGTERM), {"run": "a", "signal": "SIGTERM"}, 0),
        (Outcome(None, stopped=signal.SIGINT), {"run": None, "signal": "SIGINT"}, 130),
    ],
)
def test_json_of_train_names_run_and_signal(monkeypatch, capsys, outcome, expected, status):
    def run_and_report(cfg: Any) -> Outcome:
        print("step 1")
        return outcome

    monkeypatch.setattr(run, "run_and_report", run_and_report)
    assert train.train_command(["model=tiny", "--json"]) == status
    out, err = capsys.readouterr()
    assert json.loads(out) == expected
    assert err == "step 1\n"


def test_json_of_study_lists_costs_and_runs(tmp_path, monkeypatch, output_of):
    monkeypatch.setenv("PYTHONPATH", "")  # the command sets it for its runs
    study, out = study_file(tmp_path / "study.yaml", RULE), tmp_path / "out"
    write_arms(study, out, LOSSES)
    write_json(out / "sweep.json", {"runs": {"v2-seed1": ["run.study=a"]}})
    words = ["study", "run", str(study.path), f"out={out}", "json=true"]
    planned = json.loads(output_of(*words, "--dry-run"))
    assert {stage["arm"]: stage["ended"] for stage in planned["stages"]} == dict.fromkeys(LOSSES, 3)
    assert planned["left"] == {"runs": 0, "tokens": 0, "flops": 0}
    value = json.loads(output_of(*words))
    (run_of_study,) = value.pop("runs")
    assert value == {"study": str(out), "signal": None}
    assert run_of_study["state"] == "finished"
    assert run_of_study["summary"]["heldout_loss"] in LOSSES["v2"]


def test_json_of_composed_config_is_the_yaml_config(output_of):
    config = json.loads(output_of("train", "--cfg", "job", "model=tiny", "--resolve", "--json"))
    assert config["model"]["seq_len"] == config["seq_len"] == 512
    assert config["wandb"]["mode"] == "auto"


def test_output_of_child_processes_is_on_stderr_in_json_mode(capfd):
    with messages_on_stderr(True):
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
        os.write(1, b"library\n")
        print("message")
    print("value")
    out, err = capfd.readouterr()
    assert out == "value\n"
    assert sorted(err.split()) == ["child", "library", "message"]
