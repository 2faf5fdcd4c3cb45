"""wandb in whole runs: what an offline run holds, and what is left when its service is killed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from runs import command, descendants, finish, start, wait_for, write_corpus
from wandb_file import OfflineRun, covers

from diffllm.metrics.table import METRICS

SUMMARIES = {metric.name: metric.summary for metric in METRICS}

SMALL = ("wandb.mode=offline", "seq_len=32", "global_batch_size=2", "data.num_workers=0")
KEY = "0123456789" * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.fixture(scope="module")
def corpus(directory) -> Path:
    return write_corpus(directory)


def words(corpus: Path, run: Path, *overrides: str) -> list[str]:
    return command(corpus, run, *SMALL, *overrides)


def metric_lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_an_offline_run_is_metrics_jsonl_with_config_and_definitions(directory, corpus):
    run = directory / "whole"
    overrides = ("steps=6", "log_interval=2", "diagnostics.interval=3", "eval.interval=3")
    tags = ("run.sweep=a-sweep", "wandb.tags=[mine]")
    output = finish(start(words(corpus, run, *overrides, *tags, "checkpoint.interval=3")))
    assert "wandb" not in output
    found = OfflineRun(run)

    lines = metric_lines(run)
    assert found.history == lines
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6]
    names = {name for line in lines for name in line} - {"step", "tokens"}
    assert len(names) > 25
    for name in names:
        (pattern,) = [pattern for pattern in SUMMARIES if covers(pattern, name)]
        assert found.metrics[pattern].step_metric == "tokens"
        values = [line[name] for line in lines if name in line]
        summary = {"min": min, "max": max, "mean": lambda v: sum(v) / len(v)}
        if SUMMARIES[pattern] in summary:
            expected = summary[SUMMARIES[pattern]](values)
            assert found.summary[name] == pytest.approx({SUMMARIES[pattern]: expected})
        else:
            assert found.summary[name] == values[-1]
    final = json.loads((run / "summary.json").read_text())
    assert found.summary["heldout_loss"] == final["heldout_loss"] == lines[-1]["eval/loss"]

    header, config = found.header, found.config
    facts = json.loads((run / "run.json").read_text())
    assert {name: config[name] for name in facts} == facts
    assert config["parameters"] > 1000
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert {name: config[name] for name in saved} == saved
    assert config["run"]["choices"]["attention"] == header.run_group == "diff_v2"
    assert config["run"]["choices"]["model"] == header.job_type == "tiny"
    assert list(header.tags) == ["mine", "a-sweep"]
    assert header.display_name == "whole"

    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_resumed_run_keeps_its_id(directory, corpus):
    run = directory / "resumed"
    overrides = ("steps=400", "checkpoint.interval=2", "log_interval=1")
    process = start(words(corpus, run, *overrides))
    wait_for(lambda: list(run.glob("checkpoints/step-*/state.json")), process, "checkpoint")
    process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in finish(process)
    first = OfflineRun(run)
    first.path.parent.rename(directory / "first")
    process = start(words(corpus, run, *overrides))
    done = first.history[-1]["step"]
    wait_for(lambda: metric_lines(run)[-1]["step"] > done, process, "further step")
    process.send_signal(signal.SIGTERM)
    finish(process)
    second = OfflineRun(run)
    assert second.header.run_id == first.header.run_id
    assert first.history + second.history == metric_lines(run)


def service_of(parent: int) -> int:
    """The process id of wandb's service below a run."""
    for pid in descendants(parent):
        if Path(f"/proc/{pid}/comm").read_text().startswith("wandb-core"):
            return pid
    raise AssertionError("wandb has no service")


def test_a_service_killed_in_the_middle_costs_one_line_on_stderr(directory, corpus):
    run = directory / "killed"
    process = start(words(corpus, run, "steps=40", "log_interval=1", "eval.interval=10"))
    file = run / "metrics.jsonl"
    wait_for(lambda: file.is_file() and file.read_text().count("\n") >= 5, process, "line")
    os.kill(service_of(process.pid), signal.SIGKILL)
    killed_at = len(metric_lines(run))
    started = time.monotonic()
    output = finish(process)
    assert time.monotonic() - started < 60
    assert killed_at < 40
    said = [line for line in output.splitlines() if "wandb" in line or "Traceback" in line]
    assert len(said) == 1, output
    assert "wandb stopped working, training goes on" in said[0]
    assert [line["step"] for line in metric_lines(run)] == list(range(1, 41))
    assert json.loads((run / "summary.json").read_text())["steps"] == 40
