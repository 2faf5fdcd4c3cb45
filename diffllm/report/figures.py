"""Cards of the page: a drawing with a title and a caption, or nothing where there is no data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diffllm.report.bands import Band, at_end, band_of
from diffllm.report.comparison import Comparison
from diffllm.report.curves import draw_curves, draw_layers
from diffllm.report.heatmaps import draw_bar, draw_map, maps_of
from diffllm.report.numbers import short
from diffllm.report.runs import Run, Series
from diffllm.report.style import RowStyle, to_svg


@dataclass(frozen=True)
class Panel:
    """One map among several."""

    style: RowStyle
    svg: str


@dataclass(frozen=True)
class Figure:
    """A card of the page: one drawing, or a panel a row under a shared colour bar."""

    name: str
    """Its title has the id `name`-title."""
    title: str
    caption: str
    svg: str
    panels: list[Panel] = field(default_factory=list)

    @property
    def abreast(self) -> int:
        """Panels side by side where there is room, so that few places stay empty."""
        n = len(self.panels)
        return min(range(min(n, 3), 6), key=lambda columns: (-n % columns, -columns), default=1)


class Figures:
    """Draws the figures of one comparison."""

    def __init__(self, comparison: Comparison, styles: list[RowStyle]):
        self.rows, self.styles = comparison.rows, styles
        self.several = any(len(row.runs) > 1 for row in self.rows)
        self.count = 0

    def over_tokens(self, pick: Callable[[Run], Series]) -> list[Band | None]:
        """A series of every run, by row."""
        return [band_of(row, pick) for row in self.rows]

    def metric(self, name: str) -> list[Band | None]:
        """A metric by its full name, by row."""
        return self.over_tokens(lambda run: run.series(name))

    def curves(
        self,
        title: str,
        caption: str,
        bands: list[Band | None],
        unit: str,
        log: bool = False,
        top: float | None = None,
        **how: Any,
    ) -> Iterator[Figure]:
        """One figure over tokens, if there is a value other than 0."""
        drawn = values_of(bands)
        if not drawn.any():
            return
        log = log and drawn.max() > 0
        if top is not None:
            highest = float(drawn.max())
            top = top if highest > top else None
            if top is not None:
                caption += f" The scale ends at {short(top)}; values go to {short(highest)}."
        drawing = draw_curves(bands, self.styles, unit, log=log, top=top, **how)
        name = self.next_name()
        yield Figure(name, title, caption + scale(drawn, log), to_svg(drawing, name, self.styles))

    def layers(
        self, title: str, caption: str, quantity: str, unit: str, log: bool = False, **how: Any
    ) -> Iterator[Figure]:
        """One figure over layers, if there is a value other than 0."""
        bands = [at_end(row, quantity) for row in self.rows]
        drawn = values_of(bands)
        if not drawn.any():
            return
        log = log and drawn.max() > 0
        drawing = draw_layers(bands, self.styles, unit, log=log, **how)
        name = self.next_name()
        yield Figure(name, title, caption + scale(drawn, log), to_svg(drawing, name, self.styles))

    def maps(self, title: str, caption: str, quantity: str) -> Iterator[Figure]:
        """A panel for every row that logged it."""
        maps = maps_of(self.rows, quantity)
        if maps is None:
            return
        panels = []
        for style, values in zip(self.styles, maps.values, strict=True):
            if values is not None and np.isfinite(values).any():
                label = f"{title}: {style.label}. {ends(values)}"
                drawing = draw_map(values, maps)
                panels.append(Panel(style, to_svg(drawing, self.next_name(), self.styles, label)))
        if not panels:
            return
        kind = maps.scale.kind
        colour = f"colour on {kind}" if maps.scale.colours == "viridis" else kind
        shared = ", the same in all panels" if len(panels) > 1 else ""
        several = " Mean over a row's seeds, as far as all of them got." if self.several else ""
        name = self.next_name()
        bar = to_svg(draw_bar(maps), name, self.styles)
        yield Figure(name, title, f"{caption} {colour.capitalize()}{shared}.{several}", bar, panels)

    def next_name(self) -> str:
        self.count += 1
        return f"f{self.count}"


def values_of(bands: list[Band | None]) -> np.ndarray:
    """All that a figure shows."""
    return np.concatenate([np.zeros(0), *(band.drawn for band in bands if band is not None)])


def scale(drawn: np.ndarray, log: bool) -> str:
    """A sentence about a logarithmic scale."""
    if not log:
        return ""
    left_out = "; values that are not above 0 leave a gap" if drawn.min() <= 0 else ""
    return f" Logarithmic scale{left_out}."


def ends(values: np.ndarray) -> str:
    """A map in words: its range at the first and last logged time."""
    logged = np.flatnonzero(np.isfinite(values).any(axis=0))
    first, last = (values[:, i][np.isfinite(values[:, i])] for i in (logged[0], logged[-1]))
    return (
        f"From {short(first.min())} to {short(first.max())} over layers at first, "
        f"from {short(last.min())} to {short(last.max())} at last."
    )
