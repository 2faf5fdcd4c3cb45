"""diffllm noise-floor [key=value ...]: signal-to-noise ratio of attention with one or two maps.

A simplified model of differential attention (arXiv 2410.05258): one query sees n keys. Key s is the
signal; all other keys i have noise x_i, e_i ~ N(0, 1), all independent. The logits are

    map 1:   a       at s,   sigma x_i                                elsewhere
    map 2:   0       at s,   sigma (rho x_i + sqrt(1 - rho^2) e_i)    elsewhere

With p = softmax(map 1) and q = softmax(map 2) the weights are w = p - lambda q; lambda = 0 is
standard attention. Let m = p.q / |q|^2 and r = |p - m q|, with products and norms over i != s. For
values that are uncorrelated between keys and of RMS 1, the signal-to-noise ratio (SNR) and the
lambda with the largest SNR are

    SNR(lambda) = w_s / sqrt(sum over i != s of w_i^2)
                = (p_s - lambda q_s) / sqrt(r^2 + |q|^2 (lambda - m)^2)
    best lambda = m - q_s r^2 / (|q|^2 (p_s - m q_s))
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.cli.arguments import CommandArguments, argument, parse, write_out
from diffllm.compare.arms.sentences import short
from diffllm.core.errors import ConfigError
from diffllm.core.printing import Table, echo, echo_json

NOISE_FLOOR_USAGE = """\
diffllm noise-floor [key=value ...]: signal-to-noise ratio of one query's attention, standard and
differential, as a function of the number of keys, lambda and the amplitude of the noise"""
Array = np.ndarray
Points = Sequence[tuple[int, float]]
"""Pairs (number of keys, amplitude)."""
CONTEXTS = tuple(1024 * 2**i for i in range(8))
LAMBDAS = np.linspace(0, 1, 101)
LARGEST_AMPLITUDE = 20.0
AXES = {
    "keys": range(8),
    "lambda": range(0, 101, 10),
    "amplitude": range(3, 40, 4),
}
"""Sweeps, and the indices of the points in the printed table of each sweep."""


@dataclass
class NoiseFloorArguments(CommandArguments):
    keys: int = argument("keys in sweeps of lambda and amplitude", 8192, least=2, most=CONTEXTS[-1])
    lambda_: float = argument("subtracted share of map 2", 0.8, least=0, most=1)
    amplitude: float = argument(
        "standard deviation of the noise, in logits", 1.0, least=0, most=LARGEST_AMPLITUDE
    )
    signal: float = argument("advantage of the signal in map 1, in logits", 6.0, least=0, most=100)
    correlation: float = argument("correlation of the noise of both maps", 0.9, least=-1, most=1)
    threshold: float = argument("smallest SNR of a usable map", 1.0, above=0, below=np.inf)
    draws: int = argument("random draws of the noise", 32, least=2, most=1000)
    seed: int = argument("seed of the noise", 0, least=0)
    out: str = argument("figure to write, a PNG", "noise-floor.png", path=True)


def reduce_maps(noise1: Array, noise2: Array, signal: float) -> tuple[float, ...]:
    """Return the five numbers that determine the SNR for one sample of the noise.

    The numbers are p_s, q_s, m, r^2 and |q|^2; the module docstring defines them.

    `noise1` and `noise2` (n - 1,) are the logits of both attention maps at all keys except the
    signal; `signal` is the logit of map 1 at the signal.
    """
    from scipy.special import softmax

    logits1 = np.append(noise1, signal)
    logits2 = np.append(noise2, 0.0)
    weights = softmax([logits1, logits2], axis=1)
    # The signal is the last key.
    p, q = weights[:, :-1]
    p_s, q_s = weights[:, -1]
    q2 = q @ q
    m = p @ q / q2
    rest = p - m * q
    # After perfect cancellation only rounding errors remain, so r^2 has a lower bound.
    rounding = np.finfo(np.float64).eps
    r2 = max(rest @ rest, rounding**2 * (p @ p))
    return p_s, q_s, m, r2, q2


def draw_maps(points: Points, correlation: float, cfg: NoiseFloorArguments) -> Array:
    """Sample the noise; return the five numbers of `reduce_maps` for each point and each sample.

    `points` are pairs (number of keys, noise amplitude). `correlation` is the correlation between
    the noise of the two attention maps. The result has shape (5, number of points, cfg.draws). All
    points use the same random numbers, so that curves over the points are smooth.
    """
    maps = np.empty((5, len(points), cfg.draws))
    most_keys = max(keys for keys, _ in points)
    n_noises = most_keys - 1
    for draw in range(cfg.draws):
        # Seed each draw separately, so that more draws do not change the first ones.
        generator_x = np.random.default_rng([cfg.seed, draw, 0])
        generator_e = np.random.default_rng([cfg.seed, draw, 1])
        x = generator_x.standard_normal(n_noises)
        e = generator_e.standard_normal(n_noises)
        y = correlation * x + np.sqrt(1 - correlation**2) * e
        for i, (keys, sigma) in enumerate(points):
            noise1 = sigma * x[: keys - 1]
            noise2 = sigma * y[: keys - 1]
            maps[:, i, draw] = reduce_maps(noise1, noise2, cfg.signal)
    return maps


def effective(maps: Array, lam: Array | float) -> tuple[Array, Array]:
    """Return (attention weight on the signal, signal-to-noise ratio).

    `maps` (5, ...) contains results of `reduce_maps`. `lam` is the factor lambda of map 2.
    """
    p_s, q_s, m, r2, q2 = maps
    weight = p_s - lam * q_s
    noise_power = r2 + q2 * (lam - m) ** 2
    snr = weight / np.sqrt(noise_power)
    return weight, snr


def average(maps: Array, lam: Array | float) -> dict[str, Array]:
    """Average the attention weight on the signal and the signal-to-noise ratio over all draws.

    Return arrays of shape (points,): "lambda", the means "weight" and "snr", and their standard
    errors "weight_se" and "snr_se".

    Args:
        maps: (5, points, draws), result of `draw_maps`.
        lam: factor lambda of map 2: a number, or an array with one lambda per point. For a single
            point, an array of n lambdas is also allowed; the result then has shape (n,).
    """
    _, points, draws = maps.shape
    # Tuples are compared by value: (points,) exceeds (), and (n,) exceeds (1,).
    shape = max(np.shape(lam), (points,))
    lambdas = np.broadcast_to(np.asarray(lam, dtype=np.float64), shape)
    weight, snr = effective(maps, lambdas[:, None])
    curve = {"lambda": lambdas}
    for name, values in (("weight", weight), ("snr", snr)):
        # ddof=1: the draws also estimate the mean.
        deviation = values.std(axis=1, ddof=1)
        curve[name] = values.mean(axis=1)
        curve[f"{name}_se"] = deviation / np.sqrt(draws)
    return curve


def best_lambda(maps: Array) -> Array:
    """Return, for each point of `draw_maps`, the value in LAMBDAS with the largest mean SNR."""
    _, snr = effective(maps[..., None], LAMBDAS)  # (points, draws, lambdas)
    mean_snr = snr.mean(axis=1)
    best = mean_snr.argmax(axis=1)
    return LAMBDAS[best]


def usable_amplitude(cfg: NoiseFloorArguments, best: bool) -> float | None:
    """Return the largest noise amplitude at which the mean SNR is at least cfg.threshold.

    The error of the amplitude is at most 1e-4. Use the best lambda if `best` is true, and standard
    attention (lambda = 0) if `best` is false. Return 0.0 if the SNR is too small even without
    noise. Return None if the SNR is large enough even at LARGEST_AMPLITUDE.
    """
    from scipy.optimize import bisect

    def surplus(amplitude: float) -> float:
        maps = draw_maps([(cfg.keys, amplitude)], cfg.correlation, cfg)
        lam = best_lambda(maps) if best else 0.0
        snr = average(maps, lam)["snr"].item()
        return snr - cfg.threshold

    # The bisection needs a change of sign between its ends, so both ends are checked first.
    if surplus(0.0) < 0:
        return 0.0
    if surplus(LARGEST_AMPLITUDE) >= 0:
        return None
    return bisect(surplus, 0.0, LARGEST_AMPLITUDE, xtol=1e-4)


def noise_floor(cfg: NoiseFloorArguments) -> dict[str, Any]:
    """Compute SNR curves over the number of keys, over lambda and over the noise amplitude.

    Return a dict with "settings", the three sweeps "by_keys", "by_lambda" and "by_amplitude", and
    the numbers "best_lambda" and "usable_amplitude", by name of the curve. Each "by_..." entry is a
    dict {"at": x values, "curves": {name of the curve: result of `average`}}.
    """
    usable = {
        "standard": usable_amplitude(cfg, best=False),
        "best": usable_amplitude(cfg, best=True),
    }
    points_by_keys = [(keys, cfg.amplitude) for keys in CONTEXTS]
    by_keys = sweep(CONTEXTS, points_by_keys, cfg.lambda_, cfg)
    by_lambda = sweep(LAMBDAS, [(cfg.keys, cfg.amplitude)], LAMBDAS, cfg)
    amplitudes = swept_amplitudes(usable, cfg.amplitude)
    points_by_amplitude = [(cfg.keys, sigma) for sigma in amplitudes]
    by_amplitude = sweep(amplitudes, points_by_amplitude, cfg.lambda_, cfg)
    best = {}
    for name in ("differential", "uncorrelated"):
        snr = by_lambda["curves"][name]["snr"]
        best[name] = float(LAMBDAS[snr.argmax()])
    settings = {}
    for name, value in asdict(cfg).items():
        # The field of lambda ends in an underscore, because lambda is a keyword of Python.
        settings[name.rstrip("_")] = value
    del settings["json"]
    return {
        "settings": settings,
        "by_keys": by_keys,
        "by_lambda": by_lambda,
        "by_amplitude": by_amplitude,
        "best_lambda": best,
        "usable_amplitude": usable,
    }


def sweep(at: Any, points: Points, lam: Array | float, cfg: NoiseFloorArguments) -> dict[str, Any]:
    """Compute the curves of one sweep; `at` are their x values, and `lam` is as in `average`."""
    maps = draw_maps(points, cfg.correlation, cfg)
    uncorrelated_maps = draw_maps(points, 0.0, cfg)
    # Adding zeros of the shape of `lam` gives all curves over lambda one value per lambda.
    zeros = 0 * lam
    curves = {
        "standard": average(maps, zeros),
        "differential": average(maps, lam),
        "best": average(maps, best_lambda(maps) + zeros),
        "uncorrelated": average(uncorrelated_maps, lam),
    }
    x_values = np.asarray(at, dtype=np.float64)
    return {"at": x_values, "curves": curves}


def swept_amplitudes(usable: dict[str, float | None], amplitude: float) -> Array:
    """Return the x values of the sweep over the amplitude, 40 above 0.

    The sweep reaches beyond the usable amplitudes and the `amplitude` of the other sweeps.
    """
    widest = max(1.5 * amplitude, 2.0)
    for usable_value in usable.values():
        if usable_value is not None:
            widest = max(widest, 1.5 * usable_value)
    end = np.ceil(2 * widest) / 2
    return np.linspace(0, end, 41)[1:]


def draw_figure(result: dict[str, Any]) -> Any:
    """Draw a result of `noise_floor` as a matplotlib figure, with bands of ±2 standard errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    threshold = result["settings"]["threshold"]
    for axes, axis in zip(figure.subplots(1, 3), AXES, strict=True):
        sweep_result = result[f"by_{axis}"]
        at = sweep_result["at"]
        for name, curve in sweep_result["curves"].items():
            snr = curve["snr"]
            margin = 2 * curve["snr_se"]
            axes.plot(at, snr, label=name)
            axes.fill_between(at, snr - margin, snr + margin, alpha=0.25)
        axes.set(xlabel=axis, ylabel="signal-to-noise ratio")
        axes.set_xscale("log" if axis == "keys" else "linear")
        if axis != "lambda":
            axes.set_yscale("log")
            line = f"SNR = {threshold:g}, the threshold"
            axes.axhline(threshold, color="grey", linestyle="--", label=line)
    # The last axes, of the amplitude, have all curves and the line of the threshold.
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def tables(result: dict[str, Any]) -> str:
    """Format a result of `noise_floor` as text tables."""
    settings = [f"{name} {value}" for name, value in result["settings"].items()]
    lines = [", ".join(settings)]
    for axis, indices in AXES.items():
        table = sweep_table(axis, result[f"by_{axis}"], indices)
        lines += ["", *table.text()]
    curves_by_lambda = result["by_lambda"]["curves"]
    for name, value in result["best_lambda"].items():
        highest = curves_by_lambda[name]["snr"].max()
        lines += ["", f"best lambda, {name}: {value:.2f}, SNR {short(highest)}"]
    for name, amplitude in result["usable_amplitude"].items():
        reach = f"{amplitude:.2f}" if amplitude is not None else f"above {LARGEST_AMPLITUDE:g}"
        lines.append(f"largest usable amplitude, {name}: {reach}")
    return "\n".join(lines)


