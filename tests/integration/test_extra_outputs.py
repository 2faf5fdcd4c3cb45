"""TensorBoard event files, profiler traces, facts in run.json, and spikes, of real runs."""

import gzip
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.command import overrides_of, unfinish
from runs.json_files import read_json, read_jsonl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from wandb_file import OfflineRun

from diffllm.cli.run import run_and_report as run
from diffllm.compare.arms.run import load_run
from diffllm.compare.report.step_curves import run_curves
from diffllm.config import load_config
from diffllm.core.errors import ConfigError
from diffllm.core.secrets import command_text
from diffllm.metrics.sinks import TensorBoardFiles
from diffllm.metrics.steps import read_steps
from diffllm.metrics.table import COST_AXES, metric_of
from diffllm.training import loop
from diffllm.training.build import Training

WORDS = ("steps=6", "checkpoint.interval=3", "eval.interval=3", "log_interval=1")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def metrics_by_name(path: Path) -> dict[str, dict[int, float]]:
    """Return the values in metrics.jsonl by name and step."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for line in read_jsonl(path / "metrics.jsonl"):
        for name, value in line.items():
            if name != "step":
                found[name][line["step"]] = value
    return found


def tensorboard_scalars(path: Path) -> dict[str, dict[int, float]]:
    """Return the values that TensorBoard shows, by name and step."""
    events = EventAccumulator(str(path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def charts_of(path: Path) -> dict[str, dict[str, list[str]]]:
    """Return the regular expressions of TensorBoard's custom scalars, by section and chart."""
    events = EventAccumulator(str(path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    *_, last = events.Tensors("custom_scalars__config__")  # one per start of the run
    layout = Layout.FromString(last.tensor_proto.string_val[0])
    return {
        section.title: {chart.title: list(chart.multiline.tag) for chart in section.chart}
        for section in layout.category
    }


def test_tensorboard_and_profile_files_have_expected_content(corpus, tmp_path, capfd):
    path = tmp_path / "run"
    words = overrides_of(corpus, path, *WORDS, "data.num_workers=0")
    words += ["metrics.tensorboard=true", "profile.steps=[2,3]", "diagnostics.interval=3"]
    run(load_config(words))
    said = capfd.readouterr()
    trace = path / "profile" / "rank0-steps-2-3.json.gz"
    assert f"profile: {trace}" in said.out
    assert "rofiler" not in said.err
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("Optimizer.step") for event in events) == 2
    assert {e["name"] for e in events if e["name"].startswith("step ")} == {"step 2", "step 3"}
    facts = read_json(path / "run.json")
    assert facts["command"] == command_text(sys.orig_argv)
    assert set(facts["git"]) == {"commit", "dirty"}
    assert facts["environment"]["python"].startswith("3.")

    unfinish(path, 6)
    run(load_config(words))
    expected = metrics_by_name(path)
    for axis in COST_AXES:
        expected.pop(axis, None)
    expected["train/skipped"] = dict.fromkeys(range(1, 7), 0.0)
    assert tensorboard_scalars(path).keys() == expected.keys()
    for name, values in tensorboard_scalars(path).items():
        assert values == pytest.approx(expected[name], rel=1e-6, nan_ok=True), name
    charts = charts_of(path)
    assert [*charts][:5] == ["Loss", "Stability", "Outliers", "Attention", "Speed"]
    patterns = [tag for section in charts.values() for tags in section.values() for tag in tags]
    for name in expected:
        charts_of_name = [pattern for pattern in patterns if re.match(pattern, name)]
        assert len(charts_of_name) == bool(metric_of(name).plots), name


def scale(t: Training, factor: float) -> None:
    """Multiply the weights of the output layer."""
    with torch.no_grad():
        t.params["output.weight"].mul_(factor)
    t.weights.changed()


@pytest.mark.slow
def test_spike_at_unlogged_step_is_at_its_step_in_all_outputs(corpus, tmp_path, monkeypatch):
    path, spike, real_step = tmp_path / "run", 47, loop.train_step

    def train_step(t: Training, batches: Any, step: int, *args: Any) -> Any:
        """Train on an output layer that is 30 times as large at one step."""
        if step + 1 != spike:
            return real_step(t, batches, step, *args)
        scale(t, 30)
        result = real_step(t, batches, step, *args)
        scale(t, 1 / 30)
        return result

    monkeypatch.setattr(loop, "train_step", train_step)
    words = ["steps=60", "log_interval=10", "data.num_workers=0", "run.report=true"]
    words += ["wandb.mode=offline", "metrics.tensorboard=true"]
    run(load_config(overrides_of(corpus, path, *words)))

    assert spike not in metrics_by_name(path)["train/loss"]
    rows = read_steps(path / "steps.npy")
    assert rows["step"].tolist() == list(range(1, 61))
    tensorboard, wandb = tensorboard_scalars(path), OfflineRun(path)
    curves = run_curves(load_run(path)).curves
    for name in ("train/loss", "train/grad_norm"):
        assert rows["step"][rows[name].argmax()] == spike
        values = dict(zip(range(1, 61), rows[name].tolist(), strict=True))
        assert tensorboard[name] == pytest.approx(values)
        assert {line["step"]: line[name] for line in wandb.history} == pytest.approx(values)
        (mark,) = (mark for mark in curves[name].spikes if mark.step == spike)
        assert mark.value == values[spike]
        assert mark.x == spike * 8 * 64
    page = (path / "report.html").read_text(encoding="utf-8")
    assert page.count(f"the highest at step {spike} (") == 2

    axes = {name: wandb.metrics[name] for name in COST_AXES}
    assert not any(axis.step_metric for axis in axes.values())
    assert all(axes.keys() <= line.keys() for line in wandb.history)
    others = {m.step_metric for name, m in wandb.metrics.items() if name not in COST_AXES}
    assert others == {"tokens"}


def test_unwritable_tensorboard_event_file_causes_only_warning(tmp_path, capfd):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    events = TensorBoardFiles(blocked / "tensorboard", 0)
    events.log(1, {"train/loss": 2.0})
    events.close()
    assert capfd.readouterr().err.startswith("warning: TensorBoard event files stopped")


def test_train_refuses_tensorboard_metrics_if_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cfg = load_config(overrides_of(tmp_path, tmp_path / "run", "metrics.tensorboard=true"))
    with pytest.raises(ConfigError, match=r"pip install .* '\.\[tensorboard\]'"):
        run(cfg)
    assert not (tmp_path / "run").exists()


def test_invalid_profile_steps_are_refused():
    words = ["model=tiny", "max_tokens=42000"]  # a run of 10 steps
    for steps in ("[3]", "[0,2]", "[3,2]", "[1,2,3]"):
        with pytest.raises(ConfigError, match=r"must be \[first,last\]"):
            load_config([*words, f"profile.steps={steps}"])
    with pytest.raises(ConfigError, match=r"last <= 10"):
        load_config([*words, "profile.steps=[2,11]"])
