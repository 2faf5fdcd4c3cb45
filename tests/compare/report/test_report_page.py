"""The report page as text: well-formed, self-contained, reproducible, complete."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import matplotlib
import numpy as np
import pytest
import sample_comparison as sample
from matplotlib.axes import Axes
from report_pages import Reader, columns_of, figures_of, undrawn_page, words_of
from tiers import slow_but

from diffllm.compare.arms.arm import RunArm
from diffllm.compare.arms.run import Metrics, Run, Series
from diffllm.compare.arms.sentences import compact
from diffllm.compare.report import curves
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.figures import RC, draw_curves, legend_of
from diffllm.compare.report.page_tables import runs_table
from diffllm.compare.report.report_page import page
from diffllm.compare.report.rows import Row
from diffllm.compare.report.styles import RowStyle, row_styles
from diffllm.config.compose import variants
from diffllm.metrics.panels import sections_by_title
from diffllm.statistics.gap_tests import Gap

CASES = {
    "one run": lambda: sample.comparison_of(("diff_v2",), 1, 28),
    "four variants": lambda: sample.comparison_of(sample.FOUR, 3, 40, probes=True),
    "nine rows": lambda: sample.comparison_of(sample.NINE, 3, 40),
    "incomparable": sample.incomparable,
    "barely started": sample.barely_started,
    "not finite": sample.not_finite,
    "hostile names": sample.hostile,
    "learning rates": sample.sweep_of_rates,
}


@cache
def comparison_of(case: str) -> Comparison:
    return CASES[case]()


@cache
def html_of(case: str) -> str:
    return page(comparison_of(case))


@cache
def undrawn_html_of(case: str) -> str:
    return undrawn_page(comparison_of(case))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", slow_but(["one run", "nine rows", "hostile names"], CASES))
def test_report_page_is_valid_html_without_external_resources(case):
    text = html_of(case)
    assert len(text) < 1_500_000
    reader = Reader(text)
    assert len(reader.ids) == len(set(reader.ids))
    assert all(link.startswith("data:") for link in reader.links)
    assert not re.search(r"@import|url\(", text)
    assert not reader.handlers
    assert "script" not in reader.tags
    shown = reader.text[: reader.text.index("How to read this")].lower()
    assert not {"nan", "inf", "none"} & set(re.findall(r"\w+", shown))
    assert all(row.label in reader.text for row in comparison_of(case).rows)


def test_report_page_is_identical_if_created_twice_from_same_runs():
    assert page(sample.hostile()) == html_of("hostile names")


@pytest.mark.parametrize("case", slow_but(["one run", "hostile names"], CASES))
def test_report_figures_are_svg_images_with_alternative_text(case):
    text = html_of(case)
    figures = figures_of(text)
    assert len(figures) == text.count("<img ") == len(re.findall(r'<img [^>]* alt="\w', text))
    for svg in figures.values():
        assert words_of(svg)
        assert not re.search(r'href="(?!#|data:image/png)', svg)
    if case == "hostile names":
        assert Reader(text).text.count(sample.HOSTILE) > 10
        words = words_of(figures["Held-out sample loss"])
        assert sample.HOSTILE[:43] + "…" in words
        assert "</title></svg><img src=x onerror=alert(1)>" in words


@pytest.mark.slow
def test_report_figures_have_legend_with_label_of_every_curve():
    labels = [row.label for row in comparison_of("nine rows").rows]
    figures = figures_of(html_of("nine rows"))
    assert words_of(figures["Held-out sample loss"])[-9:] == labels
    assert set(labels[1:]) <= set(words_of(figures["Gap to standard at the end"]))
    lambdas = [name for name in labels if name.startswith("diff_v") and "no_lambda" not in name]
    assert words_of(figures["Largest lambda, by layer"])[-5:] == lambdas
    assert set(lambdas) <= set(words_of(figures["Mean lambda, by layer"]))
    for name, style in zip(labels, row_styles(comparison_of("nine rows").rows), strict=True):
        assert style.colour in figures["Held-out sample loss"], name


def test_sections_of_page_have_order_of_dashboards():
    """The order is that of the tests of dashboards and of TensorBoard."""
    headings = re.findall("<h2>(.*?)</h2>", undrawn_html_of("four variants"))
    titles = [title for title in headings if title in sections_by_title()]
    assert titles == ["Loss", "Stability", "Outliers", "Attention", "Gaps", "Speed"]
    assert titles == [*sections_by_title()][: len(titles)]


def test_caption_of_gradient_norm_figure_mentions_parameter_group():
    text = undrawn_html_of("four variants")
    for group in ("attention", "embedding", "ffn"):
        assert f"L2 norm over the parameters of the group {group}." in text


def test_table_of_runs_shows_seed_and_tokens_of_each_run():
    rows = comparison_of("four variants").rows
    cells = runs_table(rows).rows[0]
    assert [cell.text for cell in cells[:2]] == ["standard", "0"]
    assert cells[3].text == compact(int(rows[0].runs[0].metrics.tokens[-1]))
    listed = undrawn_html_of("four variants").split('aria-label="Runs"')[1]
    assert '<th scope="col">Seed</th>' in listed


def test_legend_of_more_than_ten_curves_has_one_entry_per_variant():
    names = [(name, rate) for name in ("standard", "gated") for rate in range(12)]
    rows = [RunArm.of(f"{name} lr={rate}", {"attention": name}, [], {}) for name, rate in names]
    styles = row_styles(rows)
    assert [name for name, _ in legend_of(styles[:10])] == [row.label for row in rows[:10]]
    assert legend_of(styles) == [("standard", styles[0]), ("gated", styles[12])]
    plugins = row_styles([RunArm.of(f"p{i}", {"attention": f"p{i}"}, [], {}) for i in range(20)])
    assert [name for name, _ in legend_of(plugins)] == [f"p{i}" for i in range(10)]


def test_report_page_shows_no_gap_between_incomparable_runs():
    text = " ".join(Reader(undrawn_html_of("incomparable")).text.split())
    assert "2 groups of rows that cannot be compared; they differ in steps." in text
    assert "Astandard steps=800800 Bdiff_v2 steps=400400" in text
    assert "diff_v2-0 has not finished: step 400 of 400" in text
    assert text.count("Rows are not comparable: they differ in steps.") >= 2
    assert "Gap to" not in text
    comparable = Reader(undrawn_html_of("four variants")).text
    assert "cannot be compared" not in comparable
    assert "not comparable" not in comparable


def gap_tags(comparison: Comparison, base: Row, row: Row) -> list[str]:
    """Return the tags of two rows in the column of gaps, which must exist."""
    rows = [base, replace(row, against=base)]
    column = columns_of(replace(comparison, rows=rows))["Gap to standard"]
    return [cell.tag for cell in column.cells]


def test_gap_cell_reports_no_difference_if_confidence_interval_contains_0():
    comparison = sample.comparison_of(("standard", "gated"), 2, 10)
    base, row = comparison.rows

    def with_gap(gap: Gap) -> Row:
        return replace(row, outcome=replace(row.outcome, paired=gap), p_holm=0.01)

    different, equal = with_gap(Gap(-0.01, 3, 3, 0.001, 2)), with_gap(Gap(-0.01, 3, 3, 0.01, 2))
    single_seed = with_gap(Gap(-0.01, 1, 1))
    half_diverged = [base.runs[0], replace(base.runs[1], summary={"heldout_loss": None})]
    losses = {half_diverged[0].seeds: half_diverged[0].final_loss, half_diverged[1].seeds: None}
    diverged_base = replace(base, runs=half_diverged, seed_values=losses)
    diverged = replace(equal, runs=half_diverged, seed_values=losses)
    assert gap_tags(comparison, base, different) == ["baseline", ""]
    assert gap_tags(comparison, base, equal) == ["baseline", "no difference shown"]
    assert gap_tags(comparison, base, single_seed) == ["baseline", "no interval from one seed"]
    reason = "1 of 2 seeds of standard diverged"
    assert gap_tags(comparison, diverged_base, equal) == ["baseline", reason]
    assert gap_tags(comparison, diverged_base, diverged)[1] == "1 of 2 seeds diverged"
    rows = [replace(base, is_baseline=False), replace(row, outcome=None)]
    assert "Gap to standard" not in columns_of(replace(comparison, rows=rows))


def test_attention_variant_has_same_colour_in_every_report():
    def styles_of(names: Iterable[str]) -> list[RowStyle]:
        return row_styles([RunArm.of(name, {"attention": name}, [], {}) for name in names])

    looks_of_nine = {style.label: (style.colour, style.dash) for style in styles_of(sample.NINE)}
    for style in styles_of(sample.FOUR):
        assert (style.colour, style.dash) == looks_of_nine[style.label]
    rates = row_styles(comparison_of("learning rates").rows)
    for styles in (styles_of(variants()), rates):
        assert len({(style.colour, style.dash) for style in styles}) == len(styles)


def test_ablation_by_overrides_has_same_style_next_to_other_ablations():
    def styles(*values: float | None) -> dict[str, tuple[str, tuple[float, ...]]]:
        rows = []
        for value in values:
            keys = {"attention": "diff_v2"}
            if value is not None:
                keys["model.attention.context_scale"] = value
            rows.append(RunArm.of(f"scale {value}", keys, [], {}))
        return {style.label: (style.colour, style.dash) for style in row_styles(rows)}

    every = styles(None, 0.25, 0.5, 2.0)
    assert len(set(every.values())) == 4
    assert styles(2.0).items() <= every.items()
    assert styles(0.5, None).items() <= every.items()


def series_of(*values: float) -> Series:
    return Series(10 * np.arange(1, len(values) + 1), np.array(values, dtype=float))


def test_mean_curve_over_seeds_ends_at_last_step_of_shortest_run():
    seeds = [series_of(3, 2, 1, 0), series_of(5, 4), series_of(7, 6, np.nan, np.nan)]
    band = curves.over_seeds(seeds)
    assert band.x.tolist() == [10, 20, 30, 40]
    for values, expected in ((band.mean, [5, 4]), (band.low, [3, 2]), (band.high, [7, 6])):
        assert values[:2].tolist() == expected
        assert np.isnan(values[2:]).all()
    assert band.singles[0][1:].tolist() == [2, 1, 0]
    assert band.stops == [(20, 4), (20, 6)]
    assert curves.over_seeds([]) is None
    assert curves.over_seeds([series_of(np.nan, np.nan)]) is None


def test_mean_curve_is_interrupted_at_nan_loss_of_any_seed():
    band = curves.over_seeds([series_of(1, np.nan, 3), series_of(1, 2, 3)])
    assert np.isnan(band.mean).tolist() == [False, True, False]
    assert not len(band.stops)
    assert band.singles[-1].tolist() == [1, 2, 3]
    smooth = curves.smoothed(series_of(1, np.nan, 5, 6, 7), 3).values
    assert np.isnan(smooth).tolist() == [False, True, False, False, False]
    assert smooth[2:].tolist() == [5.5, 6, 6.5]
    sparse = Series(np.array([10, 30]), np.array([1.0, 3.0]))
    interpolated = curves.over_seeds([sparse, series_of(1, 4, 5)])
    assert interpolated.mean.tolist() == [1, 3, 4]


@pytest.mark.parametrize(("n", "points"), [(8, 1), (41, 5), (200, 11), (1000, 21)])
def test_smoothed_curve_equals_centred_running_mean(n, points):
    assert curves.window(n) == points
    rng = np.random.default_rng(0)
    series = Series(np.arange(n), rng.normal(size=n))
    smooth, half = curves.smoothed(series, points).values, points // 2
    middle = n // 2
    assert smooth[middle] == pytest.approx(series.values[middle - half : middle + half + 1].mean())
    assert smooth[0] == pytest.approx(series.values[: half + 1].mean())


def test_downsampled_curve_keeps_minimum_and_maximum_loss():
    y = np.random.default_rng(0).normal(size=(3, 2000))
    y[0, 333], y[1, 1555] = 90, -90
    band = curves.over_seeds([Series(np.arange(2000), seed) for seed in y])
    thin, low, high = curves.envelope(band)
    assert len(thin) == curves.POINTS
    assert (np.nanmin(low), np.nanmax(high)) == (-90, 90)
    at = np.searchsorted(thin, band.x, side="right") - 1
    assert (low[at] <= band.mean).all()
    assert (band.mean <= high[at]).all()


def test_loss_gap_curve_subtracts_losses_of_runs_with_equal_seed():
    base, other = CASES["four variants"]().rows[:2]
    other = replace(other, runs=other.runs[1:])
    band = curves.gap_band(other)
    final = [o.series("eval/loss").values[-1] for o in other.runs]
    below = [b.series("eval/loss").values[-1] for b in base.runs[1:]]
    assert band.mean[-1] == pytest.approx(np.mean(np.subtract(final, below)))
    for run in other.runs:
        run.cfg.model.init_seed += 10
    assert curves.gap_band(other) is None
    assert curves.gap_band(base) is None


def test_layer_figure_excludes_unfinished_runs_if_any_run_is_finished():
    row = CASES["four variants"]().rows[0]
    row.runs[0].summary = None
    row.runs[0].metrics = Metrics(sample.lines_of(row.runs[0])[:5])
    row.runs[1].summary = {"steps": 1}
    row.runs[2].summary = {"steps": 1}

    def ends(*runs: Run, at: int = -1) -> np.ndarray:
        return np.mean([run.by_layer("hidden_top1").values[at] for run in runs], axis=0)

    assert curves.at_end(row, "hidden_top1").mean == pytest.approx(ends(*row.runs[1:]))
    for run in row.runs:
        run.summary = None
    assert curves.at_end(row, "hidden_top1").mean == pytest.approx(ends(*row.runs, at=4))


def drawn_axes(y: list[np.ndarray], label: str = "row", **how: Any) -> Axes:
    """Return the axes of curves, one row per curve."""
    rows = [
        RunArm.of(f"{label} {i}", {"attention": variant}, [], {})
        for i, variant in zip(range(len(y)), sample.FOUR, strict=False)
    ]
    bands = [curves.over_seeds([Series(np.arange(len(v)), v)]) for v in y]
    with matplotlib.rc_context(RC):
        return draw_curves(bands, row_styles(rows), "unit", **how).axes[0]


def test_loss_axis_range_ignores_spike():
    calm = np.linspace(9, 3, 50)
    spiky = calm.copy()
    spiky[20] = 1000
    axes = drawn_axes([calm, spiky, calm[:5] + 90], top=10)
    low, high = axes.get_ylim()
    assert high == 10
    assert 2 < low < 3
    (mark,) = (line for line in axes.lines if line.get_label() == "off the scale")
    assert (mark.get_xdata(), mark.get_ydata()) == ([4], [10])
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == [" row 0", " row 1", " row 2", "off the scale"]
    axes = drawn_axes([calm, spiky], label="r" * 50)
    assert len(axes.figure.legends[0].get_texts()) == 2, "shortened names are equal"


@pytest.mark.slow
def test_logarithmic_axis_omits_zero_values():
    y = np.linspace(9, 3, 50)
    y[20] = 0
    axes = drawn_axes([y], log=True)
    assert axes.get_yscale() == "log"
    assert np.flatnonzero(np.isnan(axes.lines[0].get_ydata())).tolist() == [20]
    comparison = CASES["four variants"]()
    comparison.rows[0].runs[0].series("train/update_norm").values[7] = 0.0
    assert "Logarithmic scale, which omits values of 0 or below." in undrawn_page(comparison)
