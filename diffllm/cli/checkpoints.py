"""diffllm checkpoints run=<dir> [key=value ...] [--json]: list the checkpoints, oldest first.

Compare all files with the manifests; exit with code 1 if a checkpoint is damaged.

diffllm checkpoints run=outputs/mine verify=false --json
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.checkpoint.manifest import faults, read_state
from diffllm.cli.arguments import RunArguments, argument, parse
from diffllm.core.errors import CheckpointError
from diffllm.core.printing import Table, echo, echo_json
from diffllm.core.run_files import RunFolder, list_checkpoints, list_incomplete, step_of
from diffllm.metrics.display import duration


@dataclass
class CheckpointsArguments(RunArguments):
    verify: bool = argument("read all files; false: compare only sizes", True)


def checkpoints_command(argv: list[str]) -> int:
    args = parse(CheckpointsArguments, argv, __doc__)
    directory = Path(args.run) / RunFolder.CHECKPOINTS
    if not directory.is_dir():
        from diffllm.config.saved import no_run  # imports Hydra, which is slow

        raise CheckpointError(no_run(Path(args.run), f"{RunFolder.CHECKPOINTS}/"))
    checkpoints = []
    for path in list_checkpoints(directory) + list_incomplete(directory):
        with suppress(FileNotFoundError):  # a running process may delete or rename it
            checkpoints.append(checkpoint_facts(path, args.verify))
    if args.json:
        echo_json(checkpoints)
    else:
        echo(table_of(checkpoints) if checkpoints else "no checkpoint yet")
    return int(any(facts["state"] == "damaged" for facts in checkpoints))


def checkpoint_facts(path: Path, checksums: bool) -> dict[str, Any]:
    """Return step, state, size and other values of one checkpoint, for the table and for JSON.

    The state is "good", "damaged" (a file is missing, changed or invalid) or "incomplete" (partly
    saved or partly deleted). If `checksums` is true, compare the checksums of files with the
    manifest, otherwise compare only the sizes. Raises FileNotFoundError if training deletes the
    checkpoint during the call.
    """
    is_incomplete = path.name.startswith(".")
    problems = [] if is_incomplete else faults(path, checksums)
    state = "good"
    if is_incomplete:
        state = "incomplete"
    elif problems:
        state = "damaged"
    ranks = None
    if state == "good":
        with suppress(CheckpointError):  # the run may just have deleted the files
            ranks = read_state(path)["ranks"]
    written = path.lstat().st_mtime  # raises if the run has deleted the checkpoint
    # The caller skips a deleted checkpoint, but lists an unreadable one.
    try:
        size = sum(file.lstat().st_size for file in path.iterdir())
    except FileNotFoundError:
        raise
    except OSError:
        size = 0
    return {
        "step": step_of(path),
        "path": str(path),
        "state": state,
        "problems": problems,
        "checksums": checksums and not is_incomplete,
        "bytes": size,
        "written": written,
        "ranks": ranks,
    }


def table_of(checkpoints: list[dict[str, Any]]) -> Table:
    rows = []
    for facts in checkpoints:
        state_texts = {
            "damaged": f"damaged: {'; '.join(facts['problems'])}",
            "incomplete": "incomplete: being written, or interrupted",
            "good": "good" if facts["checksums"] else "good by size, checksums not compared",
        }
        size = f"{facts['bytes'] / 1e6:,.1f}"
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["written"]))
        # The clock of a file server may be ahead of this machine.
        age = duration(max(0, time.time() - facts["written"]))
        ranks = str(facts["ranks"] or "-")
        rows.append([str(facts["step"]), size, written, age, ranks, state_texts[facts["state"]]])
    return Table.of(["step", "MB", "written", "age", "ranks", "state"], rows, left=(5,))
