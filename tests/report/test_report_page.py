"""The report page as text: well-formed, self-contained, reproducible, complete."""

import re
from functools import cache
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
import sample_comparison as sample

from diffllm.report import bands
from diffllm.report.comparison import Comparison, Estimate
from diffllm.report.numbers import compact, fixed, percent, short
from diffllm.report.page import page
from diffllm.report.runs import Series
from diffllm.report.style import RC, VARIANTS, row_styles
from diffllm.report.table import gap_cell

CASES = {
    "one run": lambda: sample.compared(("diff_v2",), 1, 28),
    "four variants": lambda: sample.compared(sample.FOUR, 3, 40, probes=True),
    "nine rows": lambda: sample.compared(sample.NINE, 3, 40),
    "incomparable": sample.incomparable,
    "barely started": sample.barely_started,
    "not finite": sample.not_finite,
    "hostile names": sample.hostile,
    "learning rates": sample.sweep_of_rates,
}
VOID = {"meta", "link", "input", "br", "wbr", "img", "hr"}
LOADING = ("src", "href", "data", "action", "poster", "srcset")


@cache
def comparison_of(case: str) -> Comparison:
    return CASES[case]()


@cache
def html_of(case: str) -> str:
    return page(comparison_of(case))


class Reader(HTMLParser):
    """Balance of tags, ids, what would be loaded, text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in LOADING]
        self.handlers += [name for name in names if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


@pytest.mark.parametrize("case", CASES)
def test_well_formed_and_self_contained(case):
    text = html_of(case)
    read = Reader(text)
    assert len(read.ids) == len(set(read.ids))
    referenced = re.findall(r'(?:url\(|href=")#([\w-]+)', text)
    assert set(referenced) <= set(read.ids)
    assert all(link.startswith(("#", "data:")) for link in read.links)
    assert not re.search(r"@import|url\((?!#)", text)
    assert not read.handlers
    assert "img" not in read.tags
    assert read.tags.count("script") == 1
    shown = read.text[: read.text.index("How to read this")].lower()
    assert not {"nan", "inf", "none"} & set(re.findall(r"\w+", shown))


@pytest.mark.parametrize("case", ["four variants", "hostile names"])
def test_the_same_input_gives_the_same_bytes(case):
    assert page(CASES[case]()) == html_of(case)


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_there(case):
    text = Reader(html_of(case)).text
    for row in comparison_of(case).rows:
        assert row.label in text


def test_no_stand_in_colour_is_left():
    for case in ("one run", "nine rows"):
        assert not re.search(r"#(fe00|0[1-4]0[1-4]0[1-4])", html_of(case))


def test_names_stay_names():
    text = Reader(html_of("hostile names")).text
    assert text.count(sample.HOSTILE) > 10


def test_differences_and_notes_are_shown_and_leave_no_gap():
    text = " ".join(Reader(html_of("incomparable")).text.split())
    assert "Not comparable" in text
    assert "steps: 800 in standard, 400 in diff_v2" in text
    assert "diff_v2, seed 0, has not finished: 400 of 800 steps." in text
    assert "Not comparable" not in Reader(html_of("four variants")).text


def test_sections_appear_with_their_metrics_only():
    probes = ("Update norm", "Skipped updates", "Entropy of attention", "Gradient norm, ffn")
    with_probes, without = (html_of(case) for case in ("four variants", "nine rows"))
    for title in probes:
        assert title in with_probes
        assert title not in without
    assert "Mean lambda" in html_of("one run")
    assert "Mean lambda" not in html_of("not finite")
    assert "Gap to" not in html_of("one run")


def test_a_gap_says_whether_it_shows_a_difference():
    comparison = sample.compared(("standard", "gated"), 2, 10)
    row, style = comparison.rows[1], row_styles(comparison.rows)[1]

    def tag(low: float | None, high: float | None, seeds: int = 3) -> str:
        row.gap = Estimate(-0.01, low, high, seeds)
        with matplotlib.rc_context(RC):
            return gap_cell(row, "standard", style, 0.1).tag

    assert tag(-0.03, -0.01) == ""
    assert tag(-0.03, 0.01) == tag(-0.02, 0.0) == "no difference shown"
    assert tag(None, None, 1) == "no interval from one seed"


def test_values_that_are_not_finite_are_dashes():
    text = Reader(html_of("not finite")).text
    assert text.count("not finite") >= 3
    assert "–" in text


def test_variants_keep_their_colours():
    of_nine = {s.label: (s.light, s.dash) for s in row_styles(comparison_of("nine rows").rows)}
    of_four = {s.label: (s.light, s.dash) for s in row_styles(comparison_of("four variants").rows)}
    assert of_four.items() <= of_nine.items()
    assert len(set(of_nine.values())) == 9
    assert len(set(VARIANTS.values())) == len(VARIANTS)
    rates = row_styles(comparison_of("learning rates").rows)
    assert len({(s.light, s.dash) for s in rates}) == len(rates)


def test_size_of_a_page():
    assert len(html_of("one run")) < 400_000
    assert len(html_of("nine rows")) < 1_500_000


def test_seeds_of_different_length_meet_where_both_have_values():
    a = Series(np.array([10, 20, 30]), np.array([3.0, 2.0, 1.0]))
    b = Series(np.array([10, 20, 30]), np.array([5.0, np.nan, np.nan]))
    band = bands.over_seeds([a, b])
    assert band.x.tolist() == [10, 20, 30]
    assert band.mean.tolist() == [4, 2, 1]
    assert band.low.tolist() == [3, 2, 1]
    assert band.high.tolist() == [5, 2, 1]
    assert bands.over_seeds([]) is None


def test_a_running_mean_is_one():
    rng = np.random.default_rng(0)
    series = Series(np.arange(500), rng.normal(size=500))
    smooth = bands.smoothed(series).values
    assert smooth[250] == pytest.approx(series.values[245:256].mean())
    assert smooth[0] == pytest.approx(series.values[:6].mean())


def test_thinning_keeps_extremes():
    rng = np.random.default_rng(0)
    y = rng.normal(size=2000)
    y[777], y[1234] = 50, -50
    thin = bands.thinned(bands.Band(np.arange(2000), y, y - 1, y + 1))
    assert len(thin.x) <= bands.POINTS
    assert (thin.mean.min(), thin.mean.max()) == (-50, 50)
    assert (np.diff(thin.x) >= 0).all()


def test_gaps_are_of_the_same_seed():
    comparison = CASES["four variants"]()
    base, other = comparison.rows[:2]
    other.runs = other.runs[1:]
    band = bands.gap_band(other, base)
    final = [o.series("eval/loss").values[-1] for o in other.runs]
    below = [b.series("eval/loss").values[-1] for b in base.runs[1:]]
    assert band.mean[-1] == pytest.approx(np.mean(np.subtract(final, below)))


def test_numbers_as_written():
    assert [compact(x) for x in (573_440, 11_030_000, 1.5e9, None)] == [
        "573.4k", "11.03M", "1.5B", "–",
    ]  # fmt: skip
    assert fixed(-0.02, signed=True) == "−0.0200"
    assert [short(x) for x in (12345.6, 1e-7, 0.0, float("inf"))] == ["12,300", "1e−7", "0", "–"]
    assert percent(0.0015) == "0.15%"
