"""Trends of gaps over tokens, for curves whose gaps are known lines."""

import csv
import io
import math

import pytest
import sample_comparison as sample
from runs.written import loaded, write_run
from test_report_page import Reader

from diffllm.compare.report.comparison import compare
from diffllm.compare.report.page_tables import gap_table
from diffllm.compare.report.report_page import page
from diffllm.compare.report.sections import page_sections
from diffllm.compare.report.styles import row_styles
from diffllm.compare.report.tables import csv_text
from diffllm.compare.report.terminal import whole_text

TOKENS = 8 * 32
NOISE = (-0.001, 0.0, 0.001)


def gap_at(step, start, slope):
    """Return a gap: 1 at step 1, which is before 10% of 20 steps, then a line from `start`."""
    return 1.0 if step == 1 else start + slope * math.log2(step / 2)


def compared(tmp_path, start, slope, seeds=3, steps=(1, 2, 5, 10, 15, 20), diverged=()):
    """Return a comparison of standard and gated; slopes differ by NOISE between seeds."""
    for variant in ("standard", "gated"):
        for seed in range(seeds):
            lines = [
                {
                    "step": step,
                    "tokens": step * TOKENS,
                    "train/loss": 5.0,
                    "eval/loss": 5 - 0.1 * math.log2(step) + 0.01 * seed
                    + (variant == "gated") * gap_at(step, start, slope + NOISE[seed]),
                }
                for step in steps
            ]  # fmt: skip
            lost = variant == "gated" and seed in diverged
            write_run(
                tmp_path / f"{variant}{seed}", f"attention={variant}", f"seed={seed}",
                lines=lines, loss=lines[-1]["eval/loss"],
                summary={"heldout_loss": None} if lost else None,
            )  # fmt: skip
    return compare(loaded(sorted(tmp_path.iterdir())))


def sentence(found):
    """Return the only sentence about a trend, which must be in the terminal and in the figure."""
    (said,) = [line for line in whole_text(found).splitlines() if "per doubling of tokens" in line]
    _, sections, _ = page_sections(found, row_styles(found.rows))
    (gaps,) = [section for section in sections if section.title == "Gaps"]
    (caption,) = [card.caption for card in gaps.blocks[-1].figures]
    assert said.removeprefix("note: ") in caption.replace("−", "-")
    return said


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
    said = sentence(compared(tmp_path, start, slope))
    assert f"The gap of gated to standard {words} per token per doubling of tokens" in said
    end = start + slope * math.log2(10)
    assert f"3 seeds), from {start:+.4f} to {end:+.4f} on a line" in said
    assert "through 5 evaluations from 512 to 5.12k tokens." in said


def test_report_contains_trend_slope_and_confidence_interval(tmp_path):
    found = compared(tmp_path, -0.03, 0.008)
    standard, gated = csv.DictReader(io.StringIO(csv_text(found.rows)))
    assert float(gated["gap_trend"]) == pytest.approx(0.008)
    half = 4.302653 * 0.001 / math.sqrt(3)  # Student's t with 2 degrees of freedom
    ends = float(gated["gap_trend_low"]), float(gated["gap_trend_high"])
    assert ends == pytest.approx((0.008 - half, 0.008 + half), rel=1e-5)
    assert standard["gap_trend"] == ""
    table = gap_table(found.rows, row_styles(found.rows))
    (column,) = [column for column in table.columns if column.title == "Trend"]
    assert column.cells[0].text == "+0.0080 (+0.0055 to +0.0105)"
    assert column.cells[0].text in " ".join(Reader(page(found)).text.split())


def test_trend_slope_of_single_seed_has_no_confidence_interval(tmp_path):
    said = sentence(compared(tmp_path, -0.03, 0.008, seeds=1))
    assert "moves: +0.0070 nats per token per doubling of tokens (no interval from one" in said


def test_trend_of_loss_gap_excludes_seed_with_diverged_run(tmp_path):
    said = sentence(compared(tmp_path, -0.03, 0.008, diverged=[2]))
    assert "+0.0075 nats" in said, "the mean of the first two seeds"
    assert "2 seeds" in said


def test_loss_gap_has_no_trend_if_runs_have_only_two_evaluations(tmp_path):
    found = compared(tmp_path, -0.03, 0.008, steps=(1, 10, 20))
    assert found.rows[1].gap is not None
    assert found.rows[1].trend is None
    assert "per doubling" not in whole_text(found)


@pytest.mark.slow
def test_report_describes_only_largest_trend_if_many_variants_exist():
    found = sample.compared(sample.NINE, 2, n=40)
    assert sum(row.trend is not None for row in found.rows) == 8
    said = sentence(found)
    assert said.startswith(
        "note: 0 of 8 trends over tokens are significant after Holm's correction "
    )
    largest = max((row for row in found.rows if row.trend), key=lambda r: abs(r.trend.slope.mean))
    assert f"Largest: The gap of {largest.label} to standard shows no trend" in said