def sweep_table(axis: str, result: dict[str, Any], indices: Sequence[int]) -> Table:
    """Return the table of a result of `sweep`, with one row per point at `indices`."""
    at, curves = result["at"], result["curves"]
    heads = [axis]
    for name in curves:
        heads.append(f"SNR {name}")
    heads.append("best lambda")
    rows = []
    for i in indices:
        cells = [f"{at[i]:g}"]
        for curve in curves.values():
            snr = short(curve["snr"][i])
            error = short(curve["snr_se"][i], 1)
            cells.append(f"{snr} ± {error}")
        lam = curves["best"]["lambda"][i]
        cells.append(short(lam))
        rows.append(cells)
    return Table.of(heads, rows, left=())


def noise_floor_command(argv: list[str]) -> None:
    cfg = parse(NoiseFloorArguments, argv, NOISE_FLOOR_USAGE)
    if Path(cfg.out).suffix.lower() != ".png":
        raise ConfigError(f"out={cfg.out} must end in .png")
    result = noise_floor(cfg)
    # Draw into memory, so that a failure leaves no partly written file.
    image = BytesIO()
    draw_figure(result).savefig(image, dpi=200)
    write_out(cfg.out, image.getvalue())
    if cfg.json:
        # Encode twice: `echo_json` does not support arrays.
        encoded = json.dumps(result, default=np.ndarray.tolist)
        echo_json(json.loads(encoded))
    else:
        echo(f"{tables(result)}\nfigure: {cfg.out}")
