"""The committed files of experiment=compare_small, from the runs of its sweep.

    python train.py -m experiment=compare_small run.sweep=compare_small
    python benchmarks/compare_small.py outputs/compare_small

Writes report.csv (gaps to standard), report_diff_v2.csv (gaps to diff_v2), gaps.svg and losses.svg
into benchmarks/results/compare_small/, and prints the table of that folder's page.
"""

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffllm.report.bands import band_of, smoothed
from diffllm.report.comparison import Comparison, read
from diffllm.report.rows import Row
from diffllm.report.table import csv_text
from diffllm.statistics.intervals import Estimate

RESULTS = Path(__file__).parent / "results" / "compare_small"
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


def main() -> None:
    paths = [Path(word) for word in sys.argv[1:]]
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
