"""The table of `diffllm count --compare`: one column a variant, changes against the first."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from diffllm.model.groups import OTHER_COMPONENTS

Counts = dict[str, dict[str, Any]]
"""Variant to what `count` gives; the first is what the others are compared with."""
Row = tuple[str, list[tuple[str, str]]]
"""A label, and each variant's value and change."""


def print_comparison(title: str, counts: Counts) -> None:
    """Print `counts`; on a terminal too narrow for all, in blocks that repeat the first column."""
    console = Console(highlight=False, soft_wrap=True)
    first, *others = counts
    console.print(title, markup=False)
    console.print(f"parameters, training FLOPs, bf16 KV cache; changes are against {first}")
    if matched := counts[first]["matched"]:
        console.print(
            f"matched to {matched['target']}: {matched['target_params']:,} parameters "
            f"at {matched['key']} {matched['target_ffn_dim']:,}"
        )
    console.print()
    while others:
        shown = len(others)
        if console.is_terminal:
            while shown > 1 and width(console, table(counts, others[:shown])) > console.width:
                shown -= 1
        block = table(counts, others[:shown])
        Console(highlight=False, width=width(console, block)).print(block)
        others = others[shown:]
        if others:
            console.print()


def width(console: Console, block: Table) -> int:
    """Columns that a table takes when nothing is cut."""
    return console.measure(block, options=console.options.update(width=10_000)).maximum


def table(counts: Counts, others: list[str]) -> Table:
    """The first variant of `counts` beside `others`."""
    shown = {name: counts[name] for name in (next(iter(counts)), *others)}
    sections = comparison(shown)
    rows = [cells for section in sections for _, cells in section]
    sizes = [
        [max(len(row[column][part]) for row in rows) for part in (0, 1)]
        for column in range(len(shown))
    ]
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    made.add_column("", no_wrap=True)
    for name in shown:
        made.add_column(name, justify="right", no_wrap=True)
    for section in sections:
        for label, cells in section:
            aligned = [
                f"{value:>{left}} {change:<{right}}" if right else f"{value:>{left}}"
                for (value, change), (left, right) in zip(cells, sizes, strict=True)
            ]
            made.add_row(label, *aligned)
        made.add_section()
    return made


def comparison(counts: Counts) -> list[list[Row]]:
    """Attention's components, the others, totals, costs; no rows that are 0 throughout."""
    columns = list(counts.values())
    components = dict.fromkeys(name for each in columns for name in each["by_component"])

    def component(name: str) -> Row:
        return integers(name, [each["by_component"].get(name, 0) for each in columns])

    def quantity(label: str, key: str) -> Row:
        return integers(label, [each[key] for each in columns])

    flops = [each["flops_per_token"] / 1e6 for each in columns]
    width = "expert_dim" if columns[0]["expert_dim"] else "ffn_dim"
    over = [each["matched"]["difference_percent"] for each in columns if each["matched"]]
    inside = [component(name) for name in components if name not in OTHER_COMPONENTS]
    outside = [component(name) for name in OTHER_COMPONENTS]
    return [
        [*filter(is_there, inside), quantity("attention", "attention_params")],
        [*filter(is_there, outside)],
        [
            quantity("total", "total_params"),
            quantity("active", "active_params"),
            *([("over target", [(f"{percent:+.3f}%", "") for percent in over])] if over else []),
        ],
        [
            quantity(width, width),
            ("MFLOPs a token", against_first(flops, "{:,.1f}".format, percent_more)),
            quantity("KV bytes a token", "kv_cache_bytes_per_token"),
        ],
    ]


def integers(label: str, values: list[int]) -> Row:
    """A row of numbers in full, with short differences."""
    return label, against_first(values, "{:,}".format, lambda first, value: short(value - first))


def is_there(row: Row) -> bool:
    """Whether any variant has some of it."""
    return any(value not in ("0", "=") for value, _ in row[1])


def against_first(
    values: list[Any], show: Callable[[Any], str], change: Callable[[Any, Any], str]
) -> list[tuple[str, str]]:
    """The first value; then "=" for the same, value and change for another."""
    first = values[0]
    others = [("=", "") if v == first else (show(v), change(first, v)) for v in values[1:]]
    return [(show(first), ""), *others]


def percent_more(first: float, value: float) -> str:
    return f"{100 * (value / first - 1):+.1f}%"


def short(difference: int) -> str:
    """With its sign, in 6 characters: +1,408, -24.6K, +537M, +1.07B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(difference) >= max(10_000, 0.9995 * size):
            return f"{difference / size:+.3g}{unit}"
    return f"{difference:+,}"
