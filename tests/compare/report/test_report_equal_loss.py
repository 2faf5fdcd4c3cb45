"""Scores at a loss that all runs reached."""

from pathlib import Path
from typing import Any

import pytest
from report_pages import csv_rows, undrawn_page
from runs.written import write_lines, write_run

from diffllm.compare.report.checkpoint_scores import Checkpoint, loss_of_all, scores_at
from diffllm.compare.report.comparison import Comparison, read
from diffllm.evaluation.evaluation import SHARE, results_of, store_result

STEPS = (5, 10, 20)


def checkpoint(loss: float, value: float | None) -> Checkpoint:
    return Checkpoint(loss, {"top_1": {"of": "top_1", "value": value, "chance": None}})


def test_loss_of_all_returns_lowest_loss_reached_by_all_runs() -> None:
    slow = [checkpoint(5.0, 1), checkpoint(4.0, 2)]
    fast = [checkpoint(4.5, 1), checkpoint(3.0, 4)]
    assert loss_of_all([slow, fast]) == 4.0
    assert loss_of_all([slow, fast, []]) == 4.0
    assert loss_of_all([slow, slow]) is None
    assert loss_of_all([slow]) is None
    assert loss_of_all([]) is None


def test_evaluation_score_is_interpolated_between_checkpoints() -> None:
    run = [checkpoint(6.0, 0.0), checkpoint(5.0, 1.0), checkpoint(3.0, 5.0)]
    assert scores_at(4.5, run)["top_1"]["value"] == pytest.approx(2.0)
    assert scores_at(5.0, run)["top_1"]["value"] == 1.0
    assert scores_at(3.0, run)["top_1"]["value"] == 5.0
    assert scores_at(2.9, run) == {}
    assert scores_at(6.1, run) == {}
    assert scores_at(4.0, [checkpoint(5.0, None), checkpoint(3.0, 5.0)])["top_1"]["value"] is None


def comparison_with_lead(
    place: Path, seeds: int = 3, unit: str = "magnitude", lead: float = 0.5, **more: Any
) -> Comparison:
    """Write runs of standard that end at loss 4, and of diff_v2 with losses lower by `lead`."""
    for variant, ahead in (("standard", 0.0), ("diff_v2", lead)):
        for seed in range(seeds):
            run = place / f"{variant}{seed}"
            write_run(run, f"attention={variant}", f"seed={seed}")
            lines = []
            for step in STEPS:
                loss = 5.0 - step / 20 - ahead
                lines.append({"step": step, "tokens": 256 * step, "eval/loss": loss})
                score = {"of": "top_1", "value": loss + seed / 10, "chance": None, "examples": 9}
                if unit == SHARE:
                    score["value"] = loss / 10
                key = {"checkpoint": f"{run} {step}", **more.get(f"{variant} {step}", {})}
                first = {"key": key, "unit": unit, "scores": [score]}
                store_result(results_of(run, step) / "outliers.jsonl", first, [])
            write_lines(run, lines)
    return read([place])[0]


def test_gap_at_equal_loss_is_zero_if_score_depends_only_on_loss(tmp_path: Path) -> None:
    comparison = comparison_with_lead(tmp_path)
    (outliers,) = comparison.evaluated
    ahead = outliers.lines[0].cells[1]
    assert ahead.gap.mean == pytest.approx(-0.5)
    assert outliers.loss == 4.0
    (line,) = outliers.equal
    assert [cell.mean.mean for cell in line.cells] == pytest.approx([4.1, 4.1])
    assert line.cells[1].gap.mean == pytest.approx(0, abs=1e-12)
    html = undrawn_page(comparison)
    assert "outliers at equal loss" in html
    assert "At 4.000 nats per token of the held-out sample" in html
    _, second = csv_rows(comparison)
    assert float(second["outliers: top_1, gap"]) == pytest.approx(-0.5)
    assert float(second["outliers: top_1, equal loss, gap"]) == pytest.approx(0, abs=1e-9)


def test_scores_from_different_evaluation_settings_are_not_compared(tmp_path: Path) -> None:
    other = {f"diff_v2 {step}": {"sequences": 1} for step in STEPS[:2]}
    (outliers,) = comparison_with_lead(tmp_path, **other).evaluated
    assert outliers.equal == []


def test_interpolated_accuracy_has_no_confidence_interval(tmp_path: Path) -> None:
    (shares,) = comparison_with_lead(tmp_path, seeds=1, unit=SHARE, lead=0.4).evaluated
    standard, diff_v2 = shares.equal[0].cells
    assert (standard.mean.mean, diff_v2.mean.mean) == pytest.approx((0.4, 0.4))
    assert standard.over_examples, "read at a checkpoint"
    assert diff_v2.over_examples is None
