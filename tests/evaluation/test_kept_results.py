"""Stored results of evaluations: read if complete, otherwise evaluated again with a message."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from diffllm.evaluation.evaluation import read_result, store_result

KEY = {"evaluation": "own", "levels": [{"kind": "one"}]}
FIRST = {
    "key": KEY,
    "unit": "share of right answers",
    "scores": [{"of": "kind one", "value": 1 / 3, "interval": [0.1, 0.9], "examples": 3}],
}
LINES = [{"level": 0, "correct": i == 1, "log_likelihoods": [-0.5, None]} for i in range(3)]
Edit = Callable[[list[str]], list[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    store_result(tmp_path / "step" / "own.jsonl", FIRST, LINES)
    return tmp_path / "step" / "own.jsonl"


def without_checksum(lines: list[str]) -> list[str]:
    first = json.loads(lines[0])
    del first["sha256"]
    return [json.dumps(first) + "\n", *lines[1:]]


def test_read_result_returns_none_if_evaluation_settings_differ(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = read_result(file, KEY)
    assert first is not None
    assert {name: first[name] for name in FIRST} == FIRST
    assert read_result(file, {**KEY, "seed": 1}) is None
    assert read_result(file.with_name("none.jsonl"), KEY) is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda lines: lines[:-1], "its checksum differs"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "its checksum differs"),
        (lambda lines: lines + lines[1:], "its checksum differs"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "its checksum differs"),
        (lambda lines: [line.replace("false", "true") for line in lines], "its checksum differs"),
        (lambda lines: [lines[0].replace("0.333", "0.999"), *lines[1:]], "its checksum differs"),
        (lambda lines: [lines[0].replace('"sha256": "', '"sha256": "0'), *lines[1:]], "differs"),
        (lambda lines: lines[1:], "is not a result of an evaluation"),
        (lambda lines: [], "is not JSON"),
        (without_checksum, "its checksum differs"),
    ],
)
def test_read_result_returns_none_if_result_file_was_edited(
    file: Path, capsys: pytest.CaptureFixture[str], edit: Edit, said: str
) -> None:
    file.write_text(
        "".join(edit(file.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8"
    )
    assert read_result(file, KEY) is None
    error = capsys.readouterr().err
    assert error.startswith(str(file))
    assert said in error
    assert error.endswith("; evaluating again\n")
    assert error.count("\n") == 1
