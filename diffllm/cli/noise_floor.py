"""diffllm noise-floor [key=value ...] [--json]: a signal among noisy logits, one map against two.

A solvable caricature of differential attention (arXiv 2410.05258). One query sees n keys. Key s is
the signal; the other keys i carry noise x_i, e_i ~ N(0, 1), all independent. The logits are

    map 1:   a       at s,   sigma x_i                                elsewhere
    map 2:   0       at s,   sigma (rho x_i + sqrt(1 - rho^2) e_i)    elsewhere

with signal a, amplitude sigma and correlation rho, which is an assumption about trained maps. With
p = softmax(map 1) and q = softmax(map 2) the weights are w = p - lambda q; lambda = 0 is standard
attention. Values that are uncorrelated between keys and of RMS 1 then give

    SNR(lambda) = w_s / sqrt(sum over i != s of w_i^2)
                = (p_s - lambda q_s) / sqrt(r^2 + |q|^2 (lambda - m)^2)
    lambda*     = m - q_s r^2 / (|q|^2 (p_s - m q_s)),    the best lambda

where m = p.q / |q|^2 and r = |p - m q|, with products and norms over i != s. With Z_k the sum of
exp(logit) over map k, the limit of many keys is

    standard SNR    = exp(a - sigma^2) / sqrt(n)
    lambda*         = (Z_2 / Z_1) exp(-sigma^2 (1 - rho))
    gain at lambda* = 1 / sqrt(1 - exp(-2 sigma^2 (1 - rho)))
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import bisect
from scipy.special import softmax

from diffllm.cli.arguments import a_path, parse
from diffllm.cli.table import print_table, table
from diffllm.compare.report.numbers import short
from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.files import replace_file
from diffllm.core.printing import echo, echo_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHAT = """\
diffllm noise-floor [key=value ...] [--json]: signal-to-noise ratio of one query's attention,
standard against differential, over the number of keys, lambda and the noise's amplitude"""
Array = NDArray[np.float64]
CONTEXTS = tuple(1024 * 2**i for i in range(8))
LAMBDAS = np.linspace(0, 1, 101)
LARGEST_AMPLITUDE = 20.0


@dataclass
class Arguments:
    """The synthetic query, how often it is drawn, and the figure."""

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
    out: str = field(default="noise-floor.png", metadata=a_path("figure to write, a PNG"))

    def __post_init__(self) -> None:
        check_bounds("", self)
        if Path(self.out).suffix.lower() != ".png":
            raise ConfigError(f"out={self.out} must end in .png")

    def noise(self, curve: str = "") -> str:
        """Return the noise of a curve in words, such as "shared noise"."""
        if curve == "uncorrelated" or not self.correlation:
            return "independent noise"
        return "shared noise" if self.correlation > 0 else "opposed noise"


def reduce_maps(noise1: Array, noise2: Array, signal: float) -> tuple[float, ...]:
    """Return p_s, q_s, m, r^2 and |q|^2 of one draw; noise1 and noise2 (n - 1,) are logits."""
    logits = np.stack([np.append(noise1, signal), np.append(noise2, 0.0)])
    weights = softmax(logits, axis=1)
    (p, q), (p_s, q_s) = weights[:, :-1], weights[:, -1]
    q2 = q @ q
    m = p @ q / q2
    rest = p - m * q
    # After perfect cancellation only rounding errors remain, so r^2 has a lower bound.
    r2 = max(rest @ rest, np.finfo(np.float64).eps ** 2 * (p @ p))
    return p_s, q_s, m, r2, q2


def draw_maps(points: Sequence[tuple[int, float]], correlation: float, cfg: Arguments) -> Array:
    """Return `reduce_maps` at (keys, amplitude) pairs, of shape (5, points, draws).

    All points share their draws, so that curves are smooth.
    """
    maps = np.empty((5, len(points), cfg.draws))
    most = max(keys for keys, _ in points) - 1
    for draw in range(cfg.draws):
        x, e = (np.random.default_rng([cfg.seed, draw, i]).standard_normal(most) for i in (0, 1))
        second = correlation * x + np.sqrt(1 - correlation**2) * e
        for i, (keys, sigma) in enumerate(points):
            noises = sigma * x[: keys - 1], sigma * second[: keys - 1]
            maps[:, i, draw] = reduce_maps(*noises, cfg.signal)
    return maps


def effective(maps: Array, lam: Array | float) -> tuple[Array, Array]:
    """Return the weight on the signal and the SNR; `lam` broadcasts against one field of maps."""
    p_s, q_s, m, r2, q2 = maps
    weight = p_s - lam * q_s
    return weight, weight / np.sqrt(r2 + q2 * (lam - m) ** 2)


