"""Trends of gaps over tokens, for curves whose gaps are known lines."""

import math

import pytest
import sample_comparison as sample
from report_pages import csv_rows, page_text
from runs.written import runs_in, write_run

from diffllm.compare.report.comparison import compare
from diffllm.compare.report.page_tables import gap_table
from diffllm.compare.report.sections import page_sections
from diffllm.compare.report.styles import row_styles
from diffllm.compare.report.terminal import whole_text

TOKENS = 8 * 32
NOISE = (-0.001, 0.0, 0.001)


def gap_at(step, start, slope):
    """Return a gap: 1 at step 1, which is before 10% of 20 steps, then a line from `start`."""
    return 1.0 if step == 1 else start + slope * math.log2(step / 2)


def trend_comparison(tmp_path, start, slope, seeds=3, steps=(1, 2, 5, 10, 15, 20), diverged=()):
    """Return a comparison of standard and gated; slopes differ by NOISE between seeds."""
    for variant in ("standard", "gated"):
        for seed in range(seeds):
            lines = []
            for step in steps:
                loss = 5 - 0.1 * math.log2(step) + 0.01 * seed
                if variant == "gated":
                    loss += gap_at(step, start, slope + NOISE[seed])
                line = {"step": step, "tokens": step * TOKENS, "train/loss": 5.0, "eval/loss": loss}
                lines.append(line)
            summary = {"heldout_loss": loss}
            if variant == "gated" and seed in diverged:
                summary["heldout_loss"] = None
            words = (f"attention={variant}", f"seed={seed}")
            write_run(tmp_path / f"{variant}{seed}", *words, lines=lines, summary=summary)
    return compare(runs_in(tmp_path))


def sentence(comparison):
    """Return the only sentence about a trend, which must be in the terminal and in the figure."""
    lines = whole_text(comparison).splitlines()
    (trend,) = [line for line in lines if "per doubling of tokens" in line]
    _, sections, _ = page_sections(comparison, row_styles(comparison.rows))
    (gaps,) = [section for section in sections if section.title == "Gaps"]
    (caption,) = [card.caption for card in gaps.blocks[-1].figures]
    assert trend.removeprefix("note: ") in caption.replace("−", "-")
    return trend


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("start", "slope", "words"),
    [
        (-0.03, 0.008, "shrinks: +0.0080 nats"),
        (0.03, -0.008, "shrinks: -0.0080 nats"),
        (-0.03, -0.008, "grows: -0.0080 nats"),
        (0.03, 0.008, "grows: +0.0080 nats"),
        (-0.01, 0.008, "crosses 0: +0.0080 nats"),
        (-0.03, 0.002, "shows no trend: +0.0020 nats"),
    ],
)
def test_trend_sentence_states_direction_of_loss_gap(tmp_path, start, slope, words):
    trend = sentence(trend_comparison(tmp_path, start, slope))
    assert f"The gap of gated to standard {words} per token per doubling of tokens" in trend
    end = start + slope * math.log2(10)
    assert f"3 seeds), from {start:+.4f} to {end:+.4f} on a line" in trend
    assert "through 5 evaluations from 512 to 5.12k tokens." in trend


def test_report_contains_trend_slope_and_confidence_interval(tmp_path):
    comparison = trend_comparison(tmp_path, -0.03, 0.008)
    standard, gated = csv_rows(comparison)
    assert float(gated["gap_trend"]) == pytest.approx(0.008)
    half = 4.302653 * 0.001 / math.sqrt(3)  # Student's t with 2 degrees of freedom
    ends = float(gated["gap_trend_low"]), float(gated["gap_trend_high"])
    assert ends == pytest.approx((0.008 - half, 0.008 + half), rel=1e-5)
    assert standard["gap_trend"] == ""
    table = gap_table(comparison.rows, row_styles(comparison.rows))
    (column,) = [column for column in table.columns if column.title == "Trend"]
    assert column.cells[0].text == "+0.0080 (+0.0055 to +0.0105)"
    assert column.cells[0].text in page_text(comparison)


def test_trend_slope_of_single_seed_has_no_confidence_interval(tmp_path):
    trend = sentence(trend_comparison(tmp_path, -0.03, 0.008, seeds=1))
    assert "moves: +0.0070 nats per token per doubling of tokens (no interval from one" in trend


def test_trend_of_loss_gap_excludes_seed_with_diverged_run(tmp_path):
    trend = sentence(trend_comparison(tmp_path, -0.03, 0.008, diverged=[2]))
    assert "+0.0075 nats" in trend, "the mean of the first two seeds"
    assert "2 seeds" in trend


def test_loss_gap_has_no_trend_if_runs_have_only_two_evaluations(tmp_path):
    comparison = trend_comparison(tmp_path, -0.03, 0.008, steps=(1, 10, 20))
    assert comparison.rows[1].gap is not None
    assert comparison.rows[1].trend is None
    assert "per doubling" not in whole_text(comparison)


@pytest.mark.slow
def test_report_describes_only_largest_trend_if_many_variants_exist():
    comparison = sample.comparison_of(sample.NINE, 2, n=40)
    assert sum(row.trend is not None for row in comparison.rows) == 8
    trend = sentence(comparison)
    start = "note: 0 of 8 trends over tokens are significant after Holm's correction "
    assert trend.startswith(start)
    rows = [row for row in comparison.rows if row.trend]
    largest = max(rows, key=lambda row: abs(row.trend.slope.mean))
    assert f"Largest: The gap of {largest.label} to standard shows no trend" in trend
