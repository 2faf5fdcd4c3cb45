"""Reports, verdicts and power read forged runs without a traceback or a warning of numpy."""

import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs.written import LOWER, TWO_ARMS, edit_json, edit_text, study_file, write_arms

from diffllm import cli as tools
from diffllm.compare.arms.run import Metrics, Series, load_run
from diffllm.compare.report.curves import over_seeds
from diffllm.compare.report.figures import draw_curves
from diffllm.compare.report.styles import RowStyle
from diffllm.compare.study.arms import RateRun
from diffllm.compare.study.rates import rate_runs
from diffllm.metrics.records import LARGEST, read_metrics_line, read_record
from diffllm.statistics.gap_tests import welch
from diffllm.statistics.power_analysis import paired_power

pytestmark = pytest.mark.filterwarnings("error")
NOT_RECORDS = [
    "[]", "null", "{}", '{"step": 1}', '{"step": "x", "tokens": {}}', "\ufffd\0", "[" * 50_000,
    "9" * 5000, '{"step": 1, "tokens": 64, "train/loss": "x"}',
    '{"step": 1, "tokens": 64, "train/loss": true}', '{"step": -5, "tokens": 64}',
    '{"step": 1, "tokens": -9}', '{"step": 9007199254740992, "tokens": 64}',
    '{"step": 1, "tokens": 1e3}', f'{{"step": 1, "tokens": 64, "x": 1{"0" * 5000}}}',
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def collected_objects() -> None:
    """Collect the objects of earlier tests, whose warnings would fail these tests."""
    with pytest.MonkeyPatch.context() as patch:
        # Python calls this hook for a warning or an error during the collection.
        patch.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()


@pytest.mark.parametrize("line", NOT_RECORDS)
def test_read_metrics_line_returns_none_for_invalid_line(line: str):
    assert read_metrics_line(line) is None


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e400", "NaN", "-Infinity", "null"])
def test_out_of_range_number_in_run_file_is_read_as_none(tmp_path: Path, value: str):
    line = f'{{"step": 1, "tokens": 64, "train/loss": {value}, "eval/loss": 2}}'
    expected = {"step": 1, "tokens": 64, "train/loss": None, "eval/loss": 2.0}
    assert read_metrics_line(line) == expected
    run = tmp_path / "rates" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "summary.json").write_text(f'{{"steps": 1, "heldout_loss": {value}}}', encoding="utf-8")
    assert read_record(run / "summary.json") == {"steps": 1, "heldout_loss": None}
    assert rate_runs(tmp_path) == {"rates/a": RateRun("rates/a", None)}


