"""Gaps at equal tokens, FLOPs and seconds, on curves with known values."""

import json
import math

import numpy as np
import pytest
from runs.written import loaded, write_run
from scipy.special import stdtrit

from diffllm.compare.arms.run import Series
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.curves import flops_spent, read_curve, seed_noise

TOKENS = 8 * 32
FLOPS = {"standard": 2e6, "gated": 3e6}
STEP_MS = {"standard": 100.0, "gated": 125.0}
SLOPE = 0.5


def loss(variant, tokens, seed=0):
    """Return a line over the logarithm of tokens, for which interpolation is exact."""
    return 6 - SLOPE * math.log(tokens) - 0.1 * (variant == "gated") + 0.01 * seed


def written(path, variant, seed=0, curve=loss, steps=(5, 10, 15, 20), **facts):
    lines = [
        {
            "step": step,
            "tokens": step * TOKENS,
            "train/loss": 5.0,
            "eval/loss": curve(variant, step * TOKENS, seed),
            "perf/step_ms": STEP_MS[variant],
        }
        for step in steps
    ]
    known = {"flops_per_token": FLOPS[variant], **facts}
    last = lines[-1]["eval/loss"]
    overrides = (f"attention={variant}", f"seed={seed}")
    return write_run(path, *overrides, lines=lines, facts=known, loss=last)


def compared(tmp_path, **how):
    for variant in ("standard", "gated"):
        for seed in (0, 1):
            written(tmp_path / f"{variant}{seed}", variant, seed, **how)
    return compare(loaded(sorted(tmp_path.iterdir())))


def test_loss_gap_at_equal_cost_matches_closed_form(tmp_path):
    (_, gated) = compared(tmp_path).rows
    end = 20 * TOKENS
    for cost, share in (("tokens", 1.0), ("flops", 2 / 3), ("seconds", 100 / 125)):
        found = gated.equal[cost]
        assert found.gap.mean == pytest.approx(-0.1 - SLOPE * math.log(share), abs=1e-6)
        assert found.gap.seeds == 2
        assert found.error == pytest.approx(0, abs=1e-6)
        assert gated.values[f"gap_at_{cost}"] == found.gap.mean
    assert gated.equal["tokens"].at == end
    assert gated.equal["flops"].at == pytest.approx(end * FLOPS["standard"])
    assert gated.equal["seconds"].at == pytest.approx(20 * 0.1)


KEYS = {5: 20.0, 10: 4.0, 15: 10.0, 20: 6.0}
"""Visible keys by logged step, over the steps since the last logged step; mean 10."""
PER_KEY = {"standard": 1e4, "gated": 3e4}


def test_training_flops_are_computed_from_logged_visible_keys(tmp_path):
    for variant, per_key in PER_KEY.items():
        path = written(tmp_path / variant, variant, flops_per_visible_key=per_key)
        lines = [
            json.loads(line)
            for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        lines = [{**line, "data/visible_keys": KEYS[line["step"]]} for line in lines]
        (path / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8"
        )
    standard, gated = runs = loaded([tmp_path / "standard", tmp_path / "gated"])
    for run in runs:
        whole, per_key = FLOPS[run.variant], PER_KEY[run.variant]
        none = whole - per_key * (32 + 1) / 2  # FLOPs per token without attention
        assert run.facts["flops_per_token"] == pytest.approx(none + 10 * per_key)
        spent = np.cumsum([5 * TOKENS * (none + keys * per_key) for keys in KEYS.values()])
        tokens = np.array([5, 7.5, 10, 15, 20]) * TOKENS
        expected = [spent[0], (spent[0] + spent[1]) / 2, *spent[1:]]
        assert flops_spent(run, tokens) == pytest.approx(np.array(expected))
    row = compare(runs).rows[1]
    assert row.equal["flops"].at == pytest.approx(20 * TOKENS * standard.facts["flops_per_token"])
    assert row.values["flops_per_token"] == gated.facts["flops_per_token"]


def test_reported_interpolation_error_is_upper_bound_of_true_error(tmp_path):
    def bent(variant, tokens, seed):
        return 6 - 0.1 * (variant == "gated") + 40 / tokens**0.5

    (_, gated) = compared(tmp_path, curve=bent).rows
    found, at = gated.equal["flops"], 20 * TOKENS * 2 / 3
    truth = bent("gated", at, 0) - bent("standard", 20 * TOKENS, 0)
    assert 0 < abs(found.gap.mean - truth) <= found.error < 0.05
    assert gated.equal["tokens"].error == 0


def test_interpolation_error_is_infinite_if_curve_has_two_points():
    curve = Series(np.array([10.0, 20.0]), np.array([3.0, 2.0]))
    assert read_curve(curve, 20.0) == (2.0, 0.0)
    assert read_curve(curve, math.sqrt(200)) == (pytest.approx(2.5), math.inf)


def test_run_without_known_flops_has_no_loss_gap_at_equal_flops(tmp_path):
    (_, gated) = compared(tmp_path, flops_per_token=None).rows
    assert sorted(gated.equal) == ["seconds", "tokens"]
    assert gated.values["gap_at_flops"] is None


def test_runs_on_different_machines_have_no_loss_gap_at_equal_seconds(tmp_path):
    written(tmp_path / "a", "standard", device="H100")
    written(tmp_path / "b", "gated", device="CPU")
    found = compare(loaded(sorted(tmp_path.iterdir())))
    assert sorted(found.rows[1].equal) == ["flops", "tokens"]


def test_loss_gap_at_equal_cost_excludes_diverged_seeds(tmp_path):
    for seed in (0, 1):
        written(tmp_path / f"a{seed}", "standard", seed)
    written(tmp_path / "b0", "gated", 0)
    path = written(tmp_path / "b1", "gated", 1, curve=lambda *_: math.nan)
    (path / "summary.json").write_text('{"heldout_loss": NaN, "steps": 20}', encoding="utf-8")
    (_, gated) = compare(loaded(sorted(tmp_path.iterdir()))).rows
    assert gated.diverged == 1
    assert {found.gap.seeds for found in gated.equal.values()} == {1}


def test_seed_noise_floor_is_computed_from_pooled_variance(tmp_path):
    deviation = {"standard": 0.02, "gated": 0.04}

    def noisy(variant, tokens, seed):
        return loss(variant, tokens) + deviation[variant] * (2 * seed - 1) / math.sqrt(2)

    rows = compared(tmp_path, curve=noisy).rows
    floor = seed_noise(rows)
    pooled = math.sqrt((0.02**2 + 0.04**2) / 2)
    assert np.allclose(floor.values, stdtrit(2, 0.975) * pooled * math.sqrt(2 / 2))
    assert list(floor.tokens) == [step * TOKENS for step in (5, 10, 15, 20)]
    assert seed_noise([rows[0]]).values[0] == pytest.approx(stdtrit(1, 0.975) * 0.02)


def test_95_percent_of_random_loss_gaps_are_below_seed_noise_floor():
    rng = np.random.default_rng(0)

    class Drawn:
        def __init__(self, values):
            self.values = values

        def series(self, name):
            return Series(np.arange(1, 4001), self.values)

    class Rows:
        def __init__(self):
            self.runs = [Drawn(each) for each in rng.normal(size=(3, 4000))]

    rows = [Rows(), Rows()]
    floor = seed_noise(rows)
    means = [np.mean([run.values for run in row.runs], axis=0) for row in rows]
    assert np.mean(np.abs(means[1] - means[0]) <= floor.values) == pytest.approx(0.95, abs=0.012)
