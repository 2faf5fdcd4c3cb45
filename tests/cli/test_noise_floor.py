"""Noise floor of a synthetic query, compared with explicit softmax maps and closed forms."""

import io
import json
import math
import statistics

import numpy as np
import pytest
from matplotlib.image import imread

from diffllm import cli as tools
from diffllm.cli.noise_floor import (
    CONTEXTS,
    LAMBDAS,
    NoiseFloorArguments,
    average,
    best_lambda,
    draw_figure,
    draw_maps,
    effective,
    noise_floor,
    reduce_maps,
    tables,
    usable_amplitude,
)

NOISE1 = (0.7, -1.2, 0.1, 1.9, -0.4, 0.3)
NOISE2 = (0.9, -0.8, -0.5, 1.2, 0.2, 0.6)
SMALL = {"keys": 300, "draws": 3}
FAST = ["keys=300", "draws=2"]


def drawn(points, correlation, signal=6.0, draws=2, seed=0):
    """Return the reduced maps at pairs (keys, amplitude)."""
    return draw_maps(
        points, correlation, NoiseFloorArguments(signal=signal, draws=draws, seed=seed)
    )


def maps_of(noise1, noise2, signal):
    """Return the reduced maps of one draw at one point, (5, 1, 1)."""
    fields = reduce_maps(np.array(noise1), np.array(noise2), signal)
    return np.reshape(fields, (5, 1, 1))


def explicit(noise1, noise2, signal, lam):
    """Compute the weight on the signal and the SNR from the definition."""
    first = [math.exp(z) for z in (*noise1, signal)]
    second = [math.exp(z) for z in (*noise2, 0.0)]
    weights = [a / sum(first) - lam * b / sum(second) for a, b in zip(first, second, strict=True)]
    return weights[-1], weights[-1] / math.sqrt(sum(w * w for w in weights[:-1]))


def library(noise1, noise2, signal, lam):
    weight, snr = effective(maps_of(noise1, noise2, signal), lam)
    return weight.item(), snr.item()


def optimum(noise1, noise2, signal):
    """Return the lambda with zero derivative of SNR squared: a ratio of sums over noise keys."""
    p = [math.exp(z) for z in noise1]
    q = [math.exp(z) for z in noise2]
    p_s, z1, z2 = math.exp(signal), sum(p) + math.exp(signal), sum(q) + 1
    pp = sum(a * a for a in p)
    qq = sum(b * b for b in q)
    pq = sum(a * b for a, b in zip(p, q, strict=True))
    return z2 / z1 * (p_s * pq - pp) / (p_s * qq - pq)


# One draw


@pytest.mark.parametrize("signal", [0.5, 2.0, 9.0])
@pytest.mark.parametrize("lam", [0.0, 0.35, 0.8, 1.0])
def test_snr_and_signal_weight_match_direct_calculation(signal, lam):
    expected = explicit(NOISE1, NOISE2, signal, lam)
    assert library(NOISE1, NOISE2, signal, lam) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("signal", [1.0, 2.0, 3.0])
def test_best_lambda_of_grid_search_equals_closed_form(signal):
    best = optimum(NOISE1, NOISE2, signal)
    assert 0.05 < best < 0.95  # not at an end of the grid, which could match by chance
    assert best_lambda(maps_of(NOISE1, NOISE2, signal)).item() == pytest.approx(best, abs=0.01)
    fine = np.linspace(0, 1, 20001)
    snr = [explicit(NOISE1, NOISE2, signal, lam)[1] for lam in fine]
    assert fine[int(np.argmax(snr))] == pytest.approx(best, abs=1e-4)


# Many draws


@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.9])
def test_snr_with_many_keys_approaches_closed_form_limit(correlation):
    sigma, signal, keys = 0.5, 6.0, CONTEXTS[-1]
    maps = drawn([(keys, sigma)], correlation, signal)
    standard = average(maps, 0.0)["snr"].item()
    assert standard == pytest.approx(math.exp(signal - sigma**2) / math.sqrt(keys), rel=0.02)
    overlap = math.exp(-(sigma**2) * (1 - correlation))
    best = average(maps, best_lambda(maps))
    assert best["snr"].item() / standard == pytest.approx(1 / math.sqrt(1 - overlap**2), rel=0.02)
    assert best["lambda"].item() == pytest.approx(overlap, abs=0.02)
    fixed = average(maps, 0.8)["snr"].item() / standard
    assert fixed == pytest.approx(1 / math.sqrt(1 - 1.6 * overlap + 0.64), rel=0.02)


@pytest.mark.parametrize("correlation", [-1.0, 0.0, 0.6, 1.0])
def test_random_attention_noise_has_requested_correlation_and_amplitude(correlation, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "diffllm.cli.noise_floor.reduce_maps", lambda *a: seen.append(a) or (1.0,) * 5
    )
    drawn([(40001, 2.0)], correlation, seed=3)
    (noise1, noise2, signal), _ = seen
    assert (len(noise1), len(noise2), signal) == (40000, 40000, 6.0)
    assert (noise1.std(), noise2.std()) == pytest.approx((2, 2), rel=0.02)
    assert np.corrcoef(noise1, noise2)[0, 1] == pytest.approx(correlation, abs=0.02)


