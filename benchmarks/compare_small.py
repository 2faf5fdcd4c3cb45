"""The committed files of experiment=compare_small, from the runs of its sweep.

    python train.py -m experiment=compare_small run.sweep=compare_small
    python benchmarks/compare_small.py outputs/compare_small

Writes report.csv (gaps to standard), report_diff_v2.csv (gaps to diff_v2), gaps.svg and losses.svg
into benchmarks/results/compare_small/, and prints the table of that folder's page. Without a
directory it only draws docs/pictures/compare_small.svg anew, from the committed report.csv.
"""

import csv
import re
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffllm.report.bands import band_of, smoothed
from diffllm.report.comparison import Comparison, read
from diffllm.report.intervals import draw_gaps as draw_gaps_of_report
from diffllm.report.rows import Row
from diffllm.report.style import RC, row_styles, to_svg
from diffllm.report.table import csv_text
from diffllm.statistics.intervals import Estimate

RESULTS = Path(__file__).parent / "results" / "compare_small"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "compare_small.svg"
PICTURE_WIDTH = 620
LIGHT = {"--fg": "#1b1f24", "--muted": "#5d6570", "--grid": "#e3e6ea", "--surface": "#ffffff"}
DARK = {"--fg": "#e8eaed", "--muted": "#a0a8b2", "--grid": "#2f353d", "--surface": "#191d22"}
BASELINES = ("standard", "diff_v2")
SMOOTHING = 5
"""Logged steps in the running mean of the training loss."""


def draw_gaps(axes: Axes, comparison: Comparison) -> None:
    """Each row's paired gap with its 95% interval."""
    rows = comparison.rows[::-1]
    for y, row in enumerate(rows):
        gap = row.gap or Estimate(0.0)
        if gap.low is not None and gap.high is not None:
            axes.plot((gap.low, gap.high), (y, y), color="tab:blue", linewidth=2)
        axes.plot(gap.mean, y, "o", color="tab:blue" if row.gap else "black")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_xlabel(f"held-out loss minus {comparison.baseline}'s, nats a token")


def draw_losses(axes: Axes, comparison: Comparison) -> None:
    """Training loss, mean over seeds, against tokens."""
    for i, row in enumerate(comparison.rows):
        band = band_of(row, lambda run: smoothed(run.series("train/loss"), SMOOTHING))
        if band is not None:
            late = band.x >= band.x[-1] / 4
            axes.plot(band.x[late], band.mean[late], label=row.label, color=f"C{i}", linewidth=1.2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("training loss, nats a token")
    axes.legend(fontsize=7, frameon=False)


def with_interval(estimate: Estimate | None, sign: str = "") -> str:
    """-0.012 (-0.020 to -0.004)."""
    if estimate is None:
        return "baseline"
    text = f"{estimate.mean:{sign}.3f}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({estimate.low:{sign}.3f} to {estimate.high:{sign}.3f})"


def table_row(row: Row, other: Row) -> str:
    """One line of the page's table; `other` is the same row with gaps to diff_v2."""
    v = row.values
    cells = [
        f"`{row.label}`",
        f"{v['parameters'] / 1e6:.3f}M",
        with_interval(row.loss),
        with_interval(row.gap, "+"),
        with_interval(other.gap, "+"),
        f"{v['spikes/loss_total']:.1f} / {v['spikes/grad_total']:.1f}",
        f"{v['train/grad_norm']:.1f}",
        f"{v['hidden_top1']:.1f} / {v['hidden_kurtosis']:.1f}",
        f"{v['context_rms_min']:.3f} to {v['context_rms_max']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def draw_picture() -> None:
    """The gaps to standard as the report draws them, as a file that follows the reader's theme."""
    with open(RESULTS / "report.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["gap"]]
    lines.sort(key=lambda line: float(line["gap"]))
    rows = [Row(line["variant"], {"attention": line["variant"]}, []) for line in lines]
    gaps = [
        Estimate(*(float(line[f"gap{end}"]) for end in ("", "_low", "_high")), 3) for line in lines
    ]
    styles = row_styles(rows)
    across = "held-out loss minus standard's, nats a token"
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure = draw_gaps_of_report(gaps, styles, PICTURE_WIDTH, across)
        svg = to_svg(figure, "gaps", styles, "Held-out loss minus standard's, with 95% intervals")
    light = {f"--r{style.index}": style.light for style in styles} | LIGHT
    dark = {f"--r{style.index}": style.dark for style in styles} | DARK
    for names in (light, dark):  # a lone row of a variant has its hue unmixed
        names |= {key: re.sub(r".*?(#\w{6}).*", r"\1", value) for key, value in names.items()}
    rules = [";".join(f"{key}:{value}" for key, value in names.items()) for names in (light, dark)]
    style = (
        f"<style>:root{{{rules[0]}}}@media(prefers-color-scheme:dark){{:root{{{rules[1]}}}}}"
        "text{font:12px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}</style>"
        '<rect x="-10" y="-8" width="100%" height="100%" rx="6" fill="var(--surface)"/>'
    )
    start = svg.index(">") + 1
    head = svg[: start - 1].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    width, height = (round(side * 72) for side in figure.get_size_inches())
    head = re.sub(r'width=.*?viewBox="[^"]*"', "", head)
    head += f' width="{width + 20}" height="{height + 16}"'
    head += f' viewBox="-10 -8 {width + 20} {height + 16}"'
    PICTURE.write_text(f"{head}>{style}{svg[start:]}\n")
    print(PICTURE)


def main() -> None:
    paths = [Path(word) for word in sys.argv[1:]]
    if not paths:
        draw_picture()
        return
    matplotlib.rcParams["svg.hashsalt"] = "compare_small"
    RESULTS.mkdir(parents=True, exist_ok=True)
    comparisons = [read(paths, baseline)[0] for baseline in BASELINES]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, comparison in zip(figure.subplots(1, 2, sharey=True), comparisons, strict=True):
        draw_gaps(axes, comparison)
    figure.savefig(RESULTS / "gaps.svg", metadata={"Date": None})
    figure = Figure(figsize=(8, 4), layout="constrained")
    draw_losses(figure.subplots(), comparisons[0])
    figure.savefig(RESULTS / "losses.svg", metadata={"Date": None})
    (RESULTS / "report.csv").write_text(csv_text(comparisons[0]))
    (RESULTS / "report_diff_v2.csv").write_text(csv_text(comparisons[1]))
    for row, other in zip(comparisons[0].rows, comparisons[1].rows, strict=True):
        print(table_row(row, other))
    for note in comparisons[0].notes:
        print(note)


if __name__ == "__main__":
    main()
