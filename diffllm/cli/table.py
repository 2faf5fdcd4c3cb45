"""Tables of the commands, printed whole: no cell is cut where a terminal is narrow."""

from rich import box
from rich.table import Table

from diffllm.core.console import Console

WHOLE = 10_000
"""Columns that no table fills."""


def table(*heads: str, text: int = 0) -> Table:
    """Make an empty table whose columns are aligned to the right, but for the one of `text`."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for place, head in enumerate(heads):
        made.add_column(head, justify="left" if place == text else "right", no_wrap=True)
    return made


def width_of(table: Table) -> int:
    return Console(width=WHOLE).measure(table).maximum


def print_table(table: Table) -> None:
    Console(width=WHOLE).print(table)
