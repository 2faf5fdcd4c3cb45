"""The effect of subtracting a second attention map on noise, for one query of a known signal.

The idea is differential attention's (Differential Transformer, Ye et al., arXiv 2410.05258); the
model below is a caricature of it that can be solved, not a measurement of a trained model.

One query sees n keys. Key s is the signal; the n - 1 others carry noise x_i, e_i ~ N(0, 1), all
independent. The logits of the two maps are

    map 1:   a       at s,   sigma x_i                                elsewhere
    map 2:   0       at s,   sigma (rho x_i + sqrt(1 - rho^2) e_i)    elsewhere

with the signal's advantage a, the noise's amplitude sigma (both in logits) and its correlation
between the maps rho. rho is an assumption: nothing here says how common the noise of two trained
maps is. With p = softmax(map 1) and q = softmax(map 2) the effective weights are

    w = p - lambda q        lambda = 0 is standard attention

and with values that are uncorrelated between keys and of RMS 1, the context is w_s times the
signal's value plus a noise of RMS sqrt(sum of w_i^2 over i != s). Hence

    SNR(lambda) = w_s / sqrt(sum over i != s of w_i^2)
                = (p_s - lambda q_s) / sqrt(r^2 + |q|^2 (lambda - m)^2)

where m = p.q / |q|^2 is the multiple of map 2's noise in map 1's, r = |p - m q| what no multiple
removes, and products and norms run over i != s. The best lambda is

    lambda* = m - q_s r^2 / (|q|^2 (p_s - m q_s))

With Z_k the sum of exp(logit) over map k, the limit of many keys is

    standard SNR    = exp(a - sigma^2) / sqrt(n)
    lambda*         = (Z_2 / Z_1) exp(-sigma^2 (1 - rho))
    gain at lambda* = 1 / sqrt(1 - exp(-2 sigma^2 (1 - rho)))

So the gain is large for common noise and for weak noise (the uniform floor of a softmax is common
to any two maps), next to none for strong uncorrelated noise, and lambda* falls with Z_2 / Z_1,
which is about 1 - p_s: a map that has already found its signal wants no subtraction. With rho = 1
noise cancels at lambda*, but at lambda = 1 the weights sum to zero and SNR = R / sqrt(S), with R
and S the sums of exp(sigma x_i) and exp(2 sigma x_i): whatever the signal, and less than standard
attention's exp(a) / sqrt(S) if p_s > 1/2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray
from scipy.optimize import bisect
from scipy.special import softmax

from diffllm.bounds import bounded, check_bounds

Array = NDArray[np.float64]
CONTEXTS = tuple(1024 * 2**i for i in range(8))
LAMBDAS = np.linspace(0, 1, 101)
LARGEST_AMPLITUDE = 20.0
# Okabe and Ito's palette: told apart with any colour vision, and in grey by their dashes.
STYLES: dict[str, dict[str, Any]] = {
    "standard": {"color": "#000000", "linestyle": "-"},
    "differential": {"color": "#D55E00", "linestyle": "-"},
    "best": {"color": "#0072B2", "linestyle": (0, (4, 2))},
    "uncorrelated": {"color": "#009E73", "linestyle": (0, (1, 1))},
}


@dataclass
class Settings:
    """The synthetic query, and how often it is drawn."""

    keys: int = bounded(
        8192, help="keys where lambda or amplitude varies", least=2, most=CONTEXTS[-1]
    )
    lambda_: float = bounded(0.8, help="share of map 2 that is subtracted", least=0, most=1)
    amplitude: float = bounded(
        1.0, help="noise's standard deviation, in logits", least=0, most=LARGEST_AMPLITUDE
    )
    signal: float = bounded(6.0, help="signal's advantage in map 1, in logits", least=0, most=100)
    correlation: float = bounded(0.9, help="of the two maps' noise", least=-1, most=1)
    threshold: float = bounded(1.0, help="SNR from which a map is usable", above=0, below=np.inf)
    draws: int = bounded(32, help="random draws of the noise", least=2, most=1000)
    seed: int = bounded(0, help="of the noise", least=0)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value beyond its bounds."""
        check_bounds("", self)


class TwoMaps(NamedTuple):
    """All that the SNR needs of two maps; see the top of the file. Arrays of one shape."""

    p_s: Array
    q_s: Array
    m: Array
    r2: Array
    q2: Array


@dataclass(frozen=True)
class Curve:
    """Means over draws and their standard errors, along a sweep; each (points,)."""

    lambda_: Array
    weight: Array
    weight_se: Array
    snr: Array
    snr_se: Array


@dataclass(frozen=True)
class Sweep:
    """The results while one quantity varies.

    Curves: `standard`; `differential` at the given lambda, or over all of them; `best` at the
    lambda of the largest mean SNR, one for all draws of a point; `uncorrelated`, which is
    `differential` with correlation 0.
    """

    at: Array
    curves: dict[str, Curve]


