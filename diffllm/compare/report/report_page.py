"""HTML page and CSV file of a comparison."""

from collections.abc import Sequence
from pathlib import Path

from diffllm.compare.arms.arm import runs_of
from diffllm.compare.arms.comparability import Difference
from diffllm.compare.arms.heldout import thin_note
from diffllm.compare.arms.pages import (
    Block,
    Details,
    Figure,
    FigureGrid,
    Glossary,
    Item,
    Items,
    Notice,
    Page,
    Paragraph,
    Section,
    TableBlock,
)
from diffllm.compare.arms.run import Run
from diffllm.compare.arms.sentences import fixed
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.differences import differences_table, row_settings_table, settings
from diffllm.compare.report.evaluations import Evaluated
from diffllm.compare.report.figures import RC
from diffllm.compare.report.notes import reading_terms, runs_summary
from diffllm.compare.report.page_tables import (
    cost_columns,
    gap_table,
    groups_table,
    runs_table,
    score_table,
    unplanned_sentences,
)
from diffllm.compare.report.results import (
    few_seeds_note,
    finding,
    has_gaps,
    has_intervals,
    holm_sentence,
    loss_interval,
    pairing_note,
    tested_rows,
)
from diffllm.compare.report.rows import Row, apart_text, in_short
from diffllm.compare.report.sections import page_sections
from diffllm.compare.report.styles import RowStyle, row_styles
from diffllm.compare.report.tables import csv_text, fold_constant, table_columns
from diffllm.config.help import variant_line
from diffllm.core.errors import ConfigError, printable
from diffllm.core.files import replace_file
from diffllm.core.printing import KEPT, Cell, Table, TableColumn
from diffllm.core.run_files import RunFile

OPEN_ROWS = 12
"""Largest number of rows whose results are not folded."""
OPEN_EVALUATIONS = 8
OPEN_NOTES = 4


def write_page(comparison: Comparison, directory: Path | None) -> tuple[Path, Path]:
    """Write report.html and report.csv into `directory`, and return the paths of both files.

    Raises ConfigError if `directory` is None or cannot be written.
    """
    directory = required(directory)
    # Both texts are complete before a file is replaced: an error keeps the earlier report.
    html = page(comparison).encode()
    table = csv_text(comparison.rows).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / RunFile.REPORT_PAGE, html)
        replace_file(directory / RunFile.REPORT_TABLE, table)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {directory}: {error.strerror}; "
            "choose another directory with out=DIR"
        ) from error
    return directory / RunFile.REPORT_PAGE, directory / RunFile.REPORT_TABLE


def required(directory: Path | None) -> Path:
    if directory is None:
        raise ConfigError(
            "the runs have no common directory for the report; choose a directory with out=DIR"
        )
    return directory


def page(comparison: Comparison) -> str:
    """Return the HTML page of a comparison; equal comparisons give identical pages."""
    import matplotlib

    rows = comparison.rows
    # Curves of rows that cannot be compared would suggest a comparison.
    hides_groups = len(comparison.groups) > 1 and has_gaps(comparison.groups[0].rows)
    styles = row_styles(rows)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figures = page_sections(comparison, styles, hides_groups)
    first_figures, figure_sections, cost_figures = figures
    blocks = header(comparison, styles, hides_groups)
    if first_figures:
        blocks.append(FigureGrid(first_figures))
    sections = [results_section(comparison, styles)]
    if comparison.evaluated:
        sections.append(evaluations_section(comparison))
    sections += cost_sections(comparison, cost_figures)
    sections += figure_sections
    samples = sample_texts(rows, styles)
    if samples:
        sections.append(Section("Text", [Paragraph(SAMPLES), FigureGrid(samples)]))
    values = Glossary([*settings(rows).items()], "terms short")
    sections.append(Section("Settings", [values]))
    is_single = len(rows) == 1 and len(rows[0].runs) == 1
    runs = Details("Runs", [TableBlock(runs_table(rows), "Runs")], level=2, is_open=is_single)
    sections.append(Section("", [runs]))
    columns = [*table_columns(rows, comparison.baseline), *cost_columns(rows)]
    meanings = Glossary([(column.head, column.meaning) for column in columns])
    details = Details("Columns of the tables", [meanings], level=2)
    sections.append(Section("", [details]))
    footer = Section("How to read this", [Glossary(reading_terms(rows))])
    return Page(comparison.title, blocks, sections, footer).html()


