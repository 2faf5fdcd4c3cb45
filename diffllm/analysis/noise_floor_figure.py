"""The figure of diffllm noise-floor: SNR over the number of keys, lambda and amplitude."""

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from diffllm.analysis.noise_floor import Array, Curve, NoiseFloor, Sweep

# Okabe and Ito's palette: told apart with any colour vision, and in grey by their dashes.
STYLES = {
    "standard": ("#000000", "-"),
    "differential": ("#D55E00", "-"),
    "best": ("#0072B2", (0, (4, 2))),
    "uncorrelated": ("#009E73", (0, (1, 1))),
}
GREY = "#666666"
SMALL, NORMAL, LARGE = 8.0, 9.0, 10.5
LABEL_GAP = 0.075
PLAIN = FuncFormatter(lambda y, _: f"{y:g}")


def plot_curve(axes: Axes, at: Array, curve: Curve, name: str) -> None:
    """The mean, and two standard errors on either side as a band."""
    colour, dashes = STYLES[name]
    axes.plot(at, curve.snr, color=colour, linestyle=dashes, linewidth=1.5)
    low, high = (curve.snr + k * curve.snr_se for k in (-2, 2))
    axes.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)


def mark(axes: Axes, name: str, x: float, y: float) -> None:
    """A dot on the curve `name`."""
    axes.plot(x, y, "o", color=STYLES[name][0], markersize=4.5, clip_on=False, zorder=3)


def write(
    axes: Axes,
    text: str,
    name: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    coords: str | tuple[str, str] = "data",
    ha: str = "left",
) -> None:
    """Text in the colour of the curve `name`, `offset` points from `at`."""
    axes.annotate(
        text,
        at,
        xycoords=coords,
        xytext=offset,
        textcoords="offset points",
        ha=ha,
        va="center",
        fontsize=SMALL,
        color=STYLES[name][0],
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )


def spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights in (0, 1) moved as little as it takes to lie `gap` apart."""
    moved = list(heights)
    for _ in range(200):
        for i in range(len(moved) - 1):
            overlap = moved[i] + gap - moved[i + 1]
            if overlap > 0:
                moved[i], moved[i + 1] = moved[i] - overlap / 2, moved[i + 1] + overlap / 2
        shift = max(gap / 2 - moved[0], 0) - max(moved[-1] - 1, 0)
        moved = [height + shift for height in moved]
    return moved


def label_ends(axes: Axes, sweep: Sweep, texts: dict[str, str]) -> None:
    """What each curve is, at its right end; the axes' limits must be final."""
    to_axes = axes.transScale + axes.transLimits
    ends = {name: to_axes.transform((1, sweep.curves[name].snr[-1]))[1] for name in texts}
    heights = {name: float(np.clip(np.nan_to_num(y), 0, 1)) for name, y in ends.items()}
    order = sorted(texts, key=heights.__getitem__)
    for name, y in zip(order, spread([heights[n] for n in order], LABEL_GAP), strict=True):
        write(axes, texts[name], name, (1, y), (5, 0), coords="axes fraction")


def logarithmic(axes: Axes, sweep: Sweep, threshold: float) -> None:
    """A logarithmic SNR axis with plain numbers, and the threshold as a line.

    It shows all curves from three decades under the threshold (or under the standard) upwards.
    """
    values = np.concatenate([*(curve.snr for curve in sweep.curves.values()), [threshold]])
    top = float(values.max())
    floor = min(threshold, float(sweep.curves["standard"].snr.max())) / 1000
    bottom = max(float(values.min()), floor)
    axes.set_yscale("log")
    axes.set_ylim(bottom / 1.3, top * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * bottom else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN)
    axes.axhline(threshold, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)