@dataclass(frozen=True)
class NoiseFloor:
    """Everything that the command reports.

    A usable amplitude is 0 if the SNR is too low even without noise, None if it never is.
    """

    settings: Settings
    by_keys: Sweep
    by_lambda: Sweep
    by_amplitude: Sweep
    best_lambda: dict[str, float]
    usable_amplitude: dict[str, float | None]


def reduce_maps(noise1: Array, noise2: Array, signal: float) -> tuple[float, ...]:
    """The fields of `TwoMaps` for one draw; noise1, noise2 (n - 1,): the noise keys' logits."""
    logits = np.stack([np.append(noise1, signal), np.append(noise2, 0.0)])
    weights = softmax(logits, axis=1)
    (p, q), (p_s, q_s) = weights[:, :-1], weights[:, -1]
    q2 = q @ q
    m = p @ q / q2
    rest = p - m * q
    # Perfect cancellation leaves rounding errors: nothing below them is a finding.
    r2 = max(rest @ rest, np.finfo(np.float64).eps ** 2 * (p @ p))
    return p_s, q_s, m, r2, q2


def draw_maps(points: Sequence[tuple[int, float]], correlation: float, cfg: Settings) -> TwoMaps:
    """The maps of every draw at (keys, amplitude) pairs: fields of shape (points, draws).

    All points share their draws, and fewer keys are the first of more, so that curves are smooth
    and differences between points are not noise.
    """
    fields = np.empty((len(TwoMaps._fields), len(points), cfg.draws))
    most = max(keys for keys, _ in points) - 1
    for draw in range(cfg.draws):
        x, e = (np.random.default_rng([cfg.seed, draw, i]).standard_normal(most) for i in (0, 1))
        second = correlation * x + np.sqrt(1 - correlation**2) * e
        for i, (keys, sigma) in enumerate(points):
            noises = sigma * x[: keys - 1], sigma * second[: keys - 1]
            fields[:, i, draw] = reduce_maps(*noises, cfg.signal)
    return TwoMaps(*fields)


def effective(maps: TwoMaps, lam: Array | float) -> tuple[Array, Array]:
    """Weight on the signal and SNR; `lam` broadcasts against the fields of `maps`."""
    weight = maps.p_s - lam * maps.q_s
    return weight, weight / np.sqrt(maps.r2 + maps.q2 * (lam - maps.m) ** 2)


def average(maps: TwoMaps, lam: Array | float) -> Curve:
    """Means over the draws of maps (points, draws) or (1, draws); lam a number or (points,)."""
    lam = np.broadcast_to(np.asarray(lam, dtype=np.float64), max(np.shape(lam), maps.m.shape[:1]))
    values = effective(maps, lam[:, None])
    means = [v.mean(axis=1) for v in values]
    errors = [v.std(axis=1, ddof=1) / np.sqrt(v.shape[1]) for v in values]
    return Curve(lam, means[0], errors[0], means[1], errors[1])


def best_lambda(maps: TwoMaps) -> Array:
    """The lambda with the largest mean SNR over draws: (points, draws) to (points,).

    It is found on a grid of 0.01, so where noise cancels almost perfectly the SNR is the grid's.
    """
    _, snr = effective(TwoMaps(*(part[..., None] for part in maps)), LAMBDAS)
    return LAMBDAS[snr.mean(axis=1).argmax(axis=1)]


def sweep(
    at: Sequence[float] | Array,
    points: Sequence[tuple[int, float]],
    lam: Array | float,
    cfg: Settings,
) -> Sweep:
    """The curves over (keys, amplitude) pairs at one lambda, or over many lambdas at one pair."""
    maps, apart = (draw_maps(points, rho, cfg) for rho in (cfg.correlation, 0.0))
    curves = {
        "standard": average(maps, 0 * lam),
        "differential": average(maps, lam),
        "best": average(maps, best_lambda(maps) + 0 * lam),
        "uncorrelated": average(apart, lam),
    }
    return Sweep(np.asarray(at, dtype=np.float64), curves)


def usable_amplitude(cfg: Settings, best: bool) -> float | None:
    """The amplitude at which the mean SNR falls under the threshold, within 1e-4.

    Of standard attention, or (`best`) of differential attention at the best lambda of each
    amplitude. 0 if it is under the threshold without noise, None if not at LARGEST_AMPLITUDE.
    """

    def surplus(amplitude: float) -> float:
        maps = draw_maps([(cfg.keys, amplitude)], cfg.correlation, cfg)
        return average(maps, best_lambda(maps) if best else 0.0).snr.item() - cfg.threshold

    if surplus(0.0) < 0:
        return 0.0
    if surplus(LARGEST_AMPLITUDE) >= 0:
        return None
    return bisect(surplus, 0.0, LARGEST_AMPLITUDE, xtol=1e-4)


