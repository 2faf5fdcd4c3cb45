"""Figures of values of every step: spikes between logged steps, without effects on numbers."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs.written import run_config, write_run

from diffllm.compare.arms.run import Series, load_run
from diffllm.compare.report import write_report
from diffllm.compare.report.curves import Spike, over_seeds, smoothed
from diffllm.compare.report.figures import draw_curves
from diffllm.compare.report.step_curves import (
    band_of_values,
    line_without_spikes,
    over_stages,
    reduced,
    run_curves,
)
from diffllm.compare.report.styles import RowStyle
from diffllm.core.run_files import RunFile
from diffllm.metrics.events import Event, EventsFile, events_of_step
from diffllm.metrics.spikes import SpikeMonitor
from diffllm.metrics.steps import STEP_DTYPE, StepsFile

STEPS = 200
WORDS = (f"steps={STEPS}", "log_interval=10")
SPIKE = 57


def every_step(seed: int, spike: int | None = SPIKE) -> np.ndarray:
    """Return rows (STEPS,) of steps.npy with noisy falling curves and a spike."""
    rng = np.random.default_rng(seed)
    steps = STEPS
    rows = np.zeros(steps, STEP_DTYPE)
    rows["step"] = np.arange(1, steps + 1)
    rows["tokens"] = rows["step"].astype(np.int64) * run_config(WORDS).global_batch_size * 32
    fall = (1 + 40 * rows["step"] / steps) ** -0.5
    rows["train/loss"] = 4 + 5 * fall + rng.normal(0, 0.1, steps)
    rows["train/grad_norm"] = (0.3 + 5 * fall) * rng.lognormal(0, 0.1, steps)
    rows["train/lr"] = 1e-3 * fall
    if spike:
        rows["train/loss"][spike - 1] += 8
        rows["train/grad_norm"][spike - 1] *= 30
    return rows


def write_training_events(run: Path, rows: np.ndarray) -> None:
    """Write events.jsonl as training does."""
    monitor, file = SpikeMonitor(), EventsFile(run / RunFile.EVENTS)
    for row in rows:
        loss, grad_norm = row["train/loss"].item(), row["train/grad_norm"].item()
        spikes = monitor.update(loss, grad_norm)
        event = Event("skipped", row["step"].item(), row["tokens"].item(), value=loss)
        for spike in events_of_step(event, False, spikes, grad_norm):
            file.write(spike)
    file.close()


def write_steps_run(path: Path, seed: int, first_row: int = 1, spike: int = SPIKE) -> Path:
    """Create a run whose steps.npy begins at step `first_row`.

    If it is 0, the run has only logged values, as of older versions.
    """
    rows = every_step(seed, spike)
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
        write_training_events(path, rows)
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


def test_marks_are_events_of_the_detrended_definition(tmp_path):
    run, rows = write_steps_run(tmp_path / "run", 0), every_step(0)
    rows["train/loss"][99] = np.nan
    write_training_events(run, rows)
    curves = run_curves(load_run(run)).curves
    tokens = rows["tokens"].tolist()
    expected = {
        "train/loss": [(SPIKE, rows["train/loss"][SPIKE - 1]), (100, np.inf)],
        "train/grad_norm": [(SPIKE, rows["train/grad_norm"][SPIKE - 1])],
        "train/lr": [],
    }
    for name, marks in expected.items():
        assert [(mark.step, mark.value) for mark in curves[name].spikes] == marks
        for mark in curves[name].spikes:
            assert (mark.x, mark.end) == (tokens[mark.step - 1], tokens[mark.step + 7])


@pytest.mark.parametrize("spike", [13, 23, 57, 121])
def test_unmarked_excursion_extends_scale_or_is_named_in_caption(tmp_path, spike):
    """The scale ignores the first 40 steps; later steps are ignored only if they are marked."""
    run = write_steps_run(tmp_path / "run", 0, spike=spike)
    (run / RunFile.EVENTS).write_text("", encoding="utf-8")
    svg, caption = figure(write_report([run])[0], "Training loss")
    assert "riangle" not in svg + caption
    assert ("The scale ends at" in caption) == (spike <= 40)
    assert (f", at step {spike}." in caption) == (spike <= 40)


def test_area_shows_unmarked_excursion_of_single_seed_after_end_of_other_seed(tmp_path):
    run = load_run(write_steps_run(tmp_path / "run", 0, spike=121))
    marked = run_curves(run).curves["train/loss"]
    curve = marked._replace(spikes=())
    short = type(curve)(*(column[:100] for column in curve))
    lines = [smoothed(Series(seed.tokens, seed.mean), 11) for seed in (curve, short)]
    band = band_of_values(lines, [curve, short])
    assert band.peak == (curve.high[120], 121)
    style = RowStyle("row", "standard", "#000000", (), "o")
    (area,) = draw_curves([band], [style], "nats").axes[0].collections
    highest = max(area.get_paths()[0].vertices, key=lambda point: point[1])
    assert highest.tolist() == [curve.tokens[120], curve.high[120]]


def test_running_mean_of_loss_is_calm_at_spike(tmp_path):
    curve = run_curves(load_run(write_steps_run(tmp_path / "run", 0))).curves["train/loss"]
    line = line_without_spikes(curve)
    assert line.values == pytest.approx(every_step(0, spike=None)["train/loss"], abs=0.5)
    others = np.arange(1, STEPS + 1) != SPIKE
    assert (line.values[others] == every_step(0)["train/loss"][others]).all()


def test_spikes_over_stages_are_at_tokens_of_all_stages():
    """The second stage starts before the end of the first stage."""
    values = reduced(np.arange(1, 11), 10 * np.arange(1, 11), np.ones(10), 1)
    first = values._replace(spikes=(Spike(3, 30, 40, 9.0), Spike(7, 70, 80, 9.0)))
    second = values._replace(spikes=(Spike(1, 5, 9, np.inf),))
    joined = over_stages([first, second], [0, 50])
    assert joined.spikes == (Spike(3, 30, 40, 9.0), Spike(1, 55, 59, np.inf))


def test_report_marks_spike_between_logged_steps_in_loss_and_gradient_norm(tmp_path):
    """One seed has steps.npy, one has none, and one has it since a resume at step 31."""
    for seed, first_row in enumerate((1, 0, 31)):
        write_steps_run(tmp_path / "runs" / f"{seed}", seed, first_row=first_row)
        write_steps_run(tmp_path / "logged" / f"{seed}", seed, first_row=0)
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


def test_spike_above_axis_is_drawn_at_its_tokens_and_upper_edge():
    spikes = (Spike(17, 170, 250, 99.0), Spike(30, 300, 380, 3.0), Spike(35, 350, 390, np.inf))
    tokens = np.arange(0, 400, 10)
    band = over_seeds([Series(tokens, np.full(40, 2.0))])
    style = RowStyle("row", "standard", "#000000", (), "o")
    axes = draw_curves([replace(band, spikes=spikes)], [style], "nats", top=4.0).axes[0]
    (marks,) = (line for line in axes.lines if line.get_label() == "spike")
    assert marks.get_xydata().tolist() == [[170, 4], [300, 3], [350, 4]]
    assert axes.get_ylim()[1] == 4
    assert [text.get_text() for text in axes.texts] == ["step 35"]


def test_resumed_run_of_older_version_shows_logged_steps_before_first_row(tmp_path):
    run = load_run(write_steps_run(tmp_path / "run", 0, first_row=31))
    curve = run_curves(run).curves["train/loss"]
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
    run, rows = write_steps_run(tmp_path / "run", 0), every_step(0)
    for name, values in columns.items():
        rows[name] = values
    np.save(run / "steps.npy", rows)
    page, _ = write_report([run])
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


@pytest.mark.parametrize(
    ("changes", "damaged"),
    [
        ({"tokens": 2**60, "step": 2**60}, False),
        ({"value": 1e308}, False),
        ({"value": -1e308}, False),
        ({"tokens": 10**400}, True),
        ({"kind": "unknown"}, True),
        ({"step": None}, True),
    ],
)
def test_report_is_written_with_forged_or_damaged_events(tmp_path, capsys, changes, damaged):
    run = write_steps_run(tmp_path / "run", 0)
    event = {"kind": "loss_spike", "step": 9, "tokens": 9, "definition": "spikes_detrended"}
    lines = [json.dumps({**event, **changes}), json.dumps(event)]
    (run / RunFile.EVENTS).write_text("\n".join([*lines, ""]), encoding="utf-8")
    page, _ = write_report([run])
    warning = f"warning: {run}/{RunFile.EVENTS} is damaged: line 1"
    assert (warning in capsys.readouterr().err) == damaged
    assert ("Triangles mark spikes" in figure(page, "Training loss")[1]) != damaged


def test_report_with_damaged_steps_file_warns_and_shows_logged_steps(tmp_path, capsys):
    run = write_steps_run(tmp_path / "run", 0)
    (run / "steps.npy").write_bytes(b"no array")
    page, _ = write_report([run])
    assert f"warning: {run}/steps.npy" in capsys.readouterr().err
    assert "logged steps, in nats per token" in figure(page, "Training loss")[1]
