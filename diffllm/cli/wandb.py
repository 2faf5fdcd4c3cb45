"""Command `diffllm wandb`: write runs to wandb from their directories."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.cli.arguments import (
    CommandArguments,
    argument,
    check_wandb_mode,
    parse,
    plugins_argument,
)
from diffllm.core.errors import CheckpointError
from diffllm.core.printing import echo, echo_json, to_stderr

WANDB_USAGE = """\
diffllm wandb run=DIR|sweep=DIR ... [key=value ...]: write runs to wandb from their directories

Writes each step, the config, the summary and the table of events of finished and running runs, and
of a sweep also its loss gaps: for runs with wandb.mode=disabled, for another server, or to repair a
wandb run. Group, tags and name are those of training. A run directory changes only in wandb/. wandb
cannot replace steps on a server: if the server has the run, a new wandb run gets all steps, and you
can delete the former one.

diffllm wandb run=outputs/mine
diffllm wandb sweep=outputs/sweep-20261120-195742 project=moved mode=online"""


@dataclass
class WandbArguments(CommandArguments):
    run: list[str] = argument(
        "run directory, directory of runs or quoted glob; repeatable", [], words="plain", path=True
    )
    sweep: list[str] = argument(
        "sweep, study or quoted glob: the runs and their loss gaps; repeatable", [], path=True
    )
    mode: str = argument(
        "online, offline, or auto: WANDB_MODE, else online with an API key", "auto"
    )
    project: str = argument("project in wandb; empty: the project of the run", "")
    entity: str = argument("user or team in wandb; empty: the entity of the run", "")
    plugins: str = plugins_argument()


def wandb_command(argv: list[str]) -> int:
    args = parse(WandbArguments, argv, WANDB_USAGE)
    check_wandb_mode(args.mode)
    from diffllm.compare.arms.run_search import directories_with_runs, find_runs
    from diffllm.compare.wandb_runs import choose_destination, write_gaps, write_run

    destination = choose_destination(args.mode, args.project, args.entity)
    directories = find_runs([*map(Path, args.run), *map(Path, args.sweep)]).runs
    # Several words may name one sweep, whose gaps must be written only once.
    sweeps: dict[Path, Path] = {}
    for word in args.sweep:
        for sweep in directories_with_runs(Path(word)):
            sweeps.setdefault(sweep.resolve(), sweep)
    runs: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for directory in directories:
        try:
            runs.append(write_run(directory, destination))
        except CheckpointError as error:
            # A damaged run must not stop the uploads of other runs.
            if len(directories) == 1:
                raise
            skipped[str(directory)] = str(error)
            to_stderr(f"warning: {directory} is skipped: {error}")
            continue
        print_upload("steps", runs[-1], args.json)
    gaps: list[dict[str, Any]] = []
    for sweep in sweeps.values():
        gap_upload = write_gaps(sweep, destination)
        if gap_upload is not None:
            gaps.append(gap_upload)
            print_upload("loss gaps", gap_upload, args.json)
    if args.json:
        mode = destination.mode.value
        echo_json({"mode": mode, "runs": runs, "gaps": gaps, "skipped": skipped})
    return int(bool(skipped))


def print_upload(content: str, upload: dict[str, Any], on_stderr: bool) -> None:
    """Print the number of lines and their destination, the upload command and the former run.

    `upload` is the result of `write_run` or `write_gaps`.
    """
    lines, seconds = upload["lines"], upload["seconds"]
    destination = upload["url"] or upload["directory"]
    text = f"wrote {lines:,} {content} of {upload['run']} to {destination}"
    text += f" ({lines / seconds:,.0f} per second)"
    if upload["url"] is None:
        text += f"; `wandb sync {shlex.quote(upload['directory'])}` uploads it"
    if upload["replaces"]:
        text += f"; delete the former run {upload['replaces']} in wandb"
    echo(text, file=sys.stderr if on_stderr else None)