COSTS = (
    "A variant may need more FLOPs or more time per token. Gaps at equal FLOPs and equal seconds "
    "compare final losses of runs whose costs differ by at most 3%. A loss in the middle of a run "
    "is not compared, because the learning rate has not decayed."
)
SAMPLES = (
    "Text sampled from one seed per row at the end of training. These samples do not show "
    "differences between variants."
)


def header(comparison: Comparison, styles: list[RowStyle], hides_groups: bool) -> list[Block]:
    """Return the result of each row, with warnings.

    Args:
        hides_groups: whether figures show only the first group of rows.
    """
    rows, groups = comparison.rows, comparison.groups
    blocks: list[Block] = [Paragraph(runs_summary(rows), style="summary")]
    if len(groups) > 1:
        blocks.append(groups_notice(comparison, hides_groups))
    open_rows = min(len(groups[0].rows), OPEN_ROWS) if hides_groups else OPEN_ROWS
    items = findings(comparison, styles)
    blocks.append(Items(items[:open_rows], "findings"))
    more_items = items[open_rows:]
    if more_items:
        title = f"{len(more_items)} more rows"
        blocks.append(Details(title, [Items(more_items, "findings")], level=0))
    texts = []
    significance = holm_sentence(rows)
    if significance:
        texts.append(significance)
    for warning in comparison.warnings:
        texts.append(f"Warning: {warning}")
    for note in (few_seeds_note(rows), thin_note(runs_of(rows))):
        if note:
            texts.append(f"Warning: {note}.")
    for text in texts:
        blocks.append(Paragraph(text, style="holm"))
    return blocks


def groups_notice(comparison: Comparison, hides_groups: bool) -> Notice:
    groups = comparison.groups
    figures = "; figures show only the first group" if hides_groups else ""
    reason = apart_text(groups, comparison.differences)
    warning = Paragraph(f"{reason}. Gaps between groups are not measured{figures}.")
    table = TableBlock(groups_table(groups), "Differences", "cards matrix always")
    return Notice("Not comparable", [warning, Details("Differences", [table], level=0)])


def findings(comparison: Comparison, styles: list[RowStyle]) -> list[Item]:
    """Return the result of each row.

    The first row of a variant also describes the variant, and the first row of a group the group.
    """
    groups = comparison.groups if len(comparison.groups) > 1 else []
    headings: dict[Row, str] = {}
    for group in groups:
        headings[group.rows[0]] = f"{group.letter}: {in_short(group, 100)}"
    described: set[str] = set()
    items = []
    for row, style in zip(comparison.rows, styles, strict=True):
        run = row.runs[0]
        description = "" if run.variant in described else described_variant(run)
        described.add(run.variant)
        items.append(Item(finding(row), style.swatch, description, headings.get(row, "")))
    return items


def described_variant(run: Run) -> str:
    """Return the line about the variant as written at the start of the run, or a new line."""
    recorded = run.facts.get("variant_line")
    if isinstance(recorded, str) and recorded:
        return recorded
    return variant_line(run.variant, run.cfg.model.attention)


def folded(table: Table, label: str, style: str = "cards", key: str = "") -> list[Block]:
    """Return a table without its constant columns, and a paragraph that states their values."""
    short_table, sentences = fold_constant(table)
    blocks: list[Block] = [TableBlock(short_table, label, style, key)]
    if sentences:
        blocks.append(aside(" ".join(sentences)))
    return blocks


def aside(text: str) -> Paragraph:
    return Paragraph(text, style="aside")


def results_section(comparison: Comparison, styles: list[RowStyle]) -> Section:
    rows, notes = comparison.rows, comparison.notes
    labels = [Cell(style.label, icon=style.swatch) for style in styles]
    columns = table_columns(rows, comparison.baseline)
    results = Table([TableColumn("Row", labels), *columns])
    style = "cards" if len(rows) > 1 else "cards always"
    blocks = folded(results, "Results", style, "main")
    pairing = pairing_note(rows, "Intervals", loss_interval)
    if pairing:
        blocks.append(aside(pairing))
    tests = gap_table(rows, styles)
    if tests:
        title = "Statistics of the gaps"
        explained = [*folded(tests, title, key="tests"), aside(tests_text(rows))]
        blocks.append(Details(title, explained, style="tests"))
    if notes:
        is_open = len(notes) <= OPEN_NOTES
        blocks.append(
            Details(f"Notes ({len(notes)})", [Items(notes)], is_open=is_open, style="box")
        )
    if comparison.row_differences:
        blocks.append(differences_details(rows, comparison.row_differences))
    return Section("Results", blocks, key="results")


