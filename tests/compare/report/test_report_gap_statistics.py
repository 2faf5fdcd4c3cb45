"""Statistical tests of gaps in a report: p, Holm, Welch, correlation, divergence."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sample_comparison as sample
from report_pages import Reader, columns_of, csv_rows, figures_of, page_text, undrawn_page, words_of
from scipy import stats

from diffllm.compare.arms.gap import arm_gap
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.figures import SURFACE, draw_gaps
from diffllm.compare.report.page_tables import gap_table
from diffllm.compare.report.results import holm_sentence
from diffllm.compare.report.sections import page_sections
from diffllm.compare.report.styles import row_styles
from diffllm.compare.report.terminal import table_text
from diffllm.evaluation.heldout import DocumentLosses, document_losses
from diffllm.statistics.divergence import Share
from diffllm.statistics.estimates import Estimate

LOSSES = {
    "standard": [4.00, 4.10, 4.20, 4.05],
    "gated": [3.90, 4.01, 4.09, 3.95],  # significant
    "diff_v1": [3.98, 4.06, 4.19, 4.03],  # significant only without Holm's correction
    "diff_v2": [4.05, 4.02, 4.20, 4.09],
}


def comparison_of_losses(losses):
    """Return a comparison of runs with these final losses by variant, in the order of seeds."""
    runs = []
    for variant, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            run = sample.run_of(variant, seed, 12)
            runs.append(replace(run, summary={"heldout_loss": loss}))
    return compare(runs, title="made")


@pytest.fixture(scope="module")
def four_variants():
    return comparison_of_losses(LOSSES)


def test_p_values_and_welch_intervals_in_report_csv_match_scipy(four_variants):
    base_line, *lines = csv_rows(four_variants)
    base = LOSSES["standard"]
    p_values = [stats.ttest_rel(LOSSES[line["variant"]], base).pvalue for line in lines]
    assert [float(line["gap_p"]) for line in lines] == pytest.approx(p_values)
    assert p_values[0] < p_values[1] < 0.05 < p_values[2]
    holm = [3 * p_values[0], 2 * p_values[1], p_values[2]]
    assert [float(line["gap_p_holm"]) for line in lines] == pytest.approx(holm)
    for line in lines:
        candidate = LOSSES[line["variant"]]
        interval = stats.ttest_ind(candidate, base, equal_var=False).confidence_interval()
        reported = float(line["gap_welch_low"]), float(line["gap_welch_high"])
        assert reported == pytest.approx(tuple(interval))
        assert float(line["seed_correlation"]) == pytest.approx(stats.pearsonr(candidate, base)[0])
        assert (line["diverged_low"], line["diverged_p"]) == ("0.0", "1.0")
    assert {base_line[name] for name in ("gap_p", "gap_p_holm", "seed_correlation")} == {""}


def gap_cells(comparison):
    """Return the cells of each line of the table of tests, by head of the column."""
    table = gap_table(comparison.rows, row_styles(comparison.rows))
    heads = [column.head for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in table.rows]


def test_report_states_number_of_significant_gaps_after_holm_correction(four_variants):
    text = page_text(four_variants)
    sentence = "1 of 3 gaps is significant after Holm's correction at 0.05; better: gated."
    assert holm_sentence(four_variants.rows) == sentence
    assert text.index(sentence) < text.index("Gap to standard at the end")
    assert sentence in table_text(four_variants).splitlines()
    tags = [cell.tag for cell in columns_of(four_variants)["Gap to standard"].cells]
    assert tags == ["baseline", "", "not significant after Holm", "no difference shown"]


@pytest.mark.slow
def test_gap_figure_fills_marker_only_if_gap_is_significant(four_variants):
    (card, *_), *_ = page_sections(four_variants, row_styles(four_variants.rows))
    assert "significant after Holm's correction over the 3 gaps" in card.caption
    styles = row_styles(four_variants.rows)
    gaps = [row.gap for row in four_variants.rows[1:]]
    axes = draw_gaps(gaps, styles[1:], hollow=[False, True, True]).axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    fills = [mark.get_markerfacecolor() for mark in marks]
    assert fills == [styles[1].colour, SURFACE, SURFACE]


def test_report_of_single_seed_mentions_no_interval_and_no_test():
    comparison = comparison_of_losses({"standard": [4.0], "gated": [3.9]})
    title = "Gap to standard at the end"
    html = undrawn_page(comparison, title)
    assert "mean" in words_of(figures_of(html)[title])
    text = " ".join(Reader(html).text.split())
    assert "A single seed has no interval and no test." in text
    for absent in ("95% interval", "Student's t over", "The gap is", "Statistics of the gaps"):
        assert absent not in text + table_text(comparison)
    two_seeds = comparison_of_losses({"standard": [4.0, 4.1], "gated": [3.9, 4.05]})
    assert "95% interval" in page_text(two_seeds)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("gated", "sentence"),
    [
        ([3.9, 4.09], "The gap is significant (p = 0.03, 2 seeds)."),
        ([3.9, 4.31], "The gap is not significant (p = 0.97, 2 seeds)."),
    ],
)
def test_single_gap_is_reported_with_p_and_without_holm_correction(gated, sentence):
    comparison = comparison_of_losses({"standard": [4.0, 4.2], "gated": gated})
    assert holm_sentence(comparison.rows) == sentence
    text = page_text(comparison)
    assert sentence in text
    assert "Holm" not in text
    assert text.count("Warning: an interval from two seeds has one degree of freedom") == 1


@pytest.mark.slow
def test_report_explains_overlapping_losses_of_significant_paired_gap():
    """Seeds move both rows by 0.2, but their gap is 0.1 for every seed up to 0.002."""
    together = {"standard": [4.0, 4.2, 4.4], "gated": [3.9, 4.101, 4.302]}
    overlap = "Intervals of two rows can overlap although the interval of their gap excludes 0"
    assert overlap in " ".join(table_text(comparison_of_losses(together)).split())
    assert overlap in page_text(comparison_of_losses(together))
    alone = {"standard": [4.0, 4.001, 4.002], "gated": [3.9, 3.901, 3.9]}
    assert overlap not in page_text(comparison_of_losses(alone))


@pytest.mark.parametrize("seeds", [1, 3])
def test_gap_figure_shows_arrow_for_gap_outside_axis_range(four_variants, seeds):
    gaps = [Estimate(-0.01, -0.02, 0.0, 3), Estimate(5.25, 5.0, 5.5, seeds)]
    axes = draw_gaps(gaps, row_styles(four_variants.rows)[1:3]).axes[0]
    (arrow,) = (line for line in axes.lines if line.get_marker() == ">")
    assert (arrow.get_xdata()[0], arrow.get_ydata()[0]) == (axes.get_xlim()[1], 1)
    assert "+5.25" in [text.get_text().strip() for text in axes.texts]
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == ["95% interval", "mean", "off the scale"]


def test_loss_gap_is_not_significant_if_gap_is_equal_for_all_seeds():
    losses = {"standard": [4.0, 4.2], "gated": [3.0, 3.2], "diff_v2": [3.9]}
    comparison = comparison_of_losses(losses)
    gated, diff_v2 = comparison.rows[1:]
    assert (gated.p_holm, gated.values["gap_p"]) == (1, 1)
    assert (diff_v2.p_holm, diff_v2.values["gap_p"]) == (None, None)
    notes = [line["p"].tag for line in gap_cells(comparison)]
    assert notes == ["seeds do not vary: p counts as 1", "no interval from one seed"]
    assert holm_sentence(comparison.rows) == "The gap is not significant (p = 1.00, 2 seeds)."
    undrawn_page(comparison)


def test_variant_is_not_significantly_better_if_more_runs_diverged():
    losses = {
        "standard": [4.00, 4.10, 4.20, 4.05],
        "gated": [3.50, 3.61, 3.70, float("nan")],
        "diff_v1": [4.50, 4.61, 4.70, float("nan")],
        "diff_v2": [float("nan")] * 4,
    }
    comparison = comparison_of_losses(losses)
    gated, diff_v1, diff_v2 = comparison.rows[1:]
    assert gated.outcome.paired.p < 0.01
    assert gated.p_holm == 1
    assert diff_v1.p_holm < 0.05
    assert diff_v2.gap is diff_v2.baseline is diff_v2.p_holm is None
    assert diff_v2.outcome.candidate == Share(4, 4)
    assert diff_v2.values["diverged_p"] == pytest.approx(stats.fisher_exact([[4, 0], [0, 4]])[1])
    assert diff_v2.values["diverged_low"] == pytest.approx(0.025**0.25)
    lines = gap_cells(comparison)
    assert [line["Row"].text for line in lines] == [row.label for row in comparison.rows[1:]]
    assert lines[0]["Diverged, 95%, and p"].text == "1 of 4 (1% to 81%) against 0 of 4"
    assert "favours the row with more diverged runs" in lines[0]["p, Holm"].tag
    assert lines[2]["p, Holm"].tag == "no common seed with finite losses"
    expected = "1 of 2 gaps is significant after Holm's correction at 0.05; worse: diff_v1."
    assert holm_sentence(comparison.rows) == expected
    text = page_text(comparison)
    assert "4 of 4 (40% to 100%) against 0 of 4" in text
    assert "more parameters, 1 of 4 seeds diverged (25%, 0.63% to 81%)" in text
    assert "diff_v2: 4 of 4 seeds diverged" in text


# Documents and seeds


def runs_with_documents(tmp_path, seeds, texts=40):
    """Write runs of two arms with losses of documents; the gap of every document is -0.1."""
    rng, runs = np.random.default_rng(0), []
    tokens = rng.integers(20, 200, texts)
    numbers = np.arange(texts, dtype=np.int64)
    for variant, gap in (("standard", 0.0), ("diff_v2", -0.1)):
        for seed in range(seeds):
            means = 4 + gap + 0.01 * np.random.default_rng(seed).normal(size=texts)
            losses = DocumentLosses(means * tokens, tokens, 4 * tokens, numbers, 0 * numbers)
            path = tmp_path / f"{variant}{seed}"
            path.mkdir(parents=True)
            losses.save(path, 12)
            loss = losses.loss + 1e-3 * rng.normal()
            summary = {"heldout_loss": loss}
            runs.append(replace(sample.run_of(variant, seed, 12), path=path, summary=summary))
    return runs


def test_report_shows_interval_over_documents_or_reason_for_its_absence(tmp_path):
    runs = runs_with_documents(tmp_path, 3)
    comparison = compare(runs)
    row = comparison.rows[1]
    gap = row.outcome.over_documents
    assert gap == arm_gap(row, row.against).full
    assert gap.error == math.hypot(row.outcome.paired.error, gap.document_error)
    assert row.values["gap_documents_low"] == gap.estimate.low
    (cells,) = gap_cells(comparison)
    interval = cells["Documents and seeds, 95%"].text
    text = page_text(comparison)
    assert interval.startswith("−0.1")
    assert interval in text
    assert "An interval over documents and seeds is missing" not in text

    losses = document_losses(runs[0].path)
    replace(losses, tokens=losses.tokens + 1).save(runs[0].path, 12)
    comparison = compare([replace(run) for run in runs])
    assert comparison.rows[1].values["gap_documents_low"] is None
    reason = "the runs were measured on different documents"
    text = page_text(comparison)
    assert f"An interval over documents and seeds is missing: {reason}." in text
    warning = (
        "The gap of diff_v2 to standard is not at equal evaluation: their final losses were "
        "measured on different held-out documents."
    )
    assert f"Warning: {warning}" in text
    assert f"warning: {warning}" in " ".join(table_text(comparison).split())
    single_seed = [replace(run) for run in runs if run.seeds == runs[0].seeds]
    assert compare(single_seed).warnings == [warning]
    (runs[0].path / "heldout" / "step-00000012.npz").unlink()
    without_losses = compare([replace(run) for run in runs])
    assert without_losses.rows[1].outcome.no_documents == "runs have no losses of documents"
