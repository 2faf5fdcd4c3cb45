"""diffllm report DIR... [key=value ...]: runs side by side, as a page and a table."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffllm.report.comparison import Comparison, read
from diffllm.report.page import write
from diffllm.report.rows import Estimate
from diffllm.tools.arguments import parse

WHAT = """\
diffllm report DIR... [key=value ...]: report.html and report.csv about runs

DIR is a run, a sweep or another directory of runs, or a quoted glob of them. One row for every
combination of swept keys: held-out loss with a 95% interval over seeds, and its gap to the
baseline over the same seeds. Runs that differ in data, steps, tokenizer, batch, schedule, held-out
evaluation, precision or model shape, or of which that is unknown, are named, and no gap is
measured between them.

diffllm report outputs/sweep-20261120-195742
diffllm report 'outputs/cmp*' baseline=gated out=reports"""
OPTION = re.compile(r"-.*|[a-z_]+=.*", re.S)


@dataclass
class Arguments:
    """The arguments of `diffllm report` besides directories."""

    baseline: str = field(
        default="", metadata={"help": "variant to measure gaps from; standard if it is there"}
    )
    out: str = field(default="", metadata={"help": "where the files go; else beside what is named"})


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
    console = Console(highlight=False, soft_wrap=True)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    made.add_column("", no_wrap=True)
    against = f"gap to {comparison.baseline}" if comparison.baseline else "gap"
    for head in ("parameters", "seeds", "held-out loss", against, "loss spikes", "tokens/s"):
        made.add_column(head, justify="right", no_wrap=True)
    for row in comparison.rows:
        values = row.values
        made.add_row(
            Text(row.label),
            formatted(values["parameters"], ",.0f"),
            str(values["seeds"]),
            with_interval(row.loss, ".4f"),
            with_interval(row.gap, "+.4f"),
            formatted(values["spikes/loss_total"], ".3g"),
            formatted(values["perf/tokens_per_s"], ",.0f"),
        )
    width = console.measure(made, options=console.options.update(width=10_000)).maximum
    Console(highlight=False, width=width).print(made)
    console.print()
    for difference in comparison.differences:
        parts = [f"{value} in {', '.join(rows)}" for value, rows in difference.values.items()]
        console.print(f"not comparable: {difference.key} is {'; '.join(parts)}", markup=False)
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False)


def with_interval(estimate: Estimate | None, form: str) -> str:
    """A mean and its interval: "3.9120 (3.9001 to 3.9239)"."""
    if estimate is None:
        return "-"
    mean = format(estimate.mean, form)
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} ({format(estimate.low, form)} to {format(estimate.high, form)})"


def formatted(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
