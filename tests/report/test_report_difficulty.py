"""Curves of scores over what tells their levels apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_runs import write_run

from diffllm.evaluation.results import SHARE, keep, results_of
from diffllm.report.comparison import read
from diffllm.report.difficulty import curves
from diffllm.report.page import page


def score(value: float | None, chance: float | None = None, **level: int) -> dict[str, Any]:
    of = ", ".join(f"{k} {v}" for k, v in level.items())
    return {"of": of, "value": value, "chance": chance, "examples": 50, "level": level}


def by_name(*scores: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["of"]: each for each in scores}


def test_a_curve_is_over_the_first_setting_that_varies_at_equal_others() -> None:
    run = by_name(
        *(score(1 / (n + s), 1 / n, number=n, shared=s) for n in (1, 2, 4) for s in (0, 3)),
        score(0.5, number=8, shared=5),
    )
    apart, alike = curves([{0: run}])
    assert (apart.title, alike.title) == ("shared 0", "shared 3")
    assert (apart.setting, apart.values, apart.guesses) == ("number", [1, 2, 4], [1, 0.5, 0.25])
    assert alike.bands[0]
    np.testing.assert_allclose(alike.bands[0].mean, [1 / 4, 1 / 5, 1 / 7])


def test_settings_that_never_vary_are_passed_over() -> None:
    run = by_name(*(score(0.1 * n, words=64, pairs=n) for n in (8, 2, 4)))
    (curve,) = curves([{0: run}])
    assert (curve.title, curve.setting, curve.values) == ("words 64", "pairs", [2, 4, 8])


def test_a_word_among_the_settings_stands_for_itself() -> None:
    run = {
        f"{what} {bits}": {"value": 1 / bits, "level": {"bits": bits, "rounded": what}}
        for what in ("weights", "activations")
        for bits in (8, 6, 4)
    }
    assert [(each.title, each.values) for each in curves([{0: run}])] == [
        ("weights", [4, 6, 8]), ("activations", [4, 6, 8]),
    ]  # fmt: skip


def test_two_levels_or_none_make_no_curve() -> None:
    assert curves([{0: by_name(score(0.5, pairs=4), score(0.2, pairs=8))}]) == []
    assert curves([{0: {"all": {"of": "all", "value": 1.0}}}, {}]) == []


def test_levels_of_different_kinds_are_curves_of_their_own() -> None:
    run = by_name(
        *(score(3.0 - n, position=n) for n in range(3)), *(score(n, distance=n) for n in (1, 2, 4))
    )
    assert [each.setting for each in curves([{0: run}])] == ["position", "distance"]


def test_seeds_are_a_band_and_what_is_not_measured_is_left_out() -> None:
    first = by_name(*(score(0.2, pairs=n) for n in (2, 4, 8)))
    second = by_name(score(0.4, pairs=2), score(None, pairs=4), score(0.6, pairs=8))
    (curve,) = curves([{0: first, 1: second}, {}])
    band, nothing = curve.bands
    assert nothing is None
    assert band
    assert (band.low[0], band.high[0]) == (0.2, 0.4)
    np.testing.assert_allclose(band.mean, [0.3, np.nan, 0.4])
    assert band.singles[0][1] == 0.2


@pytest.mark.parametrize("levels", [2, 4])
def test_the_page_draws_them(tmp_path: Path, levels: int) -> None:
    for variant in ("standard", "diff_v2"):
        run = tmp_path / variant
        write_run(run, f"attention={variant}")
        scores = [score(1 / (i + 1), 1 / 2 ** (i + 2), pairs=2**i) for i in range(levels)]
        first = {"key": {"checkpoint": variant}, "unit": SHARE, "scores": scores}
        keep(results_of(run, 20) / "mqar.jsonl", first, [])
    html = page(read([tmp_path])[0])
    assert ("mqar by pairs" in html) == (levels == 4)
    assert ('data-labels="1,2,4,8"' in html) == (levels == 4)
