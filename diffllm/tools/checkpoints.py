"""diffllm checkpoints run=<dir>: which checkpoints a run has, and whether they can be used."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffllm.checkpoint.directory import list_checkpoints, list_incomplete, step_of
from diffllm.checkpoint.manifest import verify
from diffllm.checkpoint.reader import read_state
from diffllm.errors import CheckpointError
from diffllm.metrics.display import duration
from diffllm.tools.arguments import parse

WHAT = """\
diffllm checkpoints run=<dir> [verify=false] [--json]: the checkpoints of a run, oldest first, each
file compared with the manifest; exit code 1 if one is damaged

  --json            a JSON list instead of a table

diffllm checkpoints run=outputs/mine
diffllm checkpoints run=outputs/mine verify=false --json"""


@dataclass
class Arguments:
    """The arguments of `diffllm checkpoints`."""

    run: str = field(metadata={"help": "run directory"})
    verify: bool = field(default=True, metadata={"help": "read all files; false: sizes only"})


@dataclass
class Listed:
    """A checkpoint as it is shown."""

    step: int
    path: str
    state: str
    """good, damaged, or incomplete: a save under way, or one that was cut short."""
    problems: list[str]
    """The damage, a phrase a file."""
    checksums: bool
    """Whether files were read, not only measured."""
    bytes: int
    written: float
    """Seconds since the epoch."""
    ranks: int | None
    """That wrote it; None where that cannot be read."""


def main(argv: list[str]) -> int:
    """Print the checkpoints; 1 if one is damaged, else 0."""
    args = parse(Arguments, [word for word in argv if word != "--json"], WHAT)
    directory = Path(args.run) / "checkpoints"
    if not directory.is_dir():
        raise CheckpointError(f"{args.run} is not a run directory: it has no checkpoints/")
    listed = []
    for path in list_checkpoints(directory) + list_incomplete(directory):
        with suppress(FileNotFoundError):  # a run deletes old ones, and renames the one it wrote
            listed.append(listing(path, args.verify))
    if "--json" in argv:
        print(json.dumps([asdict(one) for one in listed], indent=2))
    else:
        print_table(listed)
    return int(any(one.state == "damaged" for one in listed))


def listing(path: Path, checksums: bool) -> Listed:
    """Collect the facts about a checkpoint; raises FileNotFoundError if it is gone."""
    if path.name.startswith("."):
        step = int(path.name.removeprefix(".step-").removesuffix(".incomplete"))
        size, written = size_of(path), path.stat().st_mtime
        return Listed(step, str(path), "incomplete", [], False, size, written, None)
    problems = verify(path, checksums)
    ranks = None
    if not problems:
        try:
            ranks = read_state(path)["ranks"]
        except CheckpointError as error:
            problems = [str(error).removeprefix(f"{path} is not a checkpoint: ")]
    return Listed(
        step=step_of(path),
        path=str(path),
        state="damaged" if problems else "good",
        problems=problems,
        checksums=checksums,
        bytes=size_of(path),
        written=path.stat().st_mtime,
        ranks=ranks,
    )


def size_of(path: Path) -> int:
    """Bytes in the files of a directory, links not followed."""
    return sum(file.lstat().st_size for file in path.iterdir())


def print_table(listed: list[Listed]) -> None:
    """A line a checkpoint."""
    if not listed:
        print("no checkpoint yet")
        return
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("step", "MB", "written", "age", "ranks"):
        made.add_column(head, justify="right", no_wrap=True)
    made.add_column("state", no_wrap=True)
    now = time.time()
    for one in listed:
        made.add_row(
            str(one.step),
            f"{one.bytes / 1e6:,.1f}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written)),
            duration(max(0, now - one.written)),
            str(one.ranks or "-"),
            Text(in_words(one)),
        )
    console = Console(highlight=False)
    width = console.measure(made, options=console.options.update(width=10_000)).maximum
    Console(highlight=False, width=width).print(made)


def in_words(one: Listed) -> str:
    """The state, and what it rests on."""
    if one.state == "damaged":
        return f"damaged: {'; '.join(one.problems)}"
    if one.state == "incomplete":
        return "incomplete: being written, or cut short"
    return "good" if one.checksums else "good by size, checksums not read"
