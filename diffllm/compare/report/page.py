"""Outputs of a comparison: an HTML page, a text for the terminal, and a wandb run."""

import os
import re
from contextlib import suppress
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from diffllm.compare.arms.sentences import (
    MISSING,
    ascii_minus,
    compact,
    fixed,
    with_interval,
)
from diffllm.compare.report import differences, tables
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.curves import POINTS, rows_of_gaps, sample_gaps, seed_noise
from diffllm.compare.report.figures import RC, RowStyle, row_styles
from diffllm.compare.report.notes import (
    COMPUTE_OPTIMAL,
    heldout_text,
    is_early,
    runs_summary,
    settings,
    thin_note,
    training_length,
)
from diffllm.compare.report.results import (
    divergence,
    few_seeds_note,
    finding,
    has_intervals,
    holm_sentence,
    loss_interval,
    pairing_note,
    tested_rows,
)
from diffllm.compare.report.rows import Row, apart_text, in_short
from diffllm.compare.report.sections import page_sections
from diffllm.compare.report.tables import (
    cost_columns,
    csv_text,
    table_columns,
    unplanned_note,
)
from diffllm.compare.report.trends import trend_sentences
from diffllm.config.help import variant_line
from diffllm.core.errors import CheckpointError, ConfigError, printable
from diffllm.core.files import replace_file, write_atomic
from diffllm.core.names import directory_name
from diffllm.core.printing import KEPT, Cell, Table, TableColumn, to_stderr
from diffllm.metrics.wandb_directories import is_synced, wandb_parent
from diffllm.metrics.wandb_run import (
    WandbRun,
    resolve_mode,
    with_defaults,
    with_recorded,
)
from diffllm.metrics.wandb_start import new_id
from diffllm.statistics.estimates import Estimate

MOST = 12
COMPARISON = "comparison"
"""Job type and default group of the wandb run of a comparison."""
COMPARISON_ID = ".wandb-id"
"""File in a directory of runs: the id of the wandb run of their comparison."""


def write(comparison: Comparison, directory: Path | None) -> tuple[Path, Path]:
    """Write report.html and report.csv into `directory`, and return the paths of both files.

    Raises ConfigError if `directory` is None or cannot be written.
    """
    directory = required(directory)
    html, table = page(comparison).encode(), csv_text(comparison.rows).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / "report.html", html)
        replace_file(directory / "report.csv", table)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {directory}: {error.strerror}; "
            "choose another directory with out=DIR"
        ) from error
    return directory / "report.html", directory / "report.csv"


def required(directory: Path | None) -> Path:
    if directory is None:
        raise ConfigError(
            "the runs have no common directory for the report; choose a directory with out=DIR"
        )
    return directory


def page(comparison: Comparison) -> str:
    """Return the HTML page of a comparison; equal comparisons give identical pages."""
    import matplotlib

    rows, first_group, hidden = comparison.rows, comparison.groups[0], set()
    runs = [run for row in rows for run in row.runs]
    if any(row.gap for row in first_group.rows):  # Figures then omit the other groups.
        hidden = {i for i, row in enumerate(rows) if row.group != first_group.letter}
    styles = row_styles(rows)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        first, others, cost_figures = page_sections(comparison, styles, hidden)
    every = table_columns(rows, comparison.baseline)
    groups = comparison.groups if len(comparison.groups) > 1 else []
    names = TableColumn("Row", [Cell(style.label, icon=style.swatch) for style in styles])
    return template("page.html.jinja").render(
        comparison=comparison,
        tables=tables,
        differences=differences,
        summary=runs_summary(rows),
        apart=apart_text(groups, comparison.differences) if groups else "",
        groups=groups,
        findings=findings(comparison, styles),
        open=min(len(first_group.rows), MOST) if hidden else MOST,
        settings=settings(rows),
        gaps=sum(row.gap is not None for row in rows),
        holm=holm_sentence(rows),
        few_seeds=few_seeds_note(rows),
        thin=thin_note(runs),
        pairing=pairing_note(rows, "Intervals", loss_interval),
        intervals=has_intervals(rows),
        heldout=heldout_text(runs),
        early=is_early(runs),
        compute_optimal=COMPUTE_OPTIMAL,
        tests=tables.gap_table(rows, styles),
        costs=tables.cost_table(rows, comparison.baseline),
        cost_figures=cost_figures,
        unplanned=unplanned_note(rows),
        family=len(tested_rows(rows)),
        documents="; ".join(dict.fromkeys(row.no_documents for row in rows if row.no_documents)),
        hidden=hidden,
        results=Table([names, *every]),
        meanings=[*every, *cost_columns(rows)],
        first=first,
        sections=others,
        fixed=fixed,
        texts=texts(rows, styles),
        several=any(len(row.runs) > 1 for row in rows),
        points=POINTS,
    )


