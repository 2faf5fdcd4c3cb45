"""Stored results of evaluations: read if complete, otherwise evaluated again with a message."""

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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    store_result(tmp_path / "step" / "own.jsonl", FIRST, LINES)
    return tmp_path / "step" / "own.jsonl"


def test_read_result_returns_none_if_evaluation_settings_differ(file, capsys):
    first = read_result(file, KEY)
    assert first is not None
    assert {name: first[name] for name in FIRST} == FIRST
    assert read_result(file, {**KEY, "seed": 1}) is None
    assert read_result(file.with_name("none.jsonl"), KEY) is None
    assert capsys.readouterr() == ("", "")


def test_read_result_prints_message_if_file_is_damaged(file, capsys):
    file.write_text("{}", encoding="utf-8")
    assert read_result(file, KEY) is None
    message = "is not a result of an evaluation; evaluating again"
    assert capsys.readouterr().err == f"{file} {message}\n"
