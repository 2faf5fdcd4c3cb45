"""Command `diffllm report`: compare runs in report.html and report.csv."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.cli.arguments import CommandArguments, argument, parse, plugins_argument
from diffllm.core.printing import echo, echo_json
from diffllm.core.run_files import RunFolder

if TYPE_CHECKING:
    from diffllm.compare.report.comparison import Comparison

REPORT_USAGE = """\
diffllm report DIR... [key=value ...]: compare runs in report.html and report.csv

DIR is a run, a sweep, another directory of runs, or a quoted glob of such directories. The report
has one row per combination of swept keys: held-out loss with a 95% interval over seeds, and its gap
to the baseline over the same seeds. Runs form separate groups, without gaps between groups, if
data, steps, tokenizer, batch, schedule, held-out evaluation, precision or model shape differs or is
unknown.

diffllm report outputs/sweep-20261120-195742
diffllm report 'outputs/cmp*' baseline=gated out=reports"""


@dataclass
class ReportArguments(CommandArguments):
    run: list[str] = argument("DIR, with or without run=; repeatable", [], words="plain", path=True)
    baseline: str = argument("baseline variant of gaps; empty: standard if present", "")
    out: str = argument("directory of the files; empty: next to the named runs", "", path=True)
    wandb: bool = argument(
        "true: also log gaps over tokens as a wandb run, if the runs used wandb", False
    )
    plugins: str = plugins_argument()


def report_command(argv: list[str]) -> None:
    args = parse(ReportArguments, argv, REPORT_USAGE)
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.report_page import write_page
    from diffllm.compare.report.terminal import whole_text

    directories = [Path(word) for word in args.run]
    comparison, home = read(directories, args.baseline or None)
    directory = Path(args.out) if args.out else home
    page, table = write_page(comparison, directory)
    gaps = None
    if args.wandb:
        gaps = log_gaps(comparison, page.parent)
    if args.json:
        content = {
            "baseline": comparison.baseline,
            "rows": [row.values for row in comparison.rows],
            "differences": [difference._asdict() for difference in comparison.row_differences],
            "files": [str(page), str(table)],
            "wandb": str(gaps) if gaps else None,
        }
        echo_json(content)
        return
    echo(f"{whole_text(comparison)}\n")
    if gaps:
        echo(f"gaps over tokens: {gaps}")
    echo(page)
    echo(table)


def log_gaps(comparison: "Comparison", directory: Path) -> Path | None:
    """Log gaps over tokens to wandb; return the directory of its files, or None without gaps."""
    from diffllm.compare.wandb_runs import record_gaps
    from diffllm.metrics.wandb_directories import wandb_parent

    if not record_gaps(comparison, directory):
        return None
    return wandb_parent(directory) / RunFolder.WANDB
