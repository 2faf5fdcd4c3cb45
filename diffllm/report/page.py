"""A comparison as one HTML file that needs nothing else: no network, no scripts to be readable."""

import os
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from diffllm.errors import ConfigError
from diffllm.files import replace_file
from diffllm.report.bands import POINTS
from diffllm.report.comparison import Comparison
from diffllm.report.notes import settings, summary
from diffllm.report.numbers import compact, fixed
from diffllm.report.rows import Row
from diffllm.report.sections import sections
from diffllm.report.style import RC, row_styles
from diffllm.report.table import csv_text, table_columns


def write(comparison: Comparison, directory: Path | None) -> tuple[Path, Path]:
    """Write report.html and report.csv, each in one step.

    Raises:
        ConfigError: `directory` is None, or cannot be written.

    Returns:
        The page and the table.
    """
    if directory is None:
        raise ConfigError("the runs share no directory of theirs; choose one with out=DIR")
    texts = {"report.html": page(comparison).encode(), "report.csv": csv_text(comparison).encode()}
    html, table = (directory / name for name in texts)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_file(directory / name, text)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}); choose another with out=DIR"
        ) from error
    return html, table


def page(comparison: Comparison) -> str:
    """The whole page; equal comparisons give equal bytes."""
    environment = Environment(
        loader=PackageLoader("diffllm.report", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters["breakable"] = breakable
    rows = comparison.rows
    styles = row_styles(rows)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figures = sections(comparison, styles)
        table = table_columns(comparison, styles)
    return environment.get_template("page.html.jinja").render(
        comparison=comparison,
        summary=summary(rows),
        settings=settings(rows),
        gaps=sum(row.gap is not None for row in rows),
        styles=styles,
        columns=table,
        sections=figures,
        several=any(len(row.runs) > 1 for row in rows),
        runs=run_lines(rows),
        points=POINTS,
    )


def breakable(label: str) -> Markup:
    """A name that may go on in a new line after each underscore."""
    return Markup(escape(label).replace("_", Markup("_<wbr>")))


def run_lines(rows: list[Row]) -> list[dict[str, Any]]:
    """Every run for the list at the end; paths relative to the folder that holds all of them."""
    parents = [run.path.absolute().parent for row in rows for run in row.runs]
    root = Path(os.path.commonpath(parents)) if parents else Path()
    return [
        {
            "label": row.label,
            "seed": run.cfg.seed,
            "path": os.path.relpath(run.path.absolute(), root),
            "tokens": compact(next(reversed(run.series("train/loss").tokens.tolist()), None)),
            "loss": fixed(next(reversed(run.series("eval/loss").values.tolist()), None)),
            "state": "unfinished" if run.summary is None else "finished",
        }
        for row in rows
        for run in row.runs
    ]