@given(st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_metrics_reader_skips_line_if_step_does_not_increase(places: list[tuple[int, int] | None]):
    lines = [p and {"step": p[0], "tokens": p[1], "train/loss": 1.0} for p in places]
    metrics = Metrics(lines)
    assert len(metrics.steps) + metrics.skipped == len(lines)
    assert (np.diff(metrics.steps) > 0).all()


def test_metrics_reader_keeps_line_if_token_count_decreases():
    metrics = Metrics({"step": step, "tokens": tokens} for step, tokens in [(1, 64), (2, 48)])
    assert metrics.skipped == 0
    assert metrics.tokens.tolist() == [64, 48]


@pytest.mark.parametrize("unit", [1e-120, 1.0, 1e39])
def test_welch_p_value_does_not_change_if_values_are_scaled(unit: float):
    own, base = {0: 5.0, 1: 6.0, 2: 8.0}, {0: 4.0, 1: 4.5, 2: 5.5}
    scaled = [{seed: unit * value for seed, value in arm.items()} for arm in (own, base)]
    gap, expected = welch(*scaled), welch(own, base)
    assert gap is not None
    assert expected is not None
    assert gap.df == pytest.approx(expected.df)
    assert gap.p == pytest.approx(expected.p)


def test_t_test_power_matches_limits_for_extreme_gaps():
    assert paired_power(1e308, 5e-324, 3) == 1
    assert paired_power(1e-300, 1e40, 3) == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("values", [[1e-320, LARGEST], [-1.0, -2.0], [1e-39, 1e-39]])
@pytest.mark.parametrize("log", [False, True])
def test_axis_limits_of_figure_are_finite_for_extreme_values(values: list[float], log: bool):
    band = over_seeds([Series(np.array([1, 2**53]), np.array(values))])
    style = RowStyle("a", "standard", "#000000", (), "o")
    figure = draw_curves([band], [style], "nats", log=log)
    figure.canvas.draw()
    assert np.isfinite([*figure.axes[0].get_xlim(), *figure.axes[0].get_ylim()]).all()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a study of two arms and two seeds, with runs in s/."""
    root = tmp_path_factory.mktemp("kept")
    study = study_file(root / "s.yaml", LOWER, **TWO_ARMS, seeds="[0, 1]", scale="log")
    write_arms(study, root / "s", {"half": [5.0, 5.1], "v2": [5.0, 5.1]})
    return root


def fields(name: str, **values: Any) -> Callable[[Path, int], None]:
    """Return a change that replaces fields of a JSON file; a callable gets the run's number."""

    def change(run: Path, number: int) -> None:
        new = {key: v(number) if callable(v) else v for key, v in values.items()}
        edit_json(run / name, **new)

    return change


def lines(change: Callable[[list[str], int], list[str]]) -> Callable[[Path, int], None]:
    """Return a change that replaces the lines of metrics.jsonl."""

    def changed(run: Path, number: int) -> None:
        file = run / "metrics.jsonl"
        texts = change(file.read_text(encoding="utf-8").splitlines(), number)
        file.write_text("\n".join([*texts, ""]), encoding="utf-8")

    return changed


def large(texts: list[str], number: int) -> list[str]:
    value = LARGEST * (-1) ** number
    found = [json.loads(text) for text in texts]
    return [json.dumps({k: value if "/" in k else v for k, v in x.items()}) for x in found]


def backwards(texts: list[str], number: int) -> list[str]:
    """Make the time of a run decrease over its lines."""
    line = json.loads(texts[0])
    places = [{"step": n, "tokens": 256 * n, "perf/step_ms": (-9.0) ** n} for n in (2, 3, 4)]
    return [json.dumps({**line, **place}) for place in places]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "forge",
    [
        fields("summary.json", heldout_loss=1e308, train_loss=1e308),
        fields("summary.json", heldout_loss=lambda n: (-1) ** n * LARGEST, seconds=1e308),
        fields("summary.json", heldout_loss=lambda n: (n + 1) * 1e-170, tokens=0, seconds=0),
        fields("summary.json", heldout_loss=lambda n: LARGEST if n else 1e-300),
        fields("run.json", flops_per_token=1e308, heldout_unigram_entropy=-1e308, packing="x"),
        fields("run.json", flops_per_token=lambda n: LARGEST if n else 1e-320),
        lines(large),
        lines(backwards),
        lines(lambda texts, n: [*reversed(texts), *texts]),
        lines(lambda texts, n: [NOT_RECORDS[8], *NOT_RECORDS, *texts, *NOT_RECORDS]),
    ],
    ids=["loss", "signs", "small", "logs", "facts", "flops", "metrics", "clock", "order", "odd"],
)  # fmt: skip
def test_commands_do_not_crash_on_corrupted_run_directories(kept, tmp_path, monkeypatch, forge):
    shutil.copytree(kept, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    for number, run in enumerate(sorted(Path("s").iterdir())):
        forge(run, number)
    commands = (["report", "s"], ["study", "verdict", "s.yaml", "out=s"], ["power", "s", "gap=1"])
    assert {tools.main(words) for words in commands} <= {0, 2}


def test_load_run_prints_one_warning_for_all_invalid_metrics_lines(kept, tmp_path, capsys):
    run = shutil.copytree(next((kept / "s").iterdir()), tmp_path / "a")
    lines(lambda texts, n: [*texts, *NOT_RECORDS, texts[0]])(run, 0)
    assert load_run(run).metrics.skipped == len(NOT_RECORDS) + 1
    warning = f"warning: {run}/metrics.jsonl: skipped 16 damaged or misplaced lines\n"
    assert capsys.readouterr().err == warning


def test_study_verdict_escapes_special_characters_in_claim(kept, tmp_path, monkeypatch, capsys):
    shutil.copytree(kept, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    edit_text(Path("s.yaml"), "v2 is better than half", r'"<b>\e[31mred"')
    assert tools.main(["study", "verdict", "s.yaml", "out=s"]) == 0
    said = capsys.readouterr().out
    assert r"<b>\x1b[31mred" in said
    assert "\x1b" not in said + Path("s/verdict.md").read_text(encoding="utf-8")
    page = Path("s/verdict.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
