"""A comparison as one HTML file that needs nothing else: no network, no scripts to be readable."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from diffllm.report.bands import POINTS
from diffllm.report.comparison import Comparison, Row
from diffllm.report.numbers import compact, fixed, number
from diffllm.report.runs import Run
from diffllm.report.sections import sections
from diffllm.report.style import RC, row_styles
from diffllm.report.table import table_columns


@dataclass(frozen=True)
class RunLine:
    """A run in the list at the end of the page."""

    label: str
    seed: int
    path: str
    tokens: str
    loss: str
    state: str


def page(comparison: Comparison) -> str:
    """The whole page; equal comparisons give equal bytes."""
    environment = Environment(
        loader=PackageLoader("diffllm.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["breakable"] = breakable
    styles = row_styles(comparison.rows)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figures = sections(comparison, styles)
        table = table_columns(comparison, styles)
    return environment.get_template("page.html.jinja").render(
        comparison=comparison,
        summary=summary(comparison),
        styles=styles,
        columns=table,
        sections=figures,
        several=any(len(row.runs) > 1 for row in comparison.rows),
        runs=run_lines(comparison.rows),
        points=POINTS,
    )


def breakable(label: str) -> Markup:
    """A name that may go on in a new line after each underscore."""
    return Markup(escape(label).replace("_", Markup("_<wbr>")))


def summary(comparison: Comparison) -> str:
    """What was run, without a verdict."""
    rows = comparison.rows
    runs = [run for row in rows for run in row.runs]
    if not runs:
        return "No runs."
    if len(runs) == 1:
        parts = ["One run"]
    else:
        count = f"{len(rows)} rows" if len(rows) > 1 else rows[0].label
        each = span([float(len(row.runs)) for row in rows], "seed", "seeds")
        parts = [f"{count} × {each}: {len(runs)} runs"]
    for name, what in (("tokens", "tokens a run"), ("parameters", "parameters")):
        found = [number(row.values.get(name)) for row in rows]
        known = [x for x in found if x is not None]
        if known:
            parts.append(span(known, what, what))
    for group in ("model", "data"):
        chosen = sorted({run.cfg.run.choices[group] for run in runs})
        parts.append(f"{group} {', '.join(chosen)}")
    return "; ".join(parts) + "."


def span(values: list[float], one: str, many: str) -> str:
    """One number or a range, with its noun."""
    low, high = compact(min(values)), compact(max(values))
    return f"{low if low == high else f'{low} to {high}'} {one if high == '1' else many}"


def run_lines(rows: list[Row]) -> list[RunLine]:
    """Every run; paths relative to the folder that holds all of them."""
    parents = [run.path.absolute().parent for row in rows for run in row.runs]
    root = Path(os.path.commonpath(parents)) if parents else Path()
    return [
        RunLine(
            label=row.label,
            seed=run.cfg.seed,
            path=os.path.relpath(run.path.absolute(), root),
            tokens=compact(last(run, "tokens")),
            loss=fixed(last(run, "eval/loss")),
            state="finished" if run.summary is not None else "unfinished",
        )
        for row in rows
        for run in row.runs
    ]


def last(run: Run, name: str) -> Any:
    """The value in the last line that has it."""
    return next((line[name] for line in reversed(run.lines) if name in line), None)