def draw_keys(axes: Axes, result: NoiseFloor, texts: dict[str, str]) -> None:
    """SNR over the number of keys."""
    sweep = result.by_keys
    for name in texts:
        plot_curve(axes, sweep.at, sweep.curves[name], name)
    axes.set_xscale("log", base=2)
    axes.set_xlim(sweep.at[0], sweep.at[-1])
    axes.xaxis.set_major_locator(FixedLocator(sweep.at.tolist()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}"))
    axes.set_xlabel("keys (× 1,024)", fontsize=NORMAL)
    logarithmic(axes, sweep, result.settings.threshold)
    label_ends(axes, sweep, texts)


def draw_lambda(axes: Axes, result: NoiseFloor, texts: dict[str, str]) -> None:
    """SNR over lambda for each kind of noise, the best lambda of each marked."""
    sweep = result.by_lambda
    top = 1.15 * max(float(curve.snr.max()) for curve in sweep.curves.values())
    written: list[tuple[float, float]] = []
    for name in texts:
        plot_curve(axes, sweep.at, sweep.curves[name], name)
        if name in result.best_lambda:
            x, y = result.best_lambda[name], float(sweep.curves[name].snr.max())
            mark(axes, name, x, y)
            near = any(abs(x - a) < 0.15 and abs(y - b) < 0.08 * top for a, b in written)
            ha = "left" if x < 0.1 else "right" if x > 0.9 else "center"
            write(axes, f"{x:.2f}", name, (x, y), (0, -9 if near else 9), ha=ha)
            written.append((x, y))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("λ", fontsize=NORMAL)
    label_ends(axes, sweep, texts)


def draw_amplitude(axes: Axes, result: NoiseFloor, texts: dict[str, str]) -> None:
    """SNR over the noise's amplitude, and where it falls under the threshold."""
    sweep, threshold = result.by_amplitude, result.settings.threshold
    for name in texts:
        plot_curve(axes, sweep.at, sweep.curves[name], name)
    axes.set_xlim(0, sweep.at[-1])
    axes.set_xlabel("amplitude of the noise, σ (logits)", fontsize=NORMAL)
    logarithmic(axes, sweep, threshold)
    bottom = axes.get_ylim()[0]
    height = 6
    for name, ha in (("standard", "right"), ("best", "left")):
        x = result.usable_amplitude[name]
        if x:
            mark(axes, name, x, threshold)
            axes.vlines(x, bottom, threshold, color=STYLES[name][0], linewidth=0.6)
            if x < 0.15 * sweep.at[-1]:  # no room on the left
                ha = "left"
            write(axes, f"{x:.2f}", name, (x, bottom), (-3 if ha == "right" else 3, height), ha=ha)
            height += 12 if ha == "left" else 0
    label_ends(axes, sweep, texts)


def draw_figure(result: NoiseFloor) -> Figure:
    """The three panels, about 10 inches wide; the figure is no part of pyplot's state."""
    cfg = result.settings
    figure = Figure(figsize=(10.5, 3.6))
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, gridspec_kw={"wspace": 0.6})
    figure.subplots_adjust(left=0.055, right=0.905, top=0.82, bottom=0.22)
    texts = {
        "standard": "standard",
        "differential": f"λ = {cfg.lambda_:g}",
        "best": "best λ",
        "uncorrelated": f"λ = {cfg.lambda_:g}, ρ = 0",
    }
    kinds = {
        "standard": "standard",
        "differential": f"ρ = {cfg.correlation:g}",
        "uncorrelated": "ρ = 0",
    }
    if cfg.correlation == 0:
        del texts["uncorrelated"], kinds["uncorrelated"]
    draw_keys(panels[0], result, texts)
    draw_lambda(panels[1], result, kinds)
    draw_amplitude(panels[2], result, texts)
    keys, sigma, rho = f"{cfg.keys:,} keys", f"σ = {cfg.amplitude:g}", f"ρ = {cfg.correlation:g}"
    titles = (f"{sigma}, {rho}", f"{keys}, {sigma}", f"{keys}, {rho}")
    for axes, letter, title in zip(panels, "abc", titles, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
        axes.set_title(f"$\\bf{{{letter}}}$   {title}", loc="left", fontsize=NORMAL)
    panels[0].set_ylabel("signal-to-noise ratio", fontsize=NORMAL)
    left = figure.subplotpars.left
    heading = "Standard attention (λ = 0) and differential attention, map 1 − λ · map 2"
    figure.text(left, 0.95, heading, fontsize=LARGE, va="center")
    caption = (
        f"One query; signal {cfg.signal:g} logits above noise of mean 0, which has correlation ρ "
        f"between the maps. Mean of {cfg.draws} draws ± 2 standard errors. "
        f"Dashed: threshold {cfg.threshold:g}."
    )
    figure.text(left, 0.035, caption, fontsize=SMALL, color=GREY, va="center")
    return figure


def png(figure: Figure, dpi: int = 200) -> bytes:
    """The figure as a PNG, cropped to what is drawn."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.1)
    return out.getvalue()
