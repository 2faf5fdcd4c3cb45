"""A comparison as one HTML file that needs nothing else: no network and no scripts."""

import os
from pathlib import Path
from typing import NamedTuple

from diffllm.compare.report.bands import POINTS
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.evaluations import LEVEL
from diffllm.compare.report.gap_statistics import (
    documents_text,
    family,
    gap_table,
    holm_sentence,
    pairing_text,
)
from diffllm.compare.report.groups import in_short
from diffllm.compare.report.notes import runs_summary, settings
from diffllm.compare.report.numbers import fixed, percent
from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run
from diffllm.compare.report.sections import sections
from diffllm.compare.report.style import RC, RowStyle, row_styles
from diffllm.compare.report.table import (
    cost_columns,
    cost_table,
    csv_text,
    fold_constant,
    grid_table,
    groups_table,
    named,
    reaching_table,
    runs_table,
    score_table,
    table_columns,
)
from diffllm.compare.report.text import apart_text, finding
from diffllm.config.help import variant_line
from diffllm.core.errors import ConfigError, printable
from diffllm.core.files import replace_file
from diffllm.core.printing import KEPT, Column, Table

FEW, MOST = 8, 12
"""Sentences that always stand on the first screen, and at most."""


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
    import matplotlib
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("diffllm.compare.report", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    rows = comparison.rows
    runs = [run for row in rows for run in row.runs]
    styles = row_styles(rows)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        first, others = sections(comparison, styles, hidden(comparison))
    every = table_columns(comparison)
    columns, constant = fold_constant(every)
    groups = comparison.groups if len(comparison.groups) > 1 else []
    return environment.get_template("page.html.jinja").render(
        comparison=comparison,
        summary=runs_summary(rows),
        apart=apart_text(comparison) if groups else "",
        apart_table=groups_table(groups) if groups else None,
        findings=findings(comparison, styles),
        open=findings_in_the_open(comparison),
        settings=settings(rows),
        gaps=sum(row.gap is not None for row in rows),
        holm=holm_sentence(rows),
        tests=gap_table(rows, styles),
        family=len(family(rows)),
        pairing=pairing_text(rows),
        documents=documents_text(rows),
        hidden=hidden(comparison),
        results=Table([Column("Row", named(rows, styles)), *columns]),
        meanings=[*every, *cost_columns(comparison)],
        constant=constant,
        first=first,
        costs=cost_table(comparison),
        sections=others,
        score_table=score_table,
        grid_table=grid_table,
        fixed=fixed,
        reaching=reaching_table(rows),
        level=percent(LEVEL),
        texts=texts(rows, styles),
        runs=runs_table(rows, os.path.commonpath([run.path.absolute().parent for run in runs])),
        several=len(runs) > len(rows),
        points=POINTS,
    )


class Finding(NamedTuple):
    """A row in a sentence, and what its variant is."""

    style: RowStyle
    sentence: str
    about: str
    group: str
    """The keys that tell its group from others, before the group's first row."""


def findings(comparison: Comparison, styles: list[RowStyle]) -> list[Finding]:
    """A sentence a row; a variant is explained once."""
    bases = [row.baseline for row in comparison.rows if row.baseline is not None]
    groups = comparison.groups if len(comparison.groups) > 1 else []
    heads = {id(group.rows[0]): f"{group.letter}: {in_short(group, 100)}" for group in groups}
    explained: set[str] = set()
    found = []
    for row, style in zip(comparison.rows, styles, strict=True):
        about = "" if row.keys["attention"] in explained else about_variant(row.runs[0])
        explained.add(row.keys["attention"])
        found.append(Finding(style, finding(row, bases), about, heads.get(id(row), "")))
    return found


def findings_in_the_open(comparison: Comparison) -> int:
    """How many sentences stand unfolded: all of a few, else those of the first group."""
    if len(comparison.rows) <= FEW:
        return len(comparison.rows)
    return min(len(comparison.groups[0].rows), MOST) if hidden(comparison) else MOST


def about_variant(run: Run) -> str:
    """The line that explains the run's variant: as it was when it ran, if its run.json has it."""
    said = run.facts.get("variant_line")
    return said if isinstance(said, str) else variant_line(run.variant, run.cfg.model.attention)


def hidden(comparison: Comparison) -> set[int]:
    """Rows that the figures leave out: those of other groups than the first, where that has
    something to compare."""
    groups = comparison.groups
    if len(groups) < 2 or not any(row.gap for row in groups[0].rows):
        return set()
    return {i for i, row in enumerate(comparison.rows) if row.group != groups[0].letter}


class Text(NamedTuple):
    """A sample of a row's text."""

    style: RowStyle
    seed: int
    sample: str


def texts(rows: list[Row], styles: list[RowStyle]) -> list[Text]:
    """A sample of every row whose first finished run left one."""
    found = []
    for row, style in zip(rows, styles, strict=True):
        for run in row.finished[:1]:
            sample = (run.summary or {}).get("sample")
            if isinstance(sample, str) and sample.strip():
                found.append(Text(style, run.cfg.seed, printable(sample.strip("\n"), KEPT)))
    return found
