"""diffllm noise-floor [key=value ...] [--json]: a signal among noisy logits, one map against two.

The model, its formulas and the figure are in diffllm/analysis/noise_floor.py.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from diffllm.analysis.noise_floor import (
    LARGEST_AMPLITUDE,
    Curve,
    NoiseFloor,
    Settings,
    Sweep,
    draw_figure,
    noise_floor,
    png,
)
from diffllm.errors import ConfigError
from diffllm.tools.arguments import parse

WHAT = """\
diffllm noise-floor [key=value ...] [--json]: signal-to-noise ratio of one query's attention,
standard against differential, over the number of keys, lambda and the noise's amplitude"""
WIDTH = 120  # wide enough for every number, so that none is cut off


@dataclass
class Arguments(Settings):
    """The arguments of `diffllm noise-floor`."""

    out: str = field(default="noise-floor.png", metadata={"help": "figure to write, a PNG"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.out).suffix.lower() != ".png":
            raise ConfigError(f"out={self.out} must end in .png")


def three_digits(value: float) -> str:
    """Three significant digits, plain where that is short."""
    if value == 0 or not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def with_error(value: float, error: float) -> str:
    """A mean and its standard error, to the error's first digit."""
    if error < 1e-9 * abs(value):
        return three_digits(value)
    if abs(value) >= 1e4 or 0 < abs(value) < 1e-2:
        return f"{value:.2e} ± {error:.0e}"
    digits = min(max(-math.floor(math.log10(error)), 0), 4) if error else 4
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def weight_and_snr(curve: Curve, i: int) -> tuple[str, str]:
    """The cells of a curve's i-th point."""
    return three_digits(curve.weight[i]), with_error(curve.snr[i], curve.snr_se[i])


def table(title: str, heads: list[str]) -> Table:
    """An empty table of right-aligned columns without a frame."""
    columns = [Column(head, justify="right", no_wrap=True) for head in heads]
    made = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.title_justify, made.title_style = "left", "bold"
    return made


def sweep_table(title: str, axis: str, at: dict[int, str], sweep: Sweep, lam: float) -> Table:
    """Points of a sweep over keys or amplitude, `at` their first cells by place."""
    standard = ["standard\nweight", "\nSNR"]
    given = [f"lambda {lam:g}\nweight", "\nSNR"]
    made = table(title, [axis, *standard, *given, "best\nlambda", "\nSNR", "uncorrelated\nSNR"])
    for i, first in at.items():
        cells = {name: weight_and_snr(curve, i) for name, curve in sweep.curves.items()}
        best = f"{sweep.curves['best'].lam[i]:.2f}", cells["best"][1]
        snr_apart = cells["uncorrelated"][1]
        made.add_row(first, *cells["standard"], *cells["differential"], *best, snr_apart)
    return made


def lambda_table(title: str, result: NoiseFloor) -> Table:
    """Every tenth of lambda, and the best ones."""
    names = {
        "differential": f"correlation {result.settings.correlation:g}",
        "uncorrelated": "uncorrelated",
    }
    heads = [head for text in names.values() for head in (f"{text}\nweight", "\nSNR")]
    made = table(title, ["lambda", *heads, ""])
    for i, lam in enumerate(result.by_lambda.at):
        best = [text for name, text in names.items() if result.best_lambda[name] == lam]
        if best or i % 10 == 0:
            cells = [c for name in names for c in weight_and_snr(result.by_lambda.curves[name], i)]
            made.add_row(f"{lam:.2f}", *cells, f"best, {' and '.join(best)}" if best else "")
    return made


def conclusions(result: NoiseFloor) -> str:
    """Best lambda, gain over standard attention and usable amplitude, a line each."""
    cfg, curves = result.settings, result.by_lambda.curves
    standard = curves["standard"].snr[0]
    lines = [
        f"At {cfg.keys:,} keys and amplitude {cfg.amplitude:g}, "
        f"standard SNR {three_digits(standard)}:"
    ]
    noises = {
        "differential": f"correlation {cfg.correlation:g}",
        "uncorrelated": "uncorrelated noise",
    }
    for name, noise in noises.items():
        snr = curves[name].snr.max()
        lines.append(
            f"  {noise}: best lambda {result.best_lambda[name]:.2f}, SNR {three_digits(snr)}, "
            f"{three_digits(snr / standard)} times the standard's"
        )
    words = {None: f"up to {LARGEST_AMPLITUDE:g} and beyond", 0.0: "at no amplitude"}
    usable = {
        name: words.get(amplitude, f"up to {amplitude or 0:.2f}")
        for name, amplitude in result.usable_amplitude.items()
    }
    lines.append(
        f"Amplitudes with an SNR of {cfg.threshold:g} or more: standard {usable['standard']}, "
        f"best lambda {usable['best']}"
    )
    return "\n".join(lines)


def print_tables(result: NoiseFloor, console: Console) -> None:
    """Print the quantities, a table for each sweep, and the conclusions."""
    cfg = result.settings
    console.print(
        f"One query: signal {cfg.signal:g} logits above noise of mean 0; {cfg.draws} draws, "
        "± is the standard error.\n"
        "SNR: weight on the signal / root of the sum of the other weights squared, which is the\n"
        "noise that values uncorrelated between keys and of RMS 1 add to the context.\n"
        f"Where noise is called uncorrelated, lambda is {cfg.lambda_:g} and the correlation 0.\n"
    )
    keys, noise = f"{cfg.keys:,} keys", f"noise of amplitude {cfg.amplitude:g}"
    correlation = f"correlation {cfg.correlation:g} between the maps"
    contexts = {i: f"{n / 1024:g}k" for i, n in enumerate(result.by_keys.at)}
    sigmas = {i: f"{s:.3g}" for i, s in enumerate(result.by_amplitude.at) if i % 4 == 3}
    title = f"Number of keys: {noise}, {correlation}"
    console.print(sweep_table(title, "keys", contexts, result.by_keys, cfg.lambda_))
    console.print(lambda_table(f"Lambda: {keys}, {noise}", result))
    title = f"Amplitude of the noise: {keys}, {correlation}"
    console.print(sweep_table(title, "noise", sigmas, result.by_amplitude, cfg.lambda_))
    console.print(conclusions(result))


def report(result: NoiseFloor) -> dict[str, Any]:
    """The numbers under the names of the arguments; arrays as lists."""
    numbers = json.loads(json.dumps(asdict(result), default=lambda array: array.tolist()))
    numbers["settings"] = {name.rstrip("_"): v for name, v in numbers["settings"].items()}
    for sweep in ("by_keys", "by_lambda", "by_amplitude"):
        for curve in numbers[sweep]["curves"].values():
            curve["lambda"] = curve.pop("lam")
    return numbers


def main(argv: list[str]) -> None:
    """Write the figure, print the tables or the JSON."""
    cfg = parse(Arguments, [word for word in argv if word != "--json"], WHAT)
    result = noise_floor(cfg)
    try:
        Path(cfg.out).write_bytes(png(draw_figure(result)))
    except OSError as error:
        raise ConfigError(f"out={cfg.out} cannot be written: {error.strerror}") from None
    if "--json" in argv:
        print(json.dumps(report(result), indent=2))
        return
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    print_tables(result, console)
    console.print(f"figure: {cfg.out}", markup=False, soft_wrap=True)