def test_average_returns_mean_and_standard_error_over_random_draws():
    maps = drawn([(100, 1.0), (200, 1.0)], 0.5, signal=4.0, draws=5, seed=1)
    curve = average(maps, np.array([0.2, 0.7]))
    for i, lam in enumerate((0.2, 0.7)):
        for name, values in zip(("weight", "snr"), effective(maps[:, i], lam), strict=True):
            draws = values.tolist()
            assert curve[name][i] == pytest.approx(statistics.mean(draws))
            assert curve[f"{name}_se"][i] == pytest.approx(statistics.stdev(draws) / math.sqrt(5))


# The threshold


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("threshold", [0.5, 1.0, 3.0])
def test_usable_amplitude_returns_noise_amplitude_at_snr_threshold(best, threshold):
    cfg = NoiseFloorArguments(keys=1000, draws=4, threshold=threshold)
    found = usable_amplitude(cfg, best)

    def snr(amplitude):
        maps = drawn([(1000, amplitude)], 0.9, cfg.signal, draws=4)
        return average(maps, best_lambda(maps) if best else 0.0)["snr"].item()

    assert snr(found - 2e-4) > threshold > snr(found + 2e-4)


# Everything


def test_noise_floor_curves_agree_at_common_points():
    result = noise_floor(NoiseFloorArguments(keys=2048, draws=3, amplitude=0.5, lambda_=0.6))
    i = CONTEXTS.index(2048)
    at = int(np.flatnonzero(np.isclose(LAMBDAS, 0.6)).item())
    by_keys, by_lambda = result["by_keys"]["curves"], result["by_lambda"]["curves"]
    for curve in ("differential", "uncorrelated"):
        for name in ("snr", "weight"):
            expected = by_lambda[curve][name][at]
            assert by_keys[curve][name][i] == pytest.approx(expected, rel=1e-12)
    assert by_keys["standard"]["snr"][i] == by_lambda["differential"]["snr"][0]
    assert by_keys["best"]["lambda"][i] == result["best_lambda"]["differential"]
    for curves in (by_keys, result["by_amplitude"]["curves"]):
        assert (curves["best"]["snr"] >= curves["differential"]["snr"]).all()
        assert (curves["best"]["snr"] >= curves["standard"]["snr"]).all()
    # The standard SNR is e^a / sqrt(sum of exp(2 sigma x)), which decreases with more keys.
    assert (np.diff(by_keys["standard"]["snr"]) < 0).all()
    usable = result["usable_amplitude"]
    assert result["by_amplitude"]["at"][-1] > usable["best"] > usable["standard"]


def output(capsys, *words):
    assert tools.main(["noise-floor", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_noise_floor_command_prints_json_if_requested(capsys, tmp_path):
    out = tmp_path / "figure.png"
    words = [*FAST, "lambda=0.4", "correlation=0.5", f"out={out}", "--json"]
    printed = json.loads(output(capsys, *words))
    result = noise_floor(
        NoiseFloorArguments(keys=300, draws=2, lambda_=0.4, correlation=0.5, out=str(out))
    )
    assert printed == json.loads(json.dumps(result, default=np.ndarray.tolist))
    assert printed["settings"]["lambda"] == 0.4
    assert printed["by_keys"]["at"] == list(CONTEXTS)
    curves = printed["by_keys"]["curves"]
    assert set(curves) == {"standard", "differential", "best", "uncorrelated"}
    assert set(curves["best"]) == {"lambda", "weight", "weight_se", "snr", "snr_se"}


def test_noise_floor_command_prints_tables_and_writes_figure(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = output(capsys, "draws=2").splitlines()
    result = noise_floor(NoiseFloorArguments(draws=2))
    standard = result["by_keys"]["curves"]["standard"]
    row = next(line for line in lines if line.split()[:1] == ["131072"])
    assert float(row.split()[1]) == pytest.approx(standard["snr"][-1], rel=0.01)
    best = result["best_lambda"]["differential"]
    assert any(f"best lambda, differential: {best:.2f}" in line for line in lines)
    assert any(f"{result['usable_amplitude']['standard']:.2f}" in line for line in lines)
    assert lines[-1] == "figure: noise-floor.png"
    assert list(tmp_path.iterdir()) == [tmp_path / "noise-floor.png"]
    height, width, _ = imread(io.BytesIO((tmp_path / "noise-floor.png").read_bytes())).shape
    assert width > 2 * height > 1000


@pytest.mark.parametrize(
    "extreme",
    [
        {"correlation": 1, "lambda_": 1},
        {"correlation": 0, "keys": 2},
        {"amplitude": 20, "threshold": 1e-9},
        {"signal": 100},
    ],
    ids=str,
)
def test_noise_floor_result_is_finite_for_extreme_arguments(extreme):
    cfg = NoiseFloorArguments(**{**SMALL, **extreme})
    result = noise_floor(cfg)
    json.dumps(result, default=np.ndarray.tolist, allow_nan=False)
    assert not any(word in tables(result) for word in ("nan", "inf"))
    figure = draw_figure(result)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-1] == f"SNR = {cfg.threshold:g}, the threshold"
    figure.savefig(drawn := io.BytesIO(), dpi=20)
    assert drawn.getvalue().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("keys=1", "keys=1 "),
        ("lambda=1.01", "lambda=1.01 "),
        ("amplitude=nan", "amplitude=nan"),
        ("out=gone/figure.png", "out=gone/figure.png cannot be written"),
        ("out=figure.pdf", ".png"),
    ],
)
def test_noise_floor_command_prints_error_for_invalid_argument(
    capsys, tmp_path, monkeypatch, word, named
):
    monkeypatch.chdir(tmp_path)
    assert tools.main(["noise-floor", *FAST, word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
