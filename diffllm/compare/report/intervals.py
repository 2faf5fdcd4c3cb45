"""The figure of gaps: each with its 95% interval, on one scale, better to the left."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from diffllm.compare.report.drawing import ROUND
from diffllm.compare.report.numbers import with_minus
from diffllm.compare.report.style import (
    FOREGROUND,
    HEIGHT,
    SURFACE,
    WIDTH,
    RowStyle,
    new_figure,
    shortened,
)
from diffllm.statistics.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN, LINE = 60, 26
"""Pixels above and below all gaps, and of a gap."""
NAME = 22
"""Characters of a label that are shown; the sentences beside the figure have the others."""
OUTLYING = 4
"""Times the median reach of a gap and its interval that the scale of all goes to at most."""


def draw_gaps(
    gaps: list[Estimate],
    styles: list[RowStyle],
    width: float = WIDTH,
    across: str = "nats a token",
    hollow: Sequence[bool] = (),
    sides: tuple[str, str] = ("better", "worse"),
) -> "Figure":
    """Gaps and their intervals from top to bottom; an arrow where one goes on beyond the scale.

    Args:
        gaps: one or more.
        styles: of their rows.
        across: the name of the scale.
        hollow: whose mean is drawn as a ring; nobody's if empty.
        sides: the meaning of gaps below 0 and above it.
    """
    figure = new_figure(width, max(MARGIN + LINE * len(gaps), HEIGHT))
    axes = figure.subplots()
    low, high = scale_limits(gaps)
    axes.set(xlim=(low, high), ylim=(len(gaps) - 0.4, -0.6))
    axes.axvline(0, color=FOREGROUND, linewidth=1, zorder=1)
    rings = hollow or [False] * len(gaps)
    for y, (gap, style, ring) in enumerate(zip(gaps, styles, rings, strict=True)):
        colour = style.colour
        if gap.low is not None and gap.high is not None:
            first, last = max(gap.low, low), min(gap.high, high)
            axes.plot((first, last), (y, y), lw=2.4, solid_capstyle="butt", color=colour)
            for end, beyond, arrow in ((low, gap.low < low, "<"), (high, gap.high > high, ">")):
                if beyond:
                    axes.plot(end, y, arrow, markersize=7, clip_on=False, color=colour)
        fill = SURFACE if ring else colour
        axes.plot(gap.mean, y, "o", ms=7, mew=1.8, color=colour, markerfacecolor=fill)
    axes.set_yticks(range(len(gaps)), [shortened(style.label, NAME) for style in styles])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=max(3, int(width / 90)), steps=ROUND)
    axes.xaxis.set_major_formatter(lambda x, _: with_minus(f"{x:+g}" if x else "0"))
    axes.set_title(f"← {sides[0]}" if low < 0 else "", loc="left")
    axes.set_title(f"{sides[1]} →" if high > 0 else "", loc="right")
    axes.set_xlabel(across, loc="right")
    return figure


def scale_limits(gaps: list[Estimate]) -> tuple[float, float]:
    """The scale: 0, a margin on either side of it, and all intervals, unless some lie far out.

    By the gaps over the most seeds, since an interval of two alone is many times as wide, and
    without outliers among them.
    """
    most = max(gap.seeds for gap in gaps)
    bounds = [
        [x for x in (gap.mean, gap.low, gap.high) if x is not None]
        for gap in gaps
        if gap.seeds == most
    ]
    reaches = [max(map(abs, each)) for each in bounds]
    limit = OUTLYING * float(np.median(reaches)) or 1.0
    within = [x for each in bounds for x in each if abs(x) <= limit]
    within += [np.clip(x, -limit, limit) for each in bounds for x in each if abs(x) > limit]
    within += [gap.mean for gap in gaps if abs(gap.mean) <= limit]
    low, high = min(0.0, *within), max(0.0, *within)
    margin = 0.12 * (high - low) or 1.0
    return low - margin, high + margin
