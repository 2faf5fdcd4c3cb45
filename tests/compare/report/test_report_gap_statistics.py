"""Statistical tests of gaps in a report: p, Holm, Welch, correlation, divergence."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
import sample_comparison as sample
from scipy import stats
from test_report_page import Reader, figures_of, words_of

from diffllm.compare.report.comparison import compare
from diffllm.compare.report.figures import SURFACE, draw_gaps
from diffllm.compare.report.page_tables import gap_table
from diffllm.compare.report.report_page import page
from diffllm.compare.report.results import holm_sentence
from diffllm.compare.report.sections import page_sections
from diffllm.compare.report.styles import row_styles
from diffllm.compare.report.tables import csv_text, table_columns
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


def compared(losses):
    """Return a comparison of runs with these final losses by variant, in the order of seeds."""
    runs = []
    for variant, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            run = sample.run(variant, seed, 12)
            runs.append(replace(run, summary={"heldout_loss": loss}))
    return compare(runs, title="made")


@pytest.fixture(scope="module")
def four():
    return compared(LOSSES)


@pytest.fixture(scope="module")
def shown(four):
    """Return the text of the page of `four`."""
    return " ".join(Reader(page(four)).text.split())


def test_p_values_and_welch_intervals_in_report_csv_match_scipy(four):
    lines = list(csv.DictReader(io.StringIO(csv_text(four.rows))))
    base = LOSSES["standard"]
    ps = [stats.ttest_rel(LOSSES[line["variant"]], base).pvalue for line in lines[1:]]
    assert [float(line["gap_p"]) for line in lines[1:]] == pytest.approx(ps)
    assert ps[0] < ps[1] < 0.05 < ps[2]
    holm = [3 * ps[0], 2 * ps[1], ps[2]]
    assert [float(line["gap_p_holm"]) for line in lines[1:]] == pytest.approx(holm)
    for line in lines[1:]:
        candidate = LOSSES[line["variant"]]
        interval = stats.ttest_ind(candidate, base, equal_var=False).confidence_interval()
        found = float(line["gap_welch_low"]), float(line["gap_welch_high"])
        assert found == pytest.approx(tuple(interval))
        assert float(line["seed_correlation"]) == pytest.approx(stats.pearsonr(candidate, base)[0])
        assert (line["diverged_low"], line["diverged_p"]) == ("0.0", "1.0")
    assert {lines[0][name] for name in ("gap_p", "gap_p_holm", "seed_correlation")} == {""}


def gap_cells(found):
    """Return the cells of each line of the table of tests, by head of the column."""
    table = gap_table(found.rows, row_styles(found.rows))
    heads = [column.head for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in table.rows]


def test_report_states_number_of_significant_gaps_after_holm_correction(four, shown):
    expected = "1 of 3 gaps is significant after Holm's correction at 0.05; better: gated."
    assert holm_sentence(four.rows) == expected
    assert shown.index(holm_sentence(four.rows)) < shown.index("Gap to standard at the end")
    assert holm_sentence(four.rows) in table_text(four).splitlines()
    (tags,) = (
        [cell.tag for cell in column.cells]
        for column in table_columns(four.rows, four.baseline)
        if column.title == "Gap to standard"
    )
    assert tags == ["baseline", "", "not significant after Holm", "no difference shown"]


@pytest.mark.slow
def test_gap_figure_fills_marker_only_if_gap_is_significant(four):
    (card, *_), *_ = page_sections(four, row_styles(four.rows))
    assert "significant after Holm's correction over the 3 gaps" in card.caption
    styles = row_styles(four.rows)
    gaps = [row.gap for row in four.rows[1:]]
    axes = draw_gaps(gaps, styles[1:], hollow=[False, True, True]).axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    fills = [mark.get_markerfacecolor() for mark in marks]
    assert fills == [styles[1].colour, SURFACE, SURFACE]


def test_report_of_single_seed_mentions_no_interval_and_no_test():
    found = compared({"standard": [4.0], "gated": [3.9]})
    text = page(found)
    (_, svg), *_ = figures_of(text).items()
    assert "mean" in words_of(svg)
    words = " ".join(Reader(text).text.split())
    assert "A single seed has no interval and no test." in words
    for absent in ("95% interval", "Student's t over", "The gap is", "Statistics of the gaps"):
        assert absent not in words + table_text(found)
    two = page(compared({"standard": [4.0, 4.1], "gated": [3.9, 4.05]}))
    assert "95% interval" in two


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("gaps", "sentence"),
    [
        ([-0.10, -0.11], "The gap is significant (p = 0.03, 2 seeds)."),
        ([-0.10, 0.11], "The gap is not significant (p = 0.97, 2 seeds)."),
    ],
)
def test_single_gap_is_reported_with_p_and_without_holm_correction(gaps, sentence):
    base = [4.0, 4.2]
    found = compared(
        {"standard": base, "gated": [x + gap for x, gap in zip(base, gaps, strict=True)]}
    )
    assert holm_sentence(found.rows) == sentence
    text = " ".join(Reader(page(found)).text.split())
    assert sentence in text
    assert "Holm" not in text
    assert text.count("Warning: an interval from two seeds has one degree of freedom") == 1


@pytest.mark.slow
def test_report_explains_overlapping_losses_of_significant_paired_gap():
    """Seeds move both rows by 0.2, but their gap is 0.1 for every seed up to 0.002."""
    together = {"standard": [4.0, 4.2, 4.4], "gated": [3.9, 4.101, 4.302]}
    overlap = "Intervals of two rows can overlap although the interval of their gap excludes 0"
    assert overlap in " ".join(table_text(compared(together)).split())
    assert overlap in " ".join(Reader(page(compared(together))).text.split())
    alone = {"standard": [4.0, 4.001, 4.002], "gated": [3.9, 3.901, 3.9]}
    assert overlap not in " ".join(Reader(page(compared(alone))).text.split())


@pytest.mark.parametrize("seeds", [1, 3])
def test_gap_figure_shows_arrow_for_gap_outside_axis_range(four, seeds):
    gaps = [Estimate(-0.01, -0.02, 0.0, 3), Estimate(5.25, 5.0, 5.5, seeds)]
    axes = draw_gaps(gaps, row_styles(four.rows)[1:3]).axes[0]
    (arrow,) = (line for line in axes.lines if line.get_marker() == ">")
    assert (arrow.get_xdata()[0], arrow.get_ydata()[0]) == (axes.get_xlim()[1], 1)
    assert "+5.25" in [text.get_text().strip() for text in axes.texts]
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == ["95% interval", "mean", "off the scale"]


def test_loss_gap_is_not_significant_if_gap_is_equal_for_all_seeds():
    losses = {"standard": [4.0, 4.2], "gated": [3.0, 3.2], "diff_v2": [3.9]}
    found = compared(losses)
    gated, diff_v2 = found.rows[1:]
    assert (gated.p_holm, gated.values["gap_p"]) == (1, 1)
    assert (diff_v2.p_holm, diff_v2.values["gap_p"]) == (None, None)
    notes = [line["p"].tag for line in gap_cells(found)]
    assert notes == ["seeds do not vary: p counts as 1", "no interval from one seed"]
    assert holm_sentence(found.rows) == "The gap is not significant (p = 1.00, 2 seeds)."
    page(found)


def test_variant_is_not_significantly_better_if_more_runs_diverged():
    losses = {
        "standard": [4.00, 4.10, 4.20, 4.05],
        "gated": [3.50, 3.61, 3.70, float("nan")],
        "diff_v1": [4.50, 4.61, 4.70, float("nan")],
        "diff_v2": [float("nan")] * 4,
    }
    found = compared(losses)
    gated, diff_v1, diff_v2 = found.rows[1:]
    assert gated.outcome.paired.p < 0.01
    assert gated.p_holm == 1
    assert diff_v1.p_holm < 0.05
    assert diff_v2.gap is diff_v2.baseline is diff_v2.p_holm is None
    assert diff_v2.outcome.candidate == Share(4, 4)
    assert diff_v2.values["diverged_p"] == pytest.approx(stats.fisher_exact([[4, 0], [0, 4]])[1])
    assert diff_v2.values["diverged_low"] == pytest.approx(0.025**0.25)
    lines = gap_cells(found)
    assert [line["Row"].text for line in lines] == [row.label for row in found.rows[1:]]
    assert lines[0]["Diverged, 95%, and p"].text == "1 of 4 (1% to 81%) against 0 of 4"
    assert "favours the row with more diverged runs" in lines[0]["p, Holm"].tag
    assert lines[2]["p, Holm"].tag == "no common seed with finite losses"
    expected = "1 of 2 gaps is significant after Holm's correction at 0.05; worse: diff_v1."
    assert holm_sentence(found.rows) == expected
    text = " ".join(Reader(page(found)).text.split())
    assert "4 of 4 (40% to 100%) against 0 of 4" in text
    assert "more parameters, 1 of 4 seeds diverged (25%, 0.63% to 81%)" in text
    assert "diff_v2: 4 of 4 seeds diverged" in text


# Documents and seeds


def with_documents(tmp_path, seeds, texts=40):
    """Write runs of two arms with losses of documents; the gap of every document is -0.1."""
    rng, runs = np.random.default_rng(0), []
    tokens = rng.integers(20, 200, texts)
    for variant, gap in (("standard", 0.0), ("diff_v2", -0.1)):
        for seed in range(seeds):
            of_documents = 4 + gap + 0.01 * np.random.default_rng(seed).normal(size=texts)
            numbers = np.arange(texts, dtype=np.int64)
            losses = DocumentLosses(of_documents * tokens, tokens, 4 * tokens, numbers, 0 * numbers)
            path = tmp_path / f"{variant}{seed}"
            path.mkdir(parents=True)
            losses.save(path, 12)
            run = sample.run(variant, seed, 12)
            loss = losses.loss + 1e-3 * rng.normal()
            runs.append(replace(run, path=path, summary={"heldout_loss": loss}))
    return runs


def test_interval_over_documents_adds_error_of_documents_to_error_of_seeds(tmp_path):
    runs = with_documents(tmp_path, 3)
    found = compare(runs, title="made")
    row = found.rows[1]
    gap = row.outcome.over_documents
    assert gap.mean == row.gap.mean == pytest.approx(-0.1, abs=0.01)
    assert gap.error == math.hypot(row.outcome.paired.error, gap.document_error)
    assert row.values["gap_documents_low"] == gap.estimate.low
    (line,) = gap_cells(found)
    text = " ".join(Reader(page(found)).text.split())
    interval = line["Documents and seeds, 95%"].text
    assert interval.startswith("−0.1")
    assert interval in text
    assert "An interval over documents and seeds is missing" not in text


def test_report_page_explains_missing_interval_over_documents(tmp_path):
    runs = with_documents(tmp_path, 3)
    other = document_losses(runs[0].path)
    replace(other, tokens=other.tokens + 1).save(runs[0].path, 12)
    found = compare(runs, title="made")
    assert found.rows[1].values["gap_documents_low"] is None
    text = " ".join(Reader(page(found)).text.split())
    reason = "the runs were measured on different documents"
    assert f"An interval over documents and seeds is missing: {reason}." in text
    warning = (
        "The gap of diff_v2 to standard is not at equal evaluation: their final losses were "
        "measured on different held-out documents."
    )
    assert f"Warning: {warning}" in text
    assert f"warning: {warning}" in " ".join(table_text(found).split())
    single_seed = [run for run in runs if run.seeds == runs[0].seeds]
    assert compare(single_seed).warnings == [warning]
    (runs[0].path / "heldout" / "step-00000012.npz").unlink()
    reason = "runs have no losses of documents"
    runs_read_again = [replace(run) for run in runs]
    assert compare(runs_read_again).rows[1].outcome.no_documents == reason
