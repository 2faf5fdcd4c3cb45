"""The table of `diffllm count`: a column for each variant, with changes against the first."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from diffllm.cli.table import print_table, table, width_of
from diffllm.config.matching import MATCHABLE
from diffllm.core.console import Console
from diffllm.core.printing import echo
from diffllm.model.stats import OTHER_COMPONENTS

Counts = dict[str, dict[str, Any]]
"""Variant to what `count` gives; the first is what the others are compared with."""
Row = tuple[str, ...]
"""A label, the first variant's value, then value and change of each other."""


def print_counts(title: str, counts: Counts) -> None:
    """Print `counts`; on a terminal too narrow for all, in blocks that repeat the first column."""
    first, *others = counts
    changes = f"; changes are against {first}" if others else ""
    echo(f"{title}\nparameters, training FLOPs, bf16 KV cache{changes}")
    if matched := counts[first]["matched"]:
        by = matched["by"]
        echo(
            f"matched to {matched['target']}: {matched[f'target_{by}']:,.0f} "
            f"{MATCHABLE[by].unit} at {matched['key']} {matched['target_ffn_dim']:,}"
        )
    terminal = Console()
    shown, more = len(others), True
    while more:
        block = count_table({name: counts[name] for name in (first, *others[:shown])})
        if terminal.is_terminal and shown > 1 and width_of(block) > terminal.width:
            shown -= 1
            continue
        echo()
        print_table(block)
        others = others[shown:]
        shown, more = len(others), bool(others)


def count_table(counts: Counts) -> Table:
    """Tabulate `counts`, without rows that are 0 throughout."""
    first, *others = counts
    made = table("", first, *(head for name in others for head in (name, "")))
    for section in sections(list(counts.values())):
        for row in section:
            if any(cell not in ("0", "=", "") for cell in row[1:]):
                made.add_row(*row)
        made.add_section()
    return made


def sections(columns: list[dict[str, Any]]) -> list[list[Row]]:
    """List the rows of attention's components, of the others, of totals and of costs."""
    components = dict.fromkeys(name for each in columns for name in each["by_component"])

    def component(name: str) -> Row:
        return integers(name, [each["by_component"].get(name, 0) for each in columns])

    def quantity(label: str, key: str) -> Row:
        return integers(label, [each[key] for each in columns])

    width = "expert_dim" if columns[0]["expert_dim"] else "ffn_dim"
    inside = [component(name) for name in components if name not in OTHER_COMPONENTS]
    totals = [
        quantity("total", "total_params"),
        quantity("active", "active_params"),
        quantity("without embedding", "non_embedding_params"),
    ]
    if columns[0]["matched"]:
        over = [f"{each['matched']['difference_percent']:+.3f}%" for each in columns]
        totals.append(("over target", over[0], *(cell for text in over[1:] for cell in (text, ""))))
    flops = [each["flops_per_token"] / 1e6 for each in columns]
    return [
        [*inside, quantity("attention", "attention_params")],
        [component(name) for name in OTHER_COMPONENTS],
        totals,
        [
            quantity(width, width),
            against_first("MFLOPs a token", flops, "{:,.1f}".format, percent_more),
            quantity("KV bytes a token", "kv_cache_bytes_per_token"),
        ],
    ]


def integers(label: str, values: list[int]) -> Row:
    return against_first(label, values, "{:,}".format, lambda first, value: short(value - first))


def against_first(
    label: str, values: list[Any], show: Callable[[Any], str], change: Callable[[Any, Any], str]
) -> Row:
    """Make a row of values and changes, with "=" for a value that is the first's."""
    first, *others = values
    cells = [("=", "") if v == first else (show(v), change(first, v)) for v in others]
    return label, show(first), *(cell for pair in cells for cell in pair)


def percent_more(first: float, value: float) -> str:
    return f"{100 * (value / first - 1):+.1f}%"


def short(difference: int) -> str:
    """Write a difference with its sign in 6 characters: +1,408, -24.6K, +537M, +1.07B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(difference) >= max(10_000, 0.9995 * size):
            return f"{difference / size:+.3g}{unit}"
    return f"{difference:+,}"
