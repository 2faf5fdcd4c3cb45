"""Figures of values of every step: spikes between logged steps, without effects on numbers."""

import base64
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs.written import config, write_run

from diffllm.compare.report import write_report
from diffllm.compare.report.curves import Spike, over_seeds
from diffllm.compare.report.figures import RowStyle, draw_curves
from diffllm.compare.report.runs import Series, load_run
from diffllm.compare.report.step_curves import (
    INTERVALS,
    line_without,
    reduced,
    run_curves,
    spikes_of,
)
from diffllm.metrics.steps import STEP, StepsFile

STEPS = 200
WORDS = (f"steps={STEPS}", "log_interval=10")
SPIKE = 57


def every_step(seed: int, steps: int = STEPS, spike: int | None = SPIKE) -> np.ndarray:
    """Return rows of steps.npy with noisy falling curves and a spike; (steps,) of dtype STEP."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(steps, STEP)
    rows["step"] = np.arange(1, steps + 1)
    rows["tokens"] = rows["step"].astype(np.int64) * config(WORDS).global_batch_size * 32
    fall = (1 + 40 * rows["step"] / steps) ** -0.5
    rows["train/loss"] = 4 + 5 * fall + rng.normal(0, 0.1, steps)
    rows["train/grad_norm"] = (0.3 + 5 * fall) * rng.lognormal(0, 0.1, steps)
    rows["train/lr"] = 1e-3 * fall
    if spike:
        rows["train/loss"][spike - 1] += 8
        rows["train/grad_norm"][spike - 1] *= 30
    return rows


def write(path: Path, seed: int, first_row: int = 1) -> Path:
    """Create a run whose steps.npy begins at step `first_row`, or without steps.npy if it is 0."""
    rows = every_step(seed)
    lines = []
    for row in rows[(rows["step"] == 1) | (rows["step"] % 10 == 0)]:
        names = ("step", "tokens", "train/loss", "train/grad_norm", "train/lr")
        lines.append({name: row[name].item() for name in names})
    lines[-1]["eval/loss"] = 4.5
    write_run(path, "attention=standard", f"seed={seed}", *WORDS, loss=4.5, lines=lines)
    if first_row:
        file = StepsFile(path / "steps.npy")
        file.append(rows[first_row - 1 :])
        file.close()
    return path


def figure(page: Path, title: str) -> tuple[str, str]:
    """Return SVG and caption of a figure of the report."""
    text = page.read_text(encoding="utf-8")
    image = rf'alt="{title}" src="data:image/svg\+xml;base64,([^"]*)">(.*?)</fig'
    match = re.search(image, text, re.DOTALL)
    assert match
    return base64.b64decode(match[1]).decode(), match[2]


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_reduced_curve_keeps_mean_extremes_and_step_of_highest_value(size):
    rng = np.random.default_rng(0)
    steps = np.flatnonzero(rng.random(3000) < 0.7) + 1
    values = rng.normal(size=len(steps))
    values[rng.random(len(steps)) < 0.2] = rng.choice([np.nan, np.inf])
    curve = reduced(steps, 10 * steps, values, size)
    interval = (steps - 1) // size
    assert len(curve.tokens) == len(np.unique(interval))
    for i, number in enumerate(np.unique(interval)):
        inside = interval == number
        finite = values[inside & np.isfinite(values)]
        assert curve.tokens[i] == 10 * steps[inside][-1]
        if not len(finite):
            assert np.isnan([curve.mean[i], curve.low[i], curve.high[i]]).all()
            continue
        statistics = [finite.mean(), finite.min(), finite.max()]
        assert [curve.mean[i], curve.low[i], curve.high[i]] == pytest.approx(statistics)
        assert values[steps == curve.peak_steps[i]] == finite.max()
        assert curve.peak_tokens[i] == 10 * curve.peak_steps[i]


@pytest.mark.parametrize("steps", [40, 200, 999, 30_000])
@pytest.mark.parametrize(("name", "log"), [("train/loss", False), ("train/grad_norm", True)])
def test_only_planted_spike_is_found_at_its_step(steps, name, log):
    size = -(-steps // INTERVALS)
    for spike in (None, size + 1, size + 17, steps // 2, steps - 1, steps):
        rows = every_step(1, steps, spike)
        values = rows[name].astype(float)
        curve = reduced(rows["step"].astype(int), rows["tokens"], values, size)
        found = spikes_of(curve, log)
        assert [mark.step for mark in found] == [spike] * (spike is not None)
        for mark in found:
            assert mark.x == rows["tokens"][spike - 1]
            assert mark.value == values[spike - 1]
            assert mark.level < mark.value - 1


@pytest.mark.parametrize("values", [[], [np.nan] * 30, [2.0] * 30, [5.0], [3.0, np.nan, 2.0]])
def test_constant_or_missing_values_have_no_spike(values):
    steps = np.arange(1, len(values) + 1)
    for log in (False, True):
        assert spikes_of(reduced(steps, steps, np.array(values), 1), log) == []


def test_report_marks_spike_between_logged_steps_in_loss_and_gradient_norm(tmp_path):
    """One seed has steps.npy, one has none, and one has it since a resume at step 31."""
    for seed, first_row in enumerate((1, 0, 31)):
        write(tmp_path / "runs" / f"{seed}", seed, first_row=first_row)
        write(tmp_path / "logged" / f"{seed}", seed, first_row=0)
    page, table = write_report([tmp_path / "runs"])
    for title in ("Training loss", "Gradient norm"):
        svg, caption = figure(page, title)
        assert f"step {SPIKE}" in svg
        assert f"the highest at step {SPIKE}" in caption
    svg, caption = figure(page, "Training loss")
    assert "The scale ends at" in caption
    assert "Running mean over 11 steps (some runs: 3 logged steps)" in caption
    logged_page, logged_table = write_report([tmp_path / "logged"])
    svg, caption = figure(logged_page, "Training loss")
    assert "spike" not in svg + caption
    assert "Running mean over 3 logged steps" in caption
    assert table.read_bytes() == logged_table.read_bytes()


def test_running_mean_of_loss_is_calm_at_spike():
    rows, calm = every_step(0), every_step(0, spike=None)
    steps = rows["step"].astype(int)
    curve = reduced(steps, rows["tokens"], rows["train/loss"].astype(float), 1)
    line = line_without(spikes_of(curve, log=False), curve)
    assert line.values == pytest.approx(calm["train/loss"], abs=0.5)
    others = steps != SPIKE
    assert (line.values[others] == rows["train/loss"][others]).all()


def test_spike_above_axis_is_drawn_at_its_tokens_and_upper_edge():
    spikes = (Spike(17, 170.0, 2.0, 99.0), Spike(30, 300.0, 2.0, 3.0))
    tokens = np.arange(0, 400, 10)
    band = over_seeds([Series(tokens, np.full(40, 2.0))])
    style = RowStyle("row", "standard", "#000000", (), "o")
    axes = draw_curves([replace(band, spikes=spikes)], [style], "nats", top=4.0).axes[0]
    (marks,) = (line for line in axes.lines if line.get_label() == "spike")
    assert marks.get_xydata().tolist() == [[170, 4], [300, 3]]
    assert axes.get_ylim()[1] == 4
    assert [text.get_text() for text in axes.texts] == ["step 17"]


def test_resumed_run_of_older_version_shows_logged_steps_before_first_row(tmp_path):
    curve = run_curves(load_run(write(tmp_path / "run", 0, first_row=31))).curves["train/loss"]
    rows = every_step(0)
    logged = [1, 10, 20, 30]
    assert curve.peak_steps.tolist() == [*logged, *range(31, STEPS + 1)]
    assert curve.mean == pytest.approx(rows["train/loss"][curve.peak_steps - 1])
    assert curve.tokens.tolist() == rows["tokens"][curve.peak_steps - 1].tolist()


INTEGERS = np.iinfo(np.int64)


@pytest.mark.parametrize(
    "columns",
    [
        {"tokens": INTEGERS.max},
        {"tokens": np.arange(STEPS, 0, -1) * INTEGERS.min // STEPS},
        {"train/loss": 3e38, "train/grad_norm": -3e38, "train/lr": 1e308},
        {"train/loss": np.nan, "train/grad_norm": np.inf, "train/lr": -np.inf},
        {"step": np.arange(STEPS)},
        {"step": np.arange(1, STEPS + 1) * 20_000_000},
    ],
)
def test_report_is_written_with_forged_values_in_steps_file(tmp_path, columns):
    run, rows = write(tmp_path / "run", 0), every_step(0)
    for name, values in columns.items():
        rows[name] = values
    np.save(run / "steps.npy", rows)
    page, _ = write_report([run])
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_report_with_damaged_steps_file_warns_and_shows_logged_steps(tmp_path, capsys):
    run = write(tmp_path / "run", 0)
    (run / "steps.npy").write_bytes(b"no array")
    page, _ = write_report([run])
    assert f"warning: {run}/steps.npy" in capsys.readouterr().err
    assert "logged steps, in nats per token" in figure(page, "Training loss")[1]