def average(maps: Array, lam: Array | float) -> dict[str, Array]:
    """Return means over draws and their standard errors, each (points,), at one lambda or one for
    each point."""
    lam = np.broadcast_to(np.asarray(lam, dtype=np.float64), max(np.shape(lam), maps.shape[1:2]))
    curve = {"lambda": lam}
    for name, values in zip(("weight", "snr"), effective(maps, lam[:, None]), strict=True):
        curve[name] = values.mean(axis=1)
        curve[f"{name}_se"] = values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])
    return curve


def best_lambda(maps: Array) -> Array:
    """Return the lambda of LAMBDAS with the largest mean SNR over draws, (points,)."""
    _, snr = effective(maps[..., None], LAMBDAS)
    return LAMBDAS[snr.mean(axis=1).argmax(axis=1)]


def sweep(
    at: Any, points: Sequence[tuple[int, float]], lam: Array | float, cfg: Arguments
) -> dict[str, Any]:
    """Return the curves over (keys, amplitude) pairs at one lambda, or over lambdas at one pair."""
    maps, apart = (draw_maps(points, rho, cfg) for rho in (cfg.correlation, 0.0))
    curves = {
        "standard": average(maps, 0 * lam),
        "differential": average(maps, lam),
        "best": average(maps, best_lambda(maps) + 0 * lam),
        "uncorrelated": average(apart, lam),
    }
    return {"at": np.asarray(at, dtype=np.float64), "curves": curves}


def usable_amplitude(cfg: Arguments, best: bool) -> float | None:
    """Return the amplitude at which the mean SNR falls below the threshold, within 1e-4.

    0 if the SNR is too low even without noise, None if it is high enough at LARGEST_AMPLITUDE.

    Args:
        best: of the best lambda of each amplitude, not of standard attention.
    """

    def surplus(amplitude: float) -> float:
        maps = draw_maps([(cfg.keys, amplitude)], cfg.correlation, cfg)
        return average(maps, best_lambda(maps) if best else 0.0)["snr"].item() - cfg.threshold

    if surplus(0.0) < 0:
        return 0.0
    if surplus(LARGEST_AMPLITUDE) >= 0:
        return None
    return bisect(surplus, 0.0, LARGEST_AMPLITUDE, xtol=1e-4)


def noise_floor(cfg: Arguments) -> dict[str, Any]:
    """Return the settings, all sweeps, the best lambdas and the usable amplitudes."""
    usable = {name: usable_amplitude(cfg, name == "best") for name in ("standard", "best")}
    widest = max(1.5 * max(x or 0 for x in usable.values()), 1.5 * cfg.amplitude, 2.0)
    amplitudes = np.linspace(0, np.ceil(2 * widest) / 2, 41)[1:]
    by_lambda = sweep(LAMBDAS, [(cfg.keys, cfg.amplitude)], LAMBDAS, cfg)
    contexts = [(keys, cfg.amplitude) for keys in CONTEXTS]
    return {
        "settings": {name.rstrip("_"): value for name, value in asdict(cfg).items()},
        "by_keys": sweep(CONTEXTS, contexts, cfg.lambda_, cfg),
        "by_lambda": by_lambda,
        "by_amplitude": sweep(amplitudes, [(cfg.keys, s) for s in amplitudes], cfg.lambda_, cfg),
        "best_lambda": {
            name: float(LAMBDAS[by_lambda["curves"][name]["snr"].argmax()])
            for name in ("differential", "uncorrelated")
        },
        "usable_amplitude": usable,
    }


