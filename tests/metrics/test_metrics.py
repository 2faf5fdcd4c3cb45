"""metrics.jsonl has complete lines after any failure; every metric has one row in the table."""

import json
import math
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import small_disk
from runs.json_files import strict_json
from wandb_file import examples

from diffllm.core.errors import ConfigError
from diffllm.metrics.sinks import MetricsFile, Sinks
from diffllm.metrics.steps import STEP_DTYPE, StepsFile
from diffllm.metrics.table import METRICS, metric_of
from diffllm.model.loss import Term


def complete_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [strict_json(line) for line in text.splitlines()]


def append_metrics(path: Path, steps: Iterator[int] | range, last_step: int = 0) -> None:
    file = MetricsFile(path, last_step)
    for step in steps:
        file.write({"step": step, "train/loss": 1.0 / step})
    file.close()


def test_metrics_file_contains_complete_line_after_each_write(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        line = {"step": step, "train/loss": 0.5, "note": "ünïcode\n"}
        file.write(line)
        assert complete_lines(tmp_path / "metrics.jsonl")[-1] == line
    file.close()
    assert len(complete_lines(tmp_path / "metrics.jsonl")) == 3


def test_metrics_file_contains_null_for_nan_and_infinity(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    values = {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e308, "e": None}
    file.write(values)
    file.close()
    assert complete_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": None, "b": None, "c": None, "d": 1e308, "e": None}
    ]
    assert math.isnan(values["a"])


def test_metrics_file_is_emptied_if_run_starts_from_step_0(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, range(1, 5))
    append_metrics(path, range(1, 3))
    assert [line["step"] for line in complete_lines(path)] == [1, 2]


@pytest.mark.parametrize("last", [1, 3, 9])
def test_resume_removes_lines_of_later_steps_from_metrics_file(tmp_path, last):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, range(1, 6))
    before = complete_lines(path)
    append_metrics(path, range(last + 1, last + 3), last)
    kept = [line for line in before if line["step"] <= last]
    assert complete_lines(path)[: len(kept)] == kept
    assert [line["step"] for line in complete_lines(path)[len(kept) :]] == [last + 1, last + 2]


@pytest.mark.parametrize(
    "junk", [b"{", b'{"step": 4', b"\0" * 40, b"\xff\xfe\n", b"17\n", b"null\n", b'{"step": "x"}\n']
)
def test_resume_ignores_invalid_bytes_at_end_of_metrics_file(tmp_path, junk):
    """A kill can truncate the last line; a power failure can leave invalid bytes."""
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, range(1, 4))
    path.write_bytes(path.read_bytes() + junk)
    append_metrics(path, range(4, 5), last_step=3)
    assert [line["step"] for line in complete_lines(path)] == [1, 2, 3, 4]


def test_metrics_file_writes_missing_lines_after_disk_space_is_freed(tmp_path, capfd):
    with small_disk(tmp_path / "disk", "64k") as disk:
        file = MetricsFile(disk / "metrics.jsonl")
        file.write({"step": 1})
        (ballast := disk / "ballast").write_bytes(b"0" * 56 * 1024)
        for step in range(2, 200):
            file.write({"step": step, "text": "x" * 100})
        written = (disk / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(written) < 199, "the disk was not full"
        assert all(json.loads(line) for line in written), "a line is incomplete"
        ballast.unlink()
        file.write({"step": 200})
        file.close()
        lines = (disk / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 201))
        said = capfd.readouterr().err
        assert said.count("warning: ") == 1
        assert "metrics.jsonl" in said
        assert "the file system took only a part" in said or "No space left" in said


def test_close_method_prints_number_of_unwritten_metrics_lines(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("diffllm.metrics.growing_file.to_stderr", said.append)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        for step in (2, 3):
            file.write({"step": step})
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 1}\n'
    assert "cannot write" in said[0]
    assert "the last 2 lines of " in said[1]
    assert len(said) == 2


NAMES = [metric.name for metric in METRICS]


def test_each_metric_name_matches_exactly_one_metric_definition():
    for metric in METRICS:
        for name in examples(metric.name):
            assert metric_of(name) is metric
            assert [other for other in METRICS if other.covers(name)] == [metric]
        if not (metric.name.endswith("/*") and metric.quantity in NAMES):
            assert metric_of(metric.quantity) is metric


@pytest.mark.parametrize("term", Term)
def test_each_term_of_objective_has_metric_in_nats_per_token(term):
    assert metric_of(term.metric).unit == "nats per token"


@pytest.mark.parametrize("name", ["train/los", "hidden_top2/layer_00", "attn_entropy_2/layer_01"])
def test_metric_name_missing_from_metrics_table_raises_config_error(tmp_path, name):
    with pytest.raises(ConfigError, match=f"metric {name} has no description.*add_metric"):
        metric_of(name)
    sinks = Sinks(None, StepsFile(tmp_path / "steps.npy"), None, None)
    row = np.zeros(1, STEP_DTYPE)
    with pytest.raises(ConfigError, match="has no description"):
        sinks.write(row, {0: {name: 0.5}})