def differences_details(rows: list[Row], differing: list[Difference]) -> Details:
    title = "Differences between these rows"
    row_table = row_settings_table(rows, differing)
    blocks = [
        TableBlock(differences_table(differing), title, "cards matrix"),
        TableBlock(row_table, "Settings of each row", "cards matrix"),
        aside(
            "Conditions must agree in compared rows. Rows may differ in allowed keys. "
            "Harmless keys change the held-out loss at most by rounding."
        ),
    ]
    return Details(f"{title} ({len(differing)})", blocks, style="tests")


def tests_text(rows: list[Row]) -> str:
    family = len(tested_rows(rows))
    reasons: dict[str, None] = {}
    for row in rows:
        if row.outcome and row.outcome.no_documents:
            reasons[row.outcome.no_documents] = None
    missing = "; ".join(reasons)
    sentences = ["All p values are two-sided and use runs with a finite final loss."]
    if family > 1:
        sentences.append(
            f"Holm's correction covers all gaps of this page that have a test: {family}."
        )
    sentences.append(
        "Pairing removes the effect of the seed but halves the degrees of freedom, so the paired "
        "and the unpaired test can disagree."
    )
    if missing:
        sentences.append(f"An interval over documents and seeds is missing: {missing}.")
    return " ".join(sentences)


def evaluations_section(comparison: Comparison) -> Section:
    rows = comparison.rows
    intro = "Results of `diffllm evaluate` for each run's newest evaluated checkpoint"
    if has_intervals(rows):
        intro += ": means over seeds with 95% intervals"
        if comparison.baseline:
            intro += f", and gaps to {comparison.baseline} paired by seed"
        intro += (
            ". Student's t intervals of shares are limited to the possible values. An interval "
            "that contains all possible values is uninformative"
        )
    intro += (
        ". Rows without an evaluation are omitted. A share of a single seed has Wilson's interval "
        "over examples, which does not include the variation between seeds. Tables by facts of "
        "the examples omit Wilson's interval."
    )
    blocks: list[Block] = [Paragraph(intro)]
    for i, evaluated in enumerate(comparison.evaluated):
        blocks.append(evaluation_details(evaluated, rows, i < OPEN_EVALUATIONS))
    return Section("Evaluations", blocks, key="evaluations")


def evaluation_details(evaluated: Evaluated, rows: list[Row], is_open: bool) -> Details:
    name = evaluated.name
    blocks: list[Block] = [TableBlock(score_table(name, evaluated.lines, rows), name)]
    if evaluated.parts:
        by_facts = score_table(f"{name} by facts", evaluated.parts, rows)
        facts = TableBlock(by_facts, f"{name} by facts")
        blocks.append(Details(f"{name} by facts of the examples", [facts], level=0))
    if evaluated.equal:
        title = f"{name} at equal loss"
        equal: Sequence[Block] = [
            Paragraph(
                f"At {fixed(evaluated.loss, 3)} nats per token of the held-out sample, the lowest "
                "loss that all evaluated runs reached. Scores are interpolated linearly between "
                "the checkpoints before and after this loss."
            ),
            TableBlock(score_table(title, evaluated.equal, rows), title),
        ]
        blocks.append(Details(title, equal, level=0))
    title = f"{name}, {evaluated.unit}"
    return Details(title, blocks, is_open=is_open, style="evaluation")


def cost_sections(comparison: Comparison, figures: list[Figure]) -> list[Section]:
    """Return the section of gaps at equal cost; [] if no row has such a gap."""
    rows = [row for row in comparison.rows if row.equal]
    if not rows:
        return []
    title = "At equal cost"
    introduction = Paragraph(" ".join([COSTS, *unplanned_sentences(rows)]))
    labels = [Cell(row.label) for row in rows]
    names = TableColumn(f"Gap to {comparison.baseline}", labels)
    table = Table([names, *cost_columns(rows)])
    blocks = [introduction, *folded(table, title), FigureGrid(figures)]
    return [Section(title, blocks)]


def sample_texts(rows: list[Row], styles: list[RowStyle]) -> list[Figure]:
    """Return the text that the first finished run of each row has generated."""
    figures = []
    for row, style in zip(rows, styles, strict=True):
        for run in row.finished[:1]:
            sample = (run.summary or {}).get("sample")
            if isinstance(sample, str) and sample.strip():
                # A model can generate control characters, which HTML does not allow.
                text = printable(sample.strip("\n"), KEPT)
                figures.append(Figure(style.label, text=text))
    return figures