def template(name: str) -> Any:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    places = [PackageLoader(f"diffllm.compare.{room}", ".") for room in ("study", "report")]
    environment = Environment(
        loader=ChoiceLoader(places), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    return environment.get_template(name)


def findings(comparison: Comparison, styles: list[RowStyle]) -> list[dict[str, Any]]:
    """Return the template fields of the page's summary, one dict per report row.

    The keys are "style" (line style), "sentence" (result of the row), "about" (description of the
    variant, "" except in its first row) and "group" (description of the group, "" except in its
    first row).
    """
    groups = comparison.groups if len(comparison.groups) > 1 else []
    heads = {id(group.rows[0]): f"{group.letter}: {in_short(group, 100)}" for group in groups}
    explained: set[str] = set()
    found = []
    for row, style in zip(comparison.rows, styles, strict=True):
        run = row.runs[0]
        about: Any = ""
        if run.variant not in explained:
            explained.add(run.variant)
            about = run.facts.get("variant_line")  # as written at the start of the run
            if not isinstance(about, str) or not about:
                about = variant_line(run.variant, run.cfg.model.attention)
        group = heads.get(id(row), "")
        found.append({"style": style, "sentence": finding(row), "about": about, "group": group})
    return found


def texts(rows: list[Row], styles: list[RowStyle]) -> list[tuple[str, str]]:
    found = []
    for row, style in zip(rows, styles, strict=True):
        for run in row.finished[:1]:
            sample = (run.summary or {}).get("sample")
            if isinstance(sample, str) and sample.strip():
                found.append((style.label, printable(sample.strip("\n"), KEPT)))
    return found


WIDTH = 100
NOTES = 10


def whole_text(comparison: Comparison) -> str:
    trends = map(ascii_minus, trend_sentences(comparison.rows))
    notes = [f"note: {note}" for note in (*trends, *comparison.notes[:NOTES])]
    if more := len(comparison.notes[NOTES:]):
        notes.append(f"note: the page has {more} more notes")
    return "\n".join([table_text(comparison), *[""] * bool(notes), *notes])


def loss_table(comparison: Comparison) -> Table:
    """Return the table of mean losses and gaps, with 95% intervals."""
    rows = comparison.rows
    heads = ["", "held-out loss", f"gap to {comparison.baseline}", "seeds", "parameters"]
    shown = [i for i in range(len(heads)) if i != 2 or any(row.gap for row in rows)]
    lines = [[row_cells(row)[i] for i in shown] for row in rows]
    return Table.of([heads[i] for i in shown], lines, left=range(len(shown)))


def table_text(comparison: Comparison) -> str:
    """Return an ASCII table of mean losses and gaps, at most `WIDTH` characters wide."""
    rows, groups = comparison.rows, comparison.groups
    text = loss_table(comparison).text(WIDTH)
    runs = [run for row in rows for run in row.runs]
    if not has_intervals(rows):
        text.append("Nats per token; a single seed has no interval.")
    else:
        text.append("Nats per token, means over seeds; 95% intervals in brackets.")
        if any(row.gap and row.gap.holds_zero for row in rows):
            text.append("An interval that contains 0 shows no difference.")
        text += wrap(pairing_note(rows, "Intervals", loss_interval), WIDTH)
        text += wrap(holm_sentence(rows), WIDTH)
    warnings = [warning for warning in (few_seeds_note(rows), thin_note(runs)) if warning]
    for warning in warnings:
        text += wrap(f"warning: {warning}", WIDTH)
    if is_early(runs):
        text.append(training_length(runs))
    if lost := [f"{row.label}: {said}." for row in rows if (said := divergence(row))]:
        text += [*lost, "Losses and gaps exclude diverged runs; their share is in brackets."]
    if len(groups) > 1:
        text += ["", *wrap(f"{apart_text(groups, comparison.differences)}:", WIDTH)]
    for group in groups if len(groups) > 1 else []:
        paths = [run.path for row in group.rows for run in row.runs]
        where = paths[0] if len(paths) == 1 else os.path.commonpath([p.parent for p in paths])
        name = f"  {group.letter}  {where}: "
        text.append(name + in_short(group, max(WIDTH - len(name), 20)))
    return "\n".join(map(ascii_minus, text))


def row_cells(row: Row) -> list[str]:
    loss = with_interval(row.loss) if row.loss else MISSING
    gap = with_interval(row.gap, signed=True) if row.gap else ""
    seeds = f"{row.seeds}" if row.seeds == len(row.runs) else f"{row.seeds} of {len(row.runs)}"
    seeds += f", {row.diverged} diverged" if row.diverged else ""
    return [row.label, loss, gap, seeds, compact(row.values.get("parameters"))]


class GapRun(NamedTuple):
    """Content of the wandb run of a comparison."""

    arguments: dict[str, Any]
    """Arguments of `init_options`."""
    lines: list[dict[str, Any]]
    """Loss gaps by training tokens; the key "step" counts the lines."""
    summary: dict[str, float]


def gap_run(comparison: Comparison, directory: Path) -> GapRun | None:
    """Return the loss gap of each row to its baseline, over training tokens, as a wandb run.

    `gap/<row>` is the gap in held-out sample loss, and `gap/<row>/low` and `gap/<row>/high` are the
    ends of its 95% interval, which a single seed does not have. The summary contains the gaps of
    the report. `gap/noise_floor` is half the width of the noise floor. Return None if no row has a
    gap.
    """
    rows = [row for row in comparison.rows if row.gap]
    gaps = {row.label: gaps for row in rows if (gaps := sample_gaps(row))}
    if not gaps:
        return None
    lines: dict[int, dict[str, float]] = {}
    for label, by_tokens in gaps.items():
        for tokens, gap in by_tokens.items():
            lines.setdefault(tokens, {}).update(gap_values(label, gap))
    if floor := seed_noise(rows_of_gaps(comparison.rows)):
        for tokens, half in zip(floor.tokens.tolist(), floor.values.tolist(), strict=True):
            lines.setdefault(int(tokens), {})["gap/noise_floor"] = half
    summary = {}
    for row in rows:
        assert row.gap
        summary.update(gap_values(row.label, row.gap))
    arguments = {
        "directory": directory,
        "job_type": COMPARISON,
        "config": {"baseline": comparison.baseline, "rows": [row.label for row in comparison.rows]},
    }
    steps = []
    for step, (tokens, line) in enumerate(sorted(lines.items())):
        steps.append({"step": step, "tokens": tokens, **line})
    return GapRun(arguments, steps, summary)


def record_gaps(comparison: Comparison, directory: Path) -> bool:
    """Log the result of `gap_run` to wandb.

    Another call makes a new run if the server has the former run, because wandb cannot replace
    lines, and prints the id of the former run. Otherwise, it replaces the offline run.

    The wandb mode and project come from the config of the first run and from the variables in its
    run.json. If no row has a gap, or if wandb is disabled, log nothing and return False; otherwise
    return True.
    """
    first = comparison.rows[0].runs[0]
    cfg = with_recorded(first.cfg.wandb, first.variables)
    cfg = with_defaults(cfg, COMPARISON, [directory_name(directory)])
    gaps = gap_run(comparison, directory)
    if gaps is None or resolve_mode(cfg) == "disabled":
        return False
    run_id = comparison_id(directory)
    # `wandb sync` appends to a synced run, so an offline run then has a new id.
    was_online = is_synced(wandb_parent(directory), run_id)
    run = WandbRun(cfg, **gaps.arguments, run_id=run_id, resume=False, was_online=was_online)
    for line in gaps.lines:
        run.log(line)
    run.finish(gaps.summary)
    if run.id != run_id:
        to_stderr(f"wandb: run {run.id} has the gaps; delete the former run {run_id}")
        store_comparison_id(directory, run.id)
    return True


def gap_values(label: str, gap: Estimate) -> dict[str, float]:
    values = {f"gap/{label}": gap.mean}
    if gap.interval:
        values[f"gap/{label}/low"], values[f"gap/{label}/high"] = gap.interval
    return values


def comparison_id(directory: Path) -> str:
    """Return the id of the wandb run of the comparison in `directory`; choose and store a new id.

    An id derived from the path would not be unique: many sweeps have the same path.
    """
    if stored := stored_comparison_id(directory):
        return stored
    run_id = new_id()
    store_comparison_id(directory, run_id)
    return run_id


def store_comparison_id(directory: Path, run_id: str) -> None:
    """Store the result of later calls of `stored_comparison_id`; print a warning if this fails."""
    try:
        write_atomic(directory / COMPARISON_ID, f"{run_id}\n")
    except CheckpointError as error:
        to_stderr(f"warning: later calls will write another wandb run with the gaps: {error}")


def stored_comparison_id(directory: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        stored = (directory / COMPARISON_ID).read_text(encoding="utf-8").strip()
        if re.fullmatch(r"[0-9a-f]{8}", stored):
            return stored
    return None
