"""The lines that begin a sweep, and the table and the lines that end it."""

import json
import math
from pathlib import Path

from diffllm.sweep.job import Ending, Job
from diffllm.sweep.plan import SweepDirectory


def announce(jobs: list[Job], directory: SweepDirectory) -> None:
    """Say how many runs there are, and which are finished."""
    done = [job for job in jobs if job.finished]
    others = f", {len(done)} of them finished" if done else ""
    print(f"sweep {directory.path}: {len(jobs)} runs{others}", flush=True)
    for job in done:
        print(f"{job.path} is finished: {job.steps} steps", flush=True)


def report(jobs: list[Job], endings: dict[str, Ending], directory: SweepDirectory) -> int:
    """Print a line a run and, if some are not finished, how to go on; return how many."""
    width = max(len(job.path) for job in jobs)
    print()
    failed = unfinished = 0
    for job in jobs:
        ending = endings.get(job.name, Ending("not started"))
        if job.has_summary:
            summary = json.loads(Path(job.path, "summary.json").read_text())
            loss = summary["heldout_loss"]
            sound = loss is not None and math.isfinite(loss)
            bits = summary.get("heldout_bits_per_byte")
            in_bits = f", {bits:.3f} bits a byte" if bits is not None else ""
            said = f"held-out loss {loss:.4f}{in_bits}"
            result = said if sound else "diverged: no finite held-out loss"
        else:
            unfinished += 1
            failed += ending.state == "failed"
            state = ending.state.replace("failed", "DIVERGED" if job.diverged else "FAILED")
            result = ", ".join(filter(None, [state, ending.reason]))
        print(f"{job.path:<{width}}  {result}")
        if ending.state == "failed":
            print(f"{'':<{width}}  log {job.log}")
    if unfinished:
        print(
            f"{unfinished} of {len(jobs)} runs did not finish"
            f"{f', {failed} failed' if failed else ''}; the same command with "
            f"run.sweep={directory.path.name} goes on with them, and `diffllm report "
            f"{directory.path}` compares the others"
        )
    return unfinished


def write_comparison(directory: Path) -> None:
    """Compare the sweep's runs here and in a page; that this fails is no failure of the sweep."""
    wanted = "comparison of the runs"
    try:
        from diffllm.report import comparison_text, log_gaps, write_report

        print(f"\n{comparison_text([directory])}\n")
        page, table = write_report([directory])
        print(f"comparison {page}, {table}")
        wanted = "gaps in wandb"
        log_gaps([directory])
    except Exception as error:
        print(f"no {wanted}: {' '.join(str(error).split()) or type(error).__name__}")
