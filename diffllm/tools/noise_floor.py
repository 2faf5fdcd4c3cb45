"""diffllm noise-floor [key=value ...] [--json]: a signal among noisy logits, one map against two.

The model, its formulas and the figure are in diffllm/evaluation/noise_floor.py.
"""

import itertools
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from diffllm.errors import ConfigError
from diffllm.evaluation.noise_floor import (
    LARGEST_AMPLITUDE,
    NoiseFloor,
    Settings,
    Sweep,
    draw_figure,
    noise_floor,
    noise_in_words,
)
from diffllm.files import replace_file
from diffllm.printing import echo, echo_json
from diffllm.report.numbers import short
from diffllm.tools.arguments import a_path, parse
from diffllm.tools.table import print_table, table

WHAT = """\
diffllm noise-floor [key=value ...] [--json]: signal-to-noise ratio of one query's attention,
standard against differential, over the number of keys, lambda and the noise's amplitude"""


@dataclass
class Arguments(Settings):
    """The arguments of `diffllm noise-floor`."""

    out: str = field(default="noise-floor.png", metadata=a_path("figure to write, a PNG"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.out).suffix.lower() != ".png":
            raise ConfigError(f"out={self.out} must end in .png")


def sweep_table(
    title: str, axis: str, at: dict[int, str], sweep: Sweep, heads: dict[str, str]
) -> Table:
    """Curves at the points `at` (their place and first cell): weight, or best lambda, and SNR."""
    columns = [[f"{h}\n{'lambda' if n == 'best' else 'weight'}", "\nSNR"] for n, h in heads.items()]
    made = table(axis, *itertools.chain(*columns))
    made.title, made.title_justify, made.title_style = f"\n{title}", "left", "bold"
    for i, first in at.items():
        cells = [first]
        for name in heads:
            curve = sweep.curves[name]
            cells.append(short(curve.lambda_[i] if name == "best" else curve.weight[i]))
            cells.append(f"{short(curve.snr[i])} ± {short(curve.snr_se[i], 1)}")
        made.add_row(*cells)
    return made


def conclusions(result: NoiseFloor) -> str:
    """Best lambda, gain over standard attention and usable amplitude, a line each."""
    cfg, curves = result.settings, result.by_lambda.curves
    standard = curves["standard"].snr[0]
    lines = [
        f"With {cfg.keys:,} keys and noise of amplitude {cfg.amplitude:g}, standard attention has "
        f"an SNR of {short(standard)}."
    ]
    snr = float(np.interp(cfg.lambda_, result.by_lambda.at, curves["differential"].snr))
    lines.append(
        f"With {noise_in_words(cfg.correlation)} lambda {cfg.lambda_:g} gives {short(snr)}, "
        f"{short(snr / standard)} times that."
    )
    for name, best in result.best_lambda.items():
        if name == "uncorrelated" and not cfg.correlation:
            continue  # the same noise
        snr = curves[name].snr.max()
        lines.append(
            f"With {noise_of(name, cfg)} the best lambda {best:.2f} gives {short(snr)}, "
            f"{short(snr / standard)} times that."
        )
    words = {None: f"up to {LARGEST_AMPLITUDE:g} and beyond", 0.0: "at no amplitude"}
    usable = {
        name: words.get(amplitude, f"up to {amplitude or 0:.2f}")
        for name, amplitude in result.usable_amplitude.items()
    }
    lines.append(
        f"The SNR is {cfg.threshold:g} or more for noise of amplitudes {usable['standard']} with "
        f"standard attention, {usable['best']} with the best lambda."
    )
    return "\n".join(lines)


def noise_of(name: str, cfg: Settings) -> str:
    """The noise of the curve `differential` or `uncorrelated` in words."""
    return noise_in_words(0.0 if name == "uncorrelated" else cfg.correlation)


def print_tables(result: NoiseFloor) -> None:
    """Print the quantities, a table for each sweep, and the conclusions."""
    cfg = result.settings
    shared = noise_in_words(cfg.correlation)
    echo(
        f"One query: signal {cfg.signal:g} logits above noise of mean 0; {cfg.draws} draws, "
        "± is the standard error.\n"
        "SNR: weight on the signal / root of the sum of the other weights squared, which is the\n"
        "noise that independent values of RMS 1 add to the context.\n"
        f"The correlation of the noise between the two maps is {cfg.correlation:g}; where it is "
        f"called independent,\nit is 0, and lambda is {cfg.lambda_:g} unless it varies."
    )
    keys, noise = f"{cfg.keys:,} keys", f"noise of amplitude {cfg.amplitude:g}"
    heads = {"standard": "standard", "differential": f"lambda {cfg.lambda_:g}", "best": "best",
             "uncorrelated": "independent noise"}  # fmt: skip
    noises = {name: noise_of(name, cfg) for name in result.best_lambda}
    contexts = {i: f"{n / 1024:g}k" for i, n in enumerate(result.by_keys.at)}
    tenths = {i: f"{lam:.1f}" for i, lam in enumerate(result.by_lambda.at) if i % 10 == 0}
    sigmas = {i: f"{s:.3g}" for i, s in enumerate(result.by_amplitude.at) if i % 4 == 3}
    title = f"Number of keys: {shared} of amplitude {cfg.amplitude:g}"
    print_table(sweep_table(title, "keys", contexts, result.by_keys, heads))
    title = f"Lambda: {keys}, {noise}"
    print_table(sweep_table(title, "lambda", tenths, result.by_lambda, noises))
    title = f"Amplitude of the noise: {keys}, {shared}"
    print_table(sweep_table(title, "noise", sigmas, result.by_amplitude, heads))
    echo(f"\n{conclusions(result)}")


def report(result: NoiseFloor) -> dict[str, Any]:
    """The numbers under the names of the arguments; arrays as lists."""

    def named(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        plain = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in fields}
        return {name.rstrip("_"): v for name, v in plain.items()}

    return asdict(result, dict_factory=named)


def main(argv: list[str]) -> None:
    """Write the figure, print the tables or the JSON."""
    cfg = parse(Arguments, [word for word in argv if word != "--json"], WHAT)
    result = noise_floor(cfg)
    try:
        drawn = BytesIO()
        draw_figure(result).savefig(drawn, dpi=200)
        replace_file(Path(cfg.out), drawn.getvalue())
    except OSError as error:
        raise ConfigError(f"out={cfg.out} cannot be written: {error.strerror}") from None
    if "--json" in argv:
        echo_json(report(result))
        return
    print_tables(result)
    echo(f"figure: {cfg.out}")
