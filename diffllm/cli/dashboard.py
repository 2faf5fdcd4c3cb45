"""Command `diffllm dashboard`: make a wandb workspace and a report."""

import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.cli.arguments import (
    CommandArguments,
    argument,
    check_wandb_mode,
    parse,
    plugins_argument,
)
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo, echo_json

if TYPE_CHECKING:
    from diffllm.compare.dashboard import Dashboard

DASHBOARD_USAGE = """\
diffllm dashboard sweep=DIR... [key=value ...]
diffllm dashboard study=STUDY.yaml out=DIR [key=value ...]
diffllm dashboard project=NAME [entity=NAME] [key=value ...]
Make a wandb workspace and a wandb report with the sections of report.html. Runs are grouped by row
and have the colours of the report's figures; the baseline is pinned.

Online, the command saves both and prints their addresses; a repeated command replaces both.
Offline, it writes the requests to dashboard.json, next to the report. Panels of metrics that no run
logged are omitted, except with project=. Needs: pip install -c constraints.txt -e '.[dashboard]'

diffllm dashboard outputs/sweep-20261120-195742
diffllm dashboard study=conf/study/claim.yaml out=outputs/claim mode=online"""


@dataclass
class DashboardArguments(CommandArguments):
    sweep: list[str] = argument(
        "sweep, run or directory of runs, with or without sweep=; repeatable",
        [],
        words="plain",
        path=True,
    )
    study: str = argument("STUDY.yaml of a study; out= is the directory of its runs", "", path=True)
    project: str = argument("wandb project, all of whose runs are shown", "")
    entity: str = argument("user or team of the project; empty: as in the runs", "")
    mode: str = argument("online, offline, or auto: the mode of the runs", "auto")
    baseline: str = argument("baseline variant; empty: standard if present", "")
    out: str = argument("directory of dashboard.json; empty: next to the named runs", "", path=True)
    plugins: str = plugins_argument()


def dashboard_command(argv: list[str]) -> None:
    args = parse(DashboardArguments, argv, DASHBOARD_USAGE)
    if sum(map(bool, (args.sweep, args.study, args.project))) != 1:
        raise ConfigError("name exactly one of sweep=DIR, study=STUDY.yaml or project=NAME")
    check_wandb_mode(args.mode)
    from diffllm.compare.wandb_views import FILE, check_installed, make_views, send, write_views

    check_installed()
    dashboard, directory, mode = read_dashboard(args)
    file = directory / FILE
    views = make_views(dashboard, file)
    write_views(views, file)
    workspace, report = send(views, file) if mode == "online" else (None, None)
    if args.json:
        sections = [asdict(section) for section in dashboard.sections]
        content = {
            "workspace": workspace, "report": report, "file": str(file), "sections": sections,
        }  # fmt: skip
        echo_json(content)
        return
    for section in dashboard.sections:
        echo(f"{section.title}: {'; '.join(panel.title for panel in section.panels)}")
    echo()
    if workspace:
        echo(f"workspace: {workspace}\nreport: {report}")
    else:
        words = [word for word in argv if not word.startswith("mode=")]
        echo(f"{file}; send it with: diffllm dashboard {shlex.join(words)} mode=online")


def read_dashboard(args: DashboardArguments) -> "tuple[Dashboard, Path, str]":
    """Return the dashboard, the directory of dashboard.json, and the mode of wandb."""
    from diffllm.compare.dashboard import comparison_dashboard, project_dashboard
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.report_page import required
    from diffllm.metrics.wandb_config import WandbConfig, WandbMode, check_project, resolve_mode

    mode = None if args.mode == "auto" else WandbMode(args.mode)
    wandb = WandbConfig()
    if args.project:
        check_project("project", args.project)
        entity = args.entity or os.environ.get("WANDB_ENTITY", "")
        dashboard, directory = project_dashboard(args.project, entity), Path(args.out or ".")
    else:
        paths = [Path(word) for word in args.sweep]
        title = ""
        if args.study:
            from diffllm.cli.study import study_and_directory

            study, out = study_and_directory([args.study], args.out)
            paths, title = [out], study.path.stem
        comparison, home = read(paths, args.baseline or None)
        directory = required(Path(args.out) if args.out else home)
        dashboard = comparison_dashboard(
            comparison, home or directory, title or comparison.title, args.entity, mode
        )
        wandb = comparison.rows[0].runs[0].cfg.wandb
    if mode:
        wandb = WandbConfig(mode=mode)
    return dashboard, directory, resolve_mode(wandb)
