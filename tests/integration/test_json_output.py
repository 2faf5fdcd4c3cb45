"""The JSON of real commands: one value on stdout, with the keys that docs/tools.md lists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from runs.command import Result, tool, train
from runs.json_files import read_json

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def documented_keys(command: str) -> set[str]:
    """Return the documented keys of a command's value, or of each item of its list."""
    row = re.search(rf"^\| `{command}` \| \w+ \| (.*) \|$", PAGE, re.MULTILINE)
    assert row
    return set(re.findall(r"`(\w+)`", row[1].partition(";")[0]))


def value_of(result: Result, code: int = 0) -> Any:
    assert result.code == code, result.err
    return json.loads(result.out)


RUN_COMMANDS = [
    ("generate", ["prompt=def ", "max_new_tokens=3"]),
    ("attention-map", ["prompt=def f", "out=map.png"]),
    ("checkpoints", ["verify=false"]),
    ("outliers", ["tokens=64"]),
    ("consolidate", ["out=consolidated"]),
    ("report", ["out=report"]),
    pytest.param("export", ["out=exported"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("command", "words"), RUN_COMMANDS)
def test_command_on_run_prints_documented_json(tmp_path, environment, finished_run, command, words):
    done = tool([command, f"run={finished_run}", *words, "--json"], tmp_path, environment)
    value = value_of(done)
    first = value[0] if isinstance(value, list) else value
    assert set(first) == documented_keys(command)
    for name in ("map.png", "consolidated", "report/report.csv", "exported"):
        assert (tmp_path / name).exists() == (f"out={name.split('/')[0]}" in words)


@pytest.mark.slow
def test_import_prints_documented_json(tmp_path, environment, finished_run):
    words = ["import", f"hf={finished_run}", "out=imported", "json=true"]
    value = value_of(tool(words, tmp_path, environment))
    assert set(value) == documented_keys("import")
    assert (tmp_path / value["out"] / "config.yaml").is_file()


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_prepare_prints_documented_json(tmp_path, tiny, environment, packing):
    words = ["prepare", *tiny, f"data.packing={packing}", "json=true"]
    value = value_of(tool(words, tmp_path, environment))
    assert set(value) == documented_keys("prepare")
    assert Path(value["directory"], "manifest.json").is_file()
    assert value["splits"]["train"]["tokens"] > 1000
    assert (value["packing"] is None) == (packing == "stream")


def test_train_prints_summary_as_json_and_progress_on_stderr(tmp_path, tiny, environment):
    words = [*tiny, "run.name=a", "--json"]
    first = train(words, tmp_path, environment)
    value = value_of(first)
    summary = read_json(tmp_path / "outputs" / "a" / "summary.json")
    assert value == {"run": "outputs/a", "signal": None, **summary}
    assert re.search(r"^step 4/4  loss ", first.err, re.MULTILINE)
    again = train(words, tmp_path, environment)
    assert value_of(again) == value
    assert again.err.startswith("outputs/a is finished: 4 steps")
    refused = train([*words, "seed=7"], tmp_path, environment)
    assert (refused.code, refused.out) == (2, "")


@pytest.mark.slow
def test_sweep_prints_state_of_each_run_as_json(tmp_path, tiny, environment):
    words = ["-m", *tiny, "attention=standard,gated", "run.sweep=s"]
    # A directory in place of this file lets the second run fail.
    (tmp_path / "outputs" / "s" / "gated" / "config.yaml").mkdir(parents=True)
    done = train([*words, "--json"], tmp_path, environment)
    value = value_of(done, 1)
    assert value["sweep"] == "outputs/s"
    states = {run["run"]: run["state"] for run in value["runs"]}
    assert states == {"outputs/s/standard": "finished", "outputs/s/gated": "failed"}
    assert [run["summary"] is None for run in value["runs"]] == [False, True]
    assert all((tmp_path / file).is_file() for file in value["files"])
    assert "step 4/4" in done.err
