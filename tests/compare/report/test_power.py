"""`diffllm power`: seeds, tokens and hours that a gap needs, from the runs of a pilot."""

import json
import math

import numpy as np
import pytest
from runs.written import edit_json, sweep, write_run
from scipy.stats import chi2

from diffllm import cli as tools
from diffllm.compare.arms.sentences import percent
from diffllm.statistics.power_analysis import paired_power

LOSSES = {"standard": [4.00, 4.02, 4.05], "diff_v2": [3.91, 3.96, 3.96]}
"""Variances 0.0019 / 3 and 0.0025 / 3: pooled 0.0022 / 3."""
RISKS = ("too_few", "far_too_few")
POOLED = math.sqrt(0.0022 / 3)


@pytest.fixture
def power(capsys, tmp_path):
    """Return a function that runs the command in `tmp_path`: exit code, stdout, stderr."""

    def run(*words):
        code = tools.main(["power", *(word.replace("@", f"{tmp_path}/") for word in words)])
        return code, *capsys.readouterr()

    return run


def test_power_command_computes_number_of_seeds_from_pilot_variance(power, tmp_path):
    for path in sweep(tmp_path / "pilot", LOSSES):
        edit_json(path / "summary.json", seconds=1800.0)
    code, out, err = power("pilot=@pilot", "gap=0.06", "--json")
    content = json.loads(out)
    assert (code, err) == (0, "")
    assert (content["sd"], content["df"], content["runs"]) == (pytest.approx(POOLED), 4, 6)
    low, high = content["sd_low"], content["sd_high"]
    assert (low, high) == pytest.approx((POOLED * 0.599, POOLED * 2.874), rel=2e-3)
    assert [arm["seeds"] for arm in content["arms"]] == [3, 3]
    differences = np.subtract(*LOSSES.values()).std(ddof=1)
    assert content["correlation"] == pytest.approx(1 - differences**2 / (2 * POOLED**2))
    need, upper = content["need"], differences * math.sqrt(2 / chi2.ppf(0.2, 2))
    assert (need["sd"], need["df"], need["sd_upper"]) == pytest.approx((differences, 2, upper))
    for n, at in ((need["seeds"], upper), (need["seeds_by_sd"], differences)):
        assert paired_power(0.06, at, n) >= 0.8
        assert n == 2 or paired_power(0.06, at, n - 1) < 0.8
    n = need["seeds"]
    assert need["power"] == pytest.approx(paired_power(0.06, upper, n))
    assert need["seeds_low"] <= need["seeds_by_sd"] < n <= need["seeds_high"]
    assert need["far_too_few"] <= need["too_few"] <= min(0.2, need["too_few_by_sd"])
    assert need["total_tokens"] == 2 * n * 20 * 8 * 32
    assert need["hours"] == pytest.approx(2 * n * 0.5)
    assert need["power_by_seeds"]["5"] == pytest.approx(paired_power(0.06, upper, 5))
    one_sided = json.loads(power("pilot=@pilot", "gap=0.06", "sides=1", "--json")[1])
    three = json.loads(power("pilot=@pilot", "gap=0.06", "comparisons=3", "--json")[1])
    assert one_sided["need"]["seeds"] < n < three["need"]["seeds"]
    text = power("pilot=@pilot", "gap=0.06")[1]
    assert f"sd {POOLED:.4f} nats per token" in text
    assert "a gap of 0.06 nats per token between two arms, found with power 0.8 at alpha" in text
    cells = [f"{differences:.4f}", f"{upper:.4f}", str(n), str(need["seeds_by_sd"])]
    assert [line for line in text.splitlines() if line.split()[:4] == cells]
    risks = [percent(need[f"{name}{by}"]) for by in ("", "_by_sd") for name in RISKS]
    assert text.splitlines()[-1].split() == ["2", *risks]
    assert "note" not in text
    few = power("pilot=@pilot", "gap=0.4")[1]
    assert "exact sign-flip test of 3 pairs is 0.25, not below alpha 0.05" in few
    assert "6 seeds per arm are enough" in few


def test_power_command_counts_seeds_of_single_arm_as_uncorrelated(power, tmp_path):
    sweep(tmp_path / "a", {"standard": LOSSES["standard"]})
    content = json.loads(power("pilot=@a", "gap=0.06", "--json")[1])
    sd = math.sqrt(2) * np.std(LOSSES["standard"], ddof=1)
    assert (content["need"]["sd"], content["need"]["df"]) == (pytest.approx(sd), 2)
    assert content["common_seeds"] is None
    assert "seeds count as uncorrelated" in content["notes"][0]


def test_power_command_reports_excluded_pilot_runs(power, tmp_path):
    sweep(tmp_path / "a", LOSSES)
    write_run(tmp_path / "a/lost", "attention=gated", summary={"heldout_loss": None})
    sweep(tmp_path / "b", {"standard": [4.0, 5.0]}, "steps=40")
    code, out, _ = power("pilot=@a", "pilot=@b", "gap=0.05")
    assert code == 0
    assert "1 of 7 runs diverged" in out
    assert "cannot be compared with the others: B: standard" in out or "steps=40" in out
    assert power("pilot=@a", "@b", "gap=0.05")[1] == out
    content = json.loads(power("pilot=@a", "pilot=@b", "gap=0.05", "--json")[1])
    assert (content["diverged"], content["sd"]) == (1, pytest.approx(POOLED))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["pilot=@two", "gap=-0.02"], "gap=-0.02 must be positive"),
        (["pilot=@two", "gap=0.1", "alpha=1.5"], "alpha=1.5 must be at most 0.1"),
        (["pilot=@two", "gap=0.1", "power=0.01"], "between alpha=0.05 and 1"),
        (["pilot=@two", "gap=0.1", "sides=3"], "sides=3 must be at most 2"),
        (["pilot=@two"], "missing gap="),
        (["pilot=@nothing", "gap=0.1"], "no such directory"),
        (["pilot=@one", "gap=0.1"], "has two seeds with a finite loss"),
        (["pilot=@unfinished", "gap=0.1"], "0 runs finished, 0 diverged"),
        (["pilot=@same", "gap=0.1"], "have the same loss"),
    ],
)
def test_power_command_prints_one_error_line_for_invalid_arguments(power, tmp_path, words, error):
    name = next((word.partition("@")[2] for word in words if "@" in word), "")
    losses = {
        "two": [4.0, 4.1], "one": [4.0], "unfinished": [None, None], "same": [4.0, 4.0],
    }.get(name)  # fmt: skip
    if losses:
        sweep(tmp_path / name, {"standard": losses})
    code, out, err = power(*words, "--json")
    assert (code, out) == (2, "")
    assert error in err
    assert len(err.splitlines()) == 1
