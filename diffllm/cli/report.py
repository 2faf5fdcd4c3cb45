"""diffllm report DIR... [key=value ...]: runs side by side, as a page and a table."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from diffllm.cli.arguments import a_path, parse, plugins_field
from diffllm.compare.report.comparison import read
from diffllm.compare.report.page import write
from diffllm.compare.report.text import whole_text
from diffllm.compare.report.wandb_gaps import record_gaps
from diffllm.core.printing import echo

WHAT = """\
diffllm report DIR... [key=value ...]: report.html and report.csv about runs

DIR is a run, a sweep or another directory of runs, or a quoted glob of them. One row for every
combination of swept keys: held-out loss with a 95% interval over seeds, and its gap to the
baseline over the same seeds. Runs that differ in data, steps, tokenizer, batch, schedule, held-out
evaluation, precision or model shape, or of which that is unknown, are told apart as groups, and no
gap is measured between them.

diffllm report outputs/sweep-20261120-195742
diffllm report 'outputs/cmp*' baseline=gated out=reports"""
OPTION = re.compile(r"-.*|[a-z_]+=.*", re.S)


@dataclass
class Arguments:
    """The arguments of `diffllm report` besides directories."""

    baseline: str = field(
        default="", metadata={"help": "variant to measure gaps from; standard if it is there"}
    )
    out: str = field(default="", metadata=a_path("where the files go; else beside what is named"))
    wandb: bool = field(
        default=False,
        metadata={"help": "true: gaps over tokens as a wandb run too, if the runs have theirs"},
    )
    plugins: str = plugins_field()


def main(argv: list[str]) -> None:
    """Write the page and the table, print means and gaps, differences, notes and paths."""
    options = [word for word in argv if OPTION.fullmatch(word) and not os.path.isdir(word)]
    args = parse(Arguments, options, WHAT)
    directories = [Path(word) for word in argv if word not in options]
    comparison, home = read(directories, args.baseline or None)
    written = write(comparison, Path(args.out) if args.out else home)
    echo(f"{whole_text(comparison)}\n")
    if args.wandb and record_gaps(comparison, written[0].parent):
        echo(f"gaps over tokens: {written[0].parent / 'wandb'}")
    for file in written:
        echo(file)
