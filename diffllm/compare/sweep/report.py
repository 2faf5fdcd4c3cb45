"""The lines that begin a sweep, and the table and the lines that end it."""

import math
from pathlib import Path
from typing import Any

from diffllm.compare.sweep.job import Ending, Job
from diffllm.compare.sweep.plan import SweepDirectory
from diffllm.core.errors import CheckpointError
from diffllm.core.files.records import read_ending, stopped_text
from diffllm.core.printing import echo


def announce(jobs: list[Job], directory: SweepDirectory) -> None:
    """Say how many runs there are, and which are finished."""
    done = [job for job in jobs if job.finished]
    others = f", {len(done)} of them finished" if done else ""
    echo(f"sweep {directory.path}: {len(jobs)} runs{others}", flush=True)
    for job in done:
        ended = read_ending(Path(job.path)) or {}
        how = "diverged, stopped" if ended.get("stopped") else "is finished"
        echo(f"{job.path} {how}: {ended.get('steps')} steps", flush=True)


def report(jobs: list[Job], endings: dict[str, Ending], directory: SweepDirectory) -> int:
    """Print a line a run and, if some have not ended, how to go on; return how many."""
    width = max(len(job.path) for job in jobs)
    echo()
    failed = unfinished = 0
    for job in jobs:
        ending = endings.get(job.name, Ending("not started"))
        try:
            summary = read_ending(Path(job.path))
        except CheckpointError as error:
            summary, ending = None, Ending("failed", str(error))
        if summary:
            result = loss_words(summary)
        else:
            unfinished += 1
            failed += ending.state == "failed"
            state = ending.state.replace("failed", "FAILED")
            result = ", ".join(filter(None, [state, ending.reason]))
        echo(f"{job.path:<{width}}  {result}")
        if ending.state == "failed":
            echo(f"{'':<{width}}  log {job.log}")
    if unfinished:
        echo(
            f"{unfinished} of {len(jobs)} runs did not finish"
            f"{f', {failed} failed' if failed else ''}; the same command with "
            f"run.sweep={directory.path.name} goes on with them, and `diffllm report "
            f"{directory.path}` compares the others"
        )
    return unfinished


def loss_words(summary: dict[str, Any]) -> str:
    """Say what the held-out loss of a run that has ended is, or that it diverged."""
    if summary.get("stopped"):
        return f"diverged, {stopped_text(summary)}"
    loss, bits = (summary.get(f"heldout_{name}") for name in ("loss", "bits_per_byte"))
    if loss is None or not math.isfinite(loss):
        return "diverged: no finite held-out loss"
    in_bits = "" if bits is None else f", {bits:.3f} bits a byte"
    return f"held-out loss {loss:.4f}{in_bits}"


def write_comparison(directory: Path) -> None:
    """Compare the sweep's runs here and in a page; that this fails is no failure of the sweep."""
    wanted = "comparison of the runs"
    try:
        from diffllm.compare.report import comparison_text, log_gaps, write_report

        echo(f"\n{comparison_text([directory])}\n")
        page, table = write_report([directory])
        echo(f"comparison {page}, {table}")
        wanted = "gaps in wandb"
        log_gaps([directory])
    except Exception as error:
        echo(f"no {wanted}: {' '.join(str(error).split()) or type(error).__name__}")
