"""A comparison as one HTML file that needs nothing else: no network, no scripts to be readable."""

import os
from pathlib import Path

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined

from diffllm.errors import ConfigError
from diffllm.files import replace_file
from diffllm.report.bands import POINTS
from diffllm.report.comparison import Comparison
from diffllm.report.notes import settings, summary
from diffllm.report.numbers import compact, fixed
from diffllm.report.sections import sections
from diffllm.report.style import RC, row_styles
from diffllm.report.table import csv_text, gap_limit, table_columns


def write(comparison: Comparison, directory: Path | None) -> tuple[Path, Path]:
    """Write report.html and report.csv, each in one step, and return their paths; raises
    ConfigError if `directory` is None or cannot be written."""
    if directory is None:
        raise ConfigError("the runs share no directory of theirs; choose one with out=DIR")
    html, table = page(comparison).encode(), csv_text(comparison).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / "report.html", html)
        replace_file(directory / "report.csv", table)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}); choose another with out=DIR"
        ) from error
    return directory / "report.html", directory / "report.csv"


def page(comparison: Comparison) -> str:
    """The whole page; equal comparisons give equal bytes."""
    environment = Environment(
        loader=PackageLoader("diffllm.report", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    rows = comparison.rows
    runs = [run for row in rows for run in row.runs]
    gaps = [row.gap for row in rows if row.gap]
    styles = row_styles(rows)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figures = sections(comparison, styles)
    return environment.get_template("page.html.jinja").render(
        comparison=comparison,
        summary=summary(rows),
        settings=settings(rows),
        gaps=len(gaps),
        gap_limit=gap_limit(gaps),
        styles=styles,
        columns=table_columns(comparison),
        sections=figures,
        several=len(runs) > len(rows),
        root=os.path.commonpath([run.path.absolute().parent for run in runs]),
        relpath=os.path.relpath,
        compact=compact,
        fixed=fixed,
        points=POINTS,
    )