def draw_figure(result: dict[str, Any], cfg: Arguments) -> "Figure":
    """Draw the SNR over keys, lambda and amplitude, with two standard errors as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    amplitude = f"amplitude {cfg.amplitude:g}"
    titles = {
        "keys": f"{cfg.noise()} of {amplitude}",
        "lambda": f"{cfg.keys:,} keys, noise of {amplitude}",
        "amplitude": f"{cfg.keys:,} keys, {cfg.noise()}",
    }
    for axes, (axis, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        at, curves = result[f"by_{axis}"].values()
        labels = curve_names(cfg) | {"best": "best lambda"}
        if axis == "lambda":
            labels["differential"] = cfg.noise()
        for name, label in labels.items():
            snr, margin = curves[name]["snr"], 2 * curves[name]["snr_se"]
            axes.plot(at, snr, label=label)
            axes.fill_between(at, snr - margin, snr + margin, alpha=0.25)
        axes.set(title=title, xlabel=axis, ylabel="signal-to-noise ratio")
        axes.set_xscale("log" if axis == "keys" else "linear")
        if axis != "lambda":
            axes.set_yscale("log")
            axes.axhline(cfg.threshold, color="grey", linestyle="--", linewidth=0.8)
        axes.legend()
    return figure


def curve_names(cfg: Arguments) -> dict[str, str]:
    given = f"lambda {cfg.lambda_:g}"
    names = ("standard", given, "best", "independent noise")
    return dict(zip(("standard", "differential", "best", "uncorrelated"), names, strict=True))


def print_sweep(
    title: str, axis: str, at: dict[int, str], swept: dict[str, Any], names: dict[str, str]
) -> None:
    """Print weight (or best lambda) and SNR of curves at the points `at`: index and first cell."""
    columns = ((f"{h}\n{'lambda' if c == 'best' else 'weight'}", "\nSNR") for c, h in names.items())
    made = table(axis, *(head for pair in columns for head in pair))
    made.title, made.title_justify, made.title_style = f"\n{title}", "left", "bold"
    for i, first in at.items():
        cells = [first]
        for name in names:
            curve = swept["curves"][name]
            cells.append(short(curve["lambda" if name == "best" else "weight"][i]))
            cells.append(f"{short(curve['snr'][i])} ± {short(curve['snr_se'][i], 1)}")
        made.add_row(*cells)
    print_table(made)


def print_tables(result: dict[str, Any], cfg: Arguments) -> None:
    """Print the quantities, a table for each sweep, and the conclusions."""
    echo(
        f"One query: signal {cfg.signal:g} logits above noise of mean 0; {cfg.draws} draws, "
        "± is the standard error.\n"
        "SNR: weight on the signal / root of the sum of the other weights squared, which is the\n"
        "noise that independent values of RMS 1 add to the context.\n"
        f"The correlation of the noise between the two maps is {cfg.correlation:g}; where it is "
        f"called independent,\nit is 0, and lambda is {cfg.lambda_:g} unless it varies."
    )
    shared, keys, of = cfg.noise(), f"{cfg.keys:,} keys", f"of amplitude {cfg.amplitude:g}"
    names, noises = curve_names(cfg), {name: cfg.noise(name) for name in result["best_lambda"]}
    swept = result["by_keys"]
    at = {i: f"{n / 1024:g}k" for i, n in enumerate(swept["at"])}
    print_sweep(f"Number of keys: {shared} {of}", "keys", at, swept, names)
    swept = result["by_lambda"]
    at = {i: f"{lam:.1f}" for i, lam in enumerate(swept["at"]) if i % 10 == 0}
    print_sweep(f"Lambda: {keys}, noise {of}", "lambda", at, swept, noises)
    swept = result["by_amplitude"]
    at = {i: f"{sigma:.3g}" for i, sigma in enumerate(swept["at"]) if i % 4 == 3}
    print_sweep(f"Amplitude of the noise: {keys}, {shared}", "noise", at, swept, names)
    snr = {name: curve["snr"] for name, curve in result["by_lambda"]["curves"].items()}
    standard = snr["standard"][0]
    echo(f"\nWith {keys} and noise {of}, standard attention has an SNR of {short(standard)}.")
    given = float(np.interp(cfg.lambda_, LAMBDAS, snr["differential"]))
    found = [(f"{shared} lambda {cfg.lambda_:g}", given)]
    for name, best in result["best_lambda"].items():
        if name == "differential" or cfg.correlation:  # otherwise both have the same noise
            found.append((f"{noises[name]} the best lambda {best:.2f}", snr[name].max()))
    for words, value in found:
        echo(f"With {words} gives {short(value)}, {short(value / standard)} times that.")
    ends = {None: f"up to {LARGEST_AMPLITUDE:g} and beyond", 0.0: "at no amplitude"}
    usable = {n: ends.get(x, f"up to {x or 0:.2f}") for n, x in result["usable_amplitude"].items()}
    echo(
        f"The SNR is {cfg.threshold:g} or more for noise of amplitudes {usable['standard']} with "
        f"standard attention, {usable['best']} with the best lambda."
    )


def as_lists(value: Any) -> Any:
    """Return nested mappings with arrays as lists."""
    if isinstance(value, dict):
        return {key: as_lists(inner) for key, inner in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def main(argv: list[str]) -> None:
    """Write the figure, print the tables or the JSON."""
    cfg = parse(Arguments, [word for word in argv if word != "--json"], WHAT)
    result, drawn = noise_floor(cfg), BytesIO()
    draw_figure(result, cfg).savefig(drawn, dpi=200)
    try:
        replace_file(Path(cfg.out), drawn.getvalue())
    except OSError as error:
        raise ConfigError(f"out={cfg.out} cannot be written: {error.strerror}") from None
    if "--json" in argv:
        echo_json(as_lists(result))
        return
    print_tables(result, cfg)
    echo(f"figure: {cfg.out}")
