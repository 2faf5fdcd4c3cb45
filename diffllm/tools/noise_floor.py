"""diffllm noise-floor [key=value ...] [--json]: a signal among noisy logits, one map against two.

The model and its formulas are in diffllm/noise_floor.py.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from diffllm.analysis.noise_floor import LARGEST_AMPLITUDE, NoiseFloor, Settings, Sweep, noise_floor
from diffllm.analysis.noise_floor_figure import draw_figure, png
from diffllm.errors import ConfigError
from diffllm.tools.arguments import parse

WHAT = """\
diffllm noise-floor [key=value ...] [--json]: signal-to-noise ratio of one query's attention,
standard against differential, over the number of keys, lambda and the noise's amplitude"""
WIDTH = 120  # wide enough for every number, so that none is cut off


@dataclass
class Arguments(Settings):
    """What `diffllm noise-floor` takes."""

    out: str = field(default="noise-floor.png", metadata={"help": "figure to write, a PNG"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.out).suffix.lower() != ".png":
            raise ConfigError(f"out={self.out} must end in .png")


def number(value: float) -> str:
    """Three significant digits, plain where that is short."""
    if value == 0 or not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def with_error(value: float, error: float) -> str:
    """A mean and its standard error, to the error's first digit."""
    if error < 1e-9 * abs(value):
        return number(value)
    if abs(value) >= 1e4 or 0 < abs(value) < 1e-2:
        return f"{value:.2e} ± {error:.0e}"
    digits = min(max(-math.floor(math.log10(error)), 0), 4) if error else 4
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def empty_table(title: str, heads: list[str]) -> Table:
    """Right-aligned columns without a frame."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def sweep_table(title: str, axis: str, at: list[str], sweep: Sweep, lam: float) -> Table:
    """Rows of a sweep over keys or amplitude, `at` their first cells; "" leaves a row out."""
    given = f"lambda {lam:g}"
    heads = [
        axis,
        "standard\nweight",
        "\nSNR",
        f"{given}\nweight",
        "\nSNR",
        "best\nlambda",
        "\nSNR",
    ]
    table = empty_table(title, [*heads, "uncorrelated\nSNR"])
    curves = sweep.curves
    for i, first in enumerate(at):
        snr = {name: with_error(curve.snr[i], curve.snr_se[i]) for name, curve in curves.items()}
        weight = {name: number(curve.weight[i]) for name, curve in curves.items()}
        pairs = [
            text for name in ("standard", "differential") for text in (weight[name], snr[name])
        ]
        if first:
            best = f"{curves['best'].lam[i]:.2f}"
            table.add_row(first, *pairs, best, snr["best"], snr["uncorrelated"])
    return table


def lambda_table(title: str, result: NoiseFloor) -> Table:
    """Every tenth of lambda, and the best ones."""
    names = {"differential": f"correlation {result.settings.correlation:g}"}
    names["uncorrelated"] = "uncorrelated"
    heads = [head for name in names.values() for head in (f"{name}\nweight", "\nSNR")]
    table = empty_table(title, ["lambda", *heads, ""])
    for i, lam in enumerate(result.by_lambda.at):
        best = [text for name, text in names.items() if result.best_lambda[name] == lam]
        if i % 10 and not best:
            continue
        cells = [f"{lam:.2f}"]
        for name in names:
            curve = result.by_lambda.curves[name]
            cells += [number(curve.weight[i]), with_error(curve.snr[i], curve.snr_se[i])]
        table.add_row(*cells, f"best, {' and '.join(best)}" if best else "")
    return table


def conclusions(result: NoiseFloor) -> str:
    """What the tables come to: best lambda, gain over standard attention, usable amplitude."""
    cfg, curves = result.settings, result.by_lambda.curves
    standard = float(curves["standard"].snr[0])
    lines = [
        f"At {cfg.keys:,} keys and amplitude {cfg.amplitude:g}, standard SNR {number(standard)}:"
    ]
    for name, noise in (
        ("differential", f"correlation {cfg.correlation:g}"),
        ("uncorrelated", "uncorrelated noise"),
    ):
        snr = float(curves[name].snr.max())
        lines.append(
            f"  {noise}: best lambda {result.best_lambda[name]:.2f}, SNR {number(snr)}, "
            f"{number(snr / standard)} times the standard's"
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
    """What is measured, a table for each sweep, and what they come to."""
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
    contexts = [f"{n / 1024:g}k" for n in result.by_keys.at]
    sigmas = [f"{s:.3g}" if i % 4 == 3 else "" for i, s in enumerate(result.by_amplitude.at)]
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
