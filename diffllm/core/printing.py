"""Print the output of commands: JSON, tables, and text that may come from untrusted files."""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TextIO

from diffllm.core.errors import printable

SPACES = "\u00a0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
JOINERS = "\u00ad\u200b\u200c\u200d\u2060" + "".join(map(chr, range(0xE0020, 0xE0080)))
KEPT = f"\n\t{SPACES}{JOINERS}"
"""Characters that are safe on terminals although Python calls them unprintable: line breaks, tabs,
and the spaces, joiners and tags of written languages."""


def echo(
    text: object = "", end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print a text, to stdout by default, with unprintable characters escaped."""
    # `printable` would escape the carriage returns of Windows line ends.
    unix_text = str(text).replace("\r\n", "\n")
    print(printable(unix_text, KEPT), end=end, file=file, flush=flush)


def echo_json(content: Any) -> None:
    """Print a value as JSON; numbers that are not finite, which JSON does not have, become null."""
    print(json.dumps(finite_values(content), indent=2, allow_nan=False))


def finite_values(content: Any) -> Any:
    """Return a copy of nested dicts and lists with None in place of NaN and infinite floats."""
    if isinstance(content, dict):
        return {key: finite_values(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite_values(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def to_stderr(text: str) -> None:
    line = " ".join(part.strip() for part in text.splitlines())
    echo(line, file=sys.stderr, flush=True)


COLUMN_GAP = "  "
"""Text between two columns."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str = ""
    value: Any = None
    """Content of the cell in CSV files; None means `text`."""
    small: tuple[str, ...] = ()
    """Details after `text`, such as a confidence interval; lines in small print in HTML."""
    tag: str = ""
    """Note at the end of the cell, such as "baseline" or "not finite"."""
    icon: str = ""
    """HTML code of an icon before `text`; shown only in HTML."""

    @property
    def line(self) -> str:
        """`text`, `small` and `tag` as one line: "4.064 (4.027 to 4.102), 1 seed diverged"."""
        words = [self.text] if self.text else []
        words += [f"({part})" for part in self.small]
        line = " ".join(words)
        if not self.tag:
            return line
        return f"{line}, {self.tag}" if line else self.tag

    def html(self) -> str:
        html = ""
        if self.text:
            html = f"<span>{breakable(self.text)}</span>"
        for part in self.small:
            html += f"<small>{breakable(part)}</small>"
        if self.icon:
            html = f'<span class="name">{self.icon}<span>{html}</span></span>'
        if self.tag:
            html += f'<small class="tag">{escape(self.tag)}</small>'
        return html


@dataclass(frozen=True)
class TableColumn:
    """A table column with one cell per row."""

    title: str
    cells: Sequence[Cell]
    unit: str = ""
    meaning: str = ""
    """Explanation of the column, shown below the table."""
    left: bool = False
    """Whether the column is aligned left instead of right."""

    @property
    def head(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclass(frozen=True)
class Table:
    """A table of columns with equally many cells; the first column contains the row names."""

    columns: Sequence[TableColumn]

    @classmethod
    def of(
        cls,
        heads: Sequence[str | tuple[str, str]],
        rows: Iterable[Sequence[str | Cell]],
        left: Collection[int] = (0,),
    ) -> "Table":
        """Make a table from rows.

        Args:
            heads: titles of the columns, or pairs (title, unit).
            left: indices of the columns that are aligned left, because they contain text.
        """
        cells_by_row = []
        for row in rows:
            cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
            cells_by_row.append(cells)
        cells_by_column = list(zip(*cells_by_row, strict=True))
        # Without rows, `zip` yields no columns.
        if not cells_by_column:
            cells_by_column = [()] * len(heads)
        columns = []
        for i, (head, column_cells) in enumerate(zip(heads, cells_by_column, strict=True)):
            title, unit = head if isinstance(head, tuple) else (head, "")
            columns.append(TableColumn(title, column_cells, unit, left=i in left))
        return cls(columns)

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        return list(zip(*[column.cells for column in self.columns], strict=True))

    def lines(self) -> list[list[str]]:
        lines = [[column.head for column in self.columns]]
        for row in self.rows:
            lines.append([cell.line for cell in row])
        return lines

    def text(self, width: int | None = None) -> list[str]:
        """Return the header and the rows as lines of text with aligned columns.

        If the table is wider than `width` characters, the first cell of each row is on a line
        above the other cells. If `width` is None, each row is on one line.
        """
        lines = self.lines()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        total_width = sum(widths) + len(COLUMN_GAP) * (len(widths) - 1)
        is_too_wide = width is not None and total_width > width
        text = []
        for cells in lines:
            padded = []
            for cell, column, size in zip(cells, self.columns, widths, strict=True):
                padded.append(cell.ljust(size) if column.left else cell.rjust(size))
            if is_too_wide:
                if cells[0]:
                    text.append(cells[0])
                padded[0] = "  "
            line = COLUMN_GAP.join(padded)
            text.append(line.rstrip())
        return text

    def __str__(self) -> str:
        return "\n".join(self.text())

    def markdown(self, inline: Callable[[str], str] | None = None) -> str:
        """Return the table in Markdown; `inline` escapes a cell, by default `markdown_text`."""
        inline = inline or markdown_text
        rows = []
        for line in self.lines():
            # The cells of a row end at the character |, also inside a code span.
            cells = [inline(cell).replace("|", "\\|") for cell in line]
            rows.append(f"| {' | '.join(cells)} |")
        rows.insert(1, "|---" * len(self.columns) + "|")
        return "\n".join(rows)

    def csv(self) -> str:
        """Return the table as CSV text with the `value` of each cell; if it is None, the `text`."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.title for column in self.columns)
        for row in self.rows:
            values = []
            for cell in row:
                value = cell.text if cell.value is None else cell.value
                if isinstance(value, bool | list | dict):
                    value = json.dumps(value)
                values.append(value)
            writer.writerow(values)
        return file.getvalue()

    def html(self, label: str, style: str = "cards", key: str = "") -> str:
        """Return the table as HTML in a scrollable region.

        Args:
            label: accessible name (aria-label) of the region.
            style: CSS class of the <table> element.
            key: id of the <table> element; "" for no id.
        """
        heads = ""
        for i, column in enumerate(self.columns):
            kind = attribute("class", "text" if i and column.left else "")
            unit = f"<small>{escape(column.unit)}</small>" if column.unit else ""
            heads += f'<th scope="col"{kind}>{breakable(column.title)}{unit}</th>'
        rows = ""
        for first, *others in self.rows:
            rows += f'<tr><th scope="row">{first.html()}</th>'
            for cell, column in zip(others, self.columns[1:], strict=True):
                kind = attribute("class", "text" if column.left else "")
                # Tables shown as cards show the title of the column before each cell.
                title = attribute("data-title", column.head)
                rows += f"<td{kind}{title}>{cell.html()}</td>"
            rows += "</tr>\n"
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n'
            f'<table class="{style}"{attribute("id", key)}>\n<thead><tr>{heads}</tr></thead>\n'
            f"<tbody>\n{rows}</tbody>\n</table>\n</div>"
        )


CODE = re.compile("(?<!`)`([^`]+)`(?!`)")
"""A code span in plain text; the group is its content."""
MARKUP = re.compile(r"[\\`*\[~]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<![^\W_])_")
"""Characters with a meaning in Markdown; "_" only at the start of a word."""
BLOCK_START = re.compile(r"^(\d*)([#>=]|[-+.)](?=[\s-]|$))")
"""Start of a line that Markdown reads as a heading, quote, list or rule."""


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown, in which only code spans are markup."""
    one_line = " ".join(text.split())
    parts = CODE.split(one_line)
    for i, part in enumerate(parts):
        # CODE has one group, so that every second part is the content of a code span.
        parts[i] = f"`{part}`" if i % 2 else MARKUP.sub(r"\\\g<0>", part)
    return BLOCK_START.sub(r"\1\\\2", "".join(parts))


def breakable(text: str) -> str:
    return escape(text).replace("_", "_<wbr>")


def attribute(name: str, value: str) -> str:
    return f' {name}="{escape(value)}"' if value else ""
