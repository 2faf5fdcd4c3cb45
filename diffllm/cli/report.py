"""`diffllm report`, runs side by side as a page and a table, and `diffllm dashboard`, in wandb."""

from dataclasses import dataclass
from pathlib import Path

from diffllm.cli.arguments import argument, flag, parse, plugins_argument, write_out
from diffllm.core.errors import ConfigError
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
DASHBOARD = """\
diffllm dashboard entity=... project=... [--offline]: a saved view of a wandb project, with loss,
spikes, norms, outliers and lambda over tokens, runs grouped by attention variant"""


@dataclass
class ReportArguments:
    run: list[str] = argument("DIR, without run= too; several times", [], words="plain", path=True)
    baseline: str = argument("variant to measure gaps from; standard if it is there", "")
    out: str = argument("where the files go; else next to the named runs", "", path=True)
    wandb: bool = argument(
        "true: gaps over tokens as a wandb run too, if the runs have theirs", False
    )
    plugins: str = plugins_argument()


@dataclass
class DashboardArguments:
    entity: str = argument("wandb user or team")
    project: str = argument("wandb project")
    name: str = argument("of the view", "Attention variants")
    out: str = argument("file it goes to when offline", "dashboard.json", path=True)
    offline: bool = flag("write to out= instead; so does WANDB_MODE=offline, or no API key")
    plugins: str = plugins_argument()


def report_command(argv: list[str]) -> None:
    """Write the page and the table; print means and gaps, differences, notes and paths."""
    args = parse(ReportArguments, argv, REPORT)
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import write
    from diffllm.compare.report.text import whole_text
    from diffllm.compare.report.wandb_gaps import record_gaps

    comparison, home = read([Path(word) for word in args.run], args.baseline or None)
    written = write(comparison, Path(args.out) if args.out else home)
    echo(f"{whole_text(comparison)}\n")
    if args.wandb and record_gaps(comparison, written[0].parent):
        echo(f"gaps over tokens: {written[0].parent / 'wandb'}")
    for file in written:
        echo(file)


def dashboard_command(argv: list[str]) -> None:
    """Save the view and print its address, or write it to a file."""
    args = parse(DashboardArguments, argv, DASHBOARD)
    for key in ("entity", "project", "name", "out"):
        if not getattr(args, key).strip():
            raise ConfigError(f"{key}= must not be empty")
    from diffllm.metrics.wandb_run import WandbConfig, as_json, resolve_mode, workspace

    try:
        view = workspace(args.entity, args.project, args.name)
    except ImportError as error:
        raise ConfigError(
            f'{error.name or error} is not installed: pip install "diffllm[dashboard]"'
        ) from None
    except ValueError:  # the only value that is checked
        raise ConfigError(
            f"name={args.name} cannot be used: wandb takes no emoji and no symbols such as = or +"
        ) from None
    if args.offline or resolve_mode(WandbConfig()) != "online":
        write_out(args.out, as_json(view) + "\n")
        echo(f"offline; the view is in {args.out}")
        return
    try:
        view.save()
        echo(view.url)
    except Exception as error:  # wandb's own, its client's, or its network library's
        why = " ".join(str(error).split())
        raise ConfigError(
            f"wandb did not save the view to {args.entity}/{args.project}: {why}"
        ) from error