def noise_floor(cfg: Settings) -> NoiseFloor:
    """All sweeps, the best lambda and the usable amplitudes of a synthetic query."""
    usable = {
        "standard": usable_amplitude(cfg, best=False),
        "best": usable_amplitude(cfg, best=True),
    }
    widest = max(1.5 * max(usable["standard"] or 0, usable["best"] or 0), 1.5 * cfg.amplitude, 2.0)
    amplitudes = np.linspace(0, np.ceil(2 * widest) / 2, 41)[1:]
    by_lambda = sweep(LAMBDAS, [(cfg.keys, cfg.amplitude)], LAMBDAS, cfg)
    return NoiseFloor(
        settings=cfg,
        by_keys=sweep(CONTEXTS, [(keys, cfg.amplitude) for keys in CONTEXTS], cfg.lambda_, cfg),
        by_lambda=by_lambda,
        by_amplitude=sweep(amplitudes, [(cfg.keys, s) for s in amplitudes], cfg.lambda_, cfg),
        best_lambda={
            name: float(LAMBDAS[by_lambda.curves[name].snr.argmax()])
            for name in ("differential", "uncorrelated")
        },
        usable_amplitude=usable,
    )


def noise_in_words(correlation: float) -> str:
    """How the noise of the two maps goes together: "shared noise", "independent noise"."""
    if correlation == 0:
        return "independent noise"
    return "shared noise" if correlation > 0 else "opposed noise"


def draw_figure(result: NoiseFloor) -> Figure:
    """SNR over the number of keys, lambda and amplitude; no part of pyplot's state."""
    cfg, usable = result.settings, result.usable_amplitude
    given, keys = f"λ = {cfg.lambda_:g}", f"{cfg.keys:,} keys"
    noise, amplitude = noise_in_words(cfg.correlation), f"amplitude {cfg.amplitude:g}"
    names = {
        "standard": "standard attention",
        "differential": given,
        "best": "best λ",
        "uncorrelated": f"{given}, independent noise",
    }
    noises = {
        "standard": "standard attention",
        "differential": f"{noise}, best λ {result.best_lambda['differential']:.2f}",
        "uncorrelated": f"independent noise, best λ {result.best_lambda['uncorrelated']:.2f}",
    }
    usable_names = {name: f"{names[name]}, usable to {x:.2f}" for name, x in usable.items() if x}
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    by_keys, by_lambda, by_amplitude = figure.subplots(1, 3)
    draw_panel(by_keys, f"More keys\n{noise} of {amplitude}", result.by_keys, names)
    draw_panel(
        by_lambda, f"More of map 2 subtracted\n{keys}, {amplitude}", result.by_lambda, noises
    )
    labels = names | usable_names
    draw_panel(by_amplitude, f"Stronger noise\n{keys}, {noise}", result.by_amplitude, labels)
    by_keys.set_xscale("log", base=2)
    by_keys.set_xticks(result.by_keys.at, [f"{n / 1024:g}" for n in result.by_keys.at])
    by_keys.set(xlabel="keys (× 1,024)", ylabel="signal-to-noise ratio")
    by_lambda.set(xlabel="λ", xlim=(0, 1), ylim=(0, None))
    by_amplitude.set(xlabel="amplitude of the noise, in logits", xlim=(0, None))
    for name, best in result.best_lambda.items():
        by_lambda.plot(best, result.by_lambda.curves[name].snr.max(), "o", **STYLES[name])
    for name in usable_names:
        by_amplitude.plot(usable[name], cfg.threshold, "o", **STYLES[name])
    scale_logarithmically(by_keys, result.by_keys, cfg.threshold)
    scale_logarithmically(by_amplitude, result.by_amplitude, cfg.threshold)
    figure.suptitle(
        "How one query's signal stands out of noise: standard attention, and map 1 − λ · map 2"
    )
    figure.supxlabel(
        f"Signal {cfg.signal:g} logits above noise of mean 0, whose correlation between the two "
        f"maps is {cfg.correlation:g}, and 0 where it is called independent.\n"
        f"Mean of {cfg.draws} draws ± 2 standard errors. Dashed: a ratio of {cfg.threshold:g}, "
        "from which a map is usable.",
        size="small",
    )
    return figure


def draw_panel(axes: Axes, title: str, sweep: Sweep, labels: dict[str, str]) -> None:
    """The curves that have a label, with two standard errors on either side as a band."""
    for name, label in labels.items():
        curve, style = sweep.curves[name], STYLES[name]
        axes.plot(sweep.at, curve.snr, label=label, **style)
        low, high = (curve.snr + k * curve.snr_se for k in (-2, 2))
        axes.fill_between(sweep.at, low, high, color=style["color"], alpha=0.25, linewidth=0)
    axes.set_title(title, loc="left", size="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def scale_logarithmically(axes: Axes, sweep: Sweep, threshold: float) -> None:
    """A logarithmic SNR axis with plain numbers, and the threshold as a line.

    It shows all curves from three decades under the threshold (or under the standard) upwards.
    """
    values = np.concatenate([*(curve.snr for curve in sweep.curves.values()), [threshold]])
    floor = min(threshold, sweep.curves["standard"].snr.max()) / 1000
    bottom, top = max(values.min(), floor), values.max()
    axes.set(yscale="log", ylim=(bottom / 1.3, top * 1.3))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * bottom else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.axhline(threshold, color="#666666", linewidth=0.8, linestyle="--", zorder=0)
