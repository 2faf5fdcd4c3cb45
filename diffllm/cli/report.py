"""`diffllm report`: runs side by side as a page and a table."""

from dataclasses import dataclass
from pathlib import Path

from diffllm.cli.arguments import argument, parse, plugins_argument
from diffllm.core.printing import echo

REPORT = """\
diffllm report DIR... [key=value ...]: report.html and report.csv about runs

DIR is a run, a sweep or another directory of runs, or a quoted glob of them. One row for every
combination of swept keys: held-out loss with a 95% interval over seeds, and its gap to the
baseline over the same seeds. Runs that differ in data, steps, tokenizer, batch, schedule, held-out
evaluation, precision or model shape, or of which that is unknown, are told apart as groups, and no
gap is measured between them.

diffllm report outputs/sweep-20261120-195742
diffllm report 'outputs/cmp*' baseline=gated out=reports"""


@dataclass
class ReportArguments:
    run: list[str] = argument("DIR, without run= too; several times", [], words="plain", path=True)
    baseline: str = argument("variant to measure gaps from; standard if it is there", "")
    out: str = argument("where the files go; else next to the named runs", "", path=True)
    wandb: bool = argument(
        "true: gaps over tokens as a wandb run too, if the runs have theirs", False
    )
    plugins: str = plugins_argument()


def report_command(argv: list[str]) -> None:
    args = parse(ReportArguments, argv, REPORT)
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import record_gaps, whole_text, write

    comparison, home = read([Path(word) for word in args.run], args.baseline or None)
    written = write(comparison, Path(args.out) if args.out else home)
    echo(f"{whole_text(comparison)}\n")
    if args.wandb and record_gaps(comparison, written[0].parent):
        echo(f"gaps over tokens: {written[0].parent / 'wandb'}")
    for file in written:
        echo(file)
