"""diffllm report DIR... [key=value ...]: runs side by side, as a page and a table."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from diffllm.report.comparison import Comparison, read
from diffllm.report.page import write
from diffllm.report.table import Cell, table_columns
from diffllm.tools.arguments import parse, plugins_field
from diffllm.tools.table import print_table, table

WHAT = """\
diffllm report DIR... [key=value ...]: report.html and report.csv about runs

DIR is a run, a sweep or another directory of runs, or a quoted glob of them. One row for every
combination of swept keys: held-out loss with a 95% interval over seeds, and its gap to the
baseline over the same seeds. Runs that differ in data, steps, tokenizer, batch, schedule, held-out
evaluation, precision or model shape, or of which that is unknown, are named, and no gap is
measured between them.

diffllm report outputs/sweep-20261120-195742
diffllm report 'outputs/cmp*' baseline=gated out=reports"""
SHOWN = ("Held-out loss", "Gap to", "Parameters", "Seeds", "Loss spikes", "Speed")
"""Columns of the page that are printed too."""
OPTION = re.compile(r"-.*|[a-z_]+=.*", re.S)


@dataclass
class Arguments:
    """The arguments of `diffllm report` besides directories."""

    baseline: str = field(
        default="", metadata={"help": "variant to measure gaps from; standard if it is there"}
    )
    out: str = field(default="", metadata={"help": "where the files go; else beside what is named"})
    plugins: str = plugins_field()


def main(argv: list[str]) -> None:
    """Write the page and the table, print a short table, differences, notes and paths."""
    options = [word for word in argv if OPTION.fullmatch(word) and not Path(word).is_dir()]
    args = parse(Arguments, options, WHAT)
    directories = [Path(word) for word in argv if word not in options]
    comparison, home = read(directories, args.baseline or None)
    written = write(comparison, Path(args.out).expanduser() if args.out else home)
    print_comparison(comparison)
    for file in written:
        print(file)


def print_comparison(comparison: Comparison) -> None:
    """A line a row, then what cannot be compared and what is to be known."""
    columns = [each for each in table_columns(comparison) if each.title.startswith(SHOWN)]
    made = table("Row", *(f"{column.title}\n{column.unit}" for column in columns))
    for row, *cells in zip(comparison.rows, *(column.cells for column in columns), strict=True):
        made.add_row(row.label, *map(cell_text, cells))
    print_table(made)
    print()
    for key, values in comparison.differences.items():
        parts = [f"{value} in {', '.join(rows)}" for value, rows in values.items()]
        print(f"not comparable: {key} is {'; '.join(parts)}")
    for note in comparison.notes:
        print(f"note: {note}")


def cell_text(cell: Cell) -> str:
    """A cell in one line: "3.9120 (3.9001 to 3.9239), 1 of 3 seeds diverged"."""
    detail = f" ({cell.detail})" if cell.detail else ""
    return f"{cell.text}{detail}{', ' if cell.text and cell.tag else ''}{cell.tag}"
