"""The history of a run, as its directory contains it."""

from collections.abc import Iterator
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from diffllm.core.run_files import RunFile, logged_lines
from diffllm.metrics.steps import read_steps, step_values


def history(run: Path, last_step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each step up to `last_step` as wandb receives them, oldest first.

    If `last_step` is None, yield all steps. A line contains the step's row of steps.npy and its
    line of metrics.jsonl. In runs of older versions, only logged steps have a line. A missing file
    has no lines. Raises CheckpointError if a file cannot be read.
    """
    rows = step_values(read_steps(run / RunFile.STEPS, last_step))
    lines = logged_lines(run, last_step)
    # Of equal steps, `merge` yields the row first, so metrics.jsonl has precedence.
    for _, parts in groupby(merge(rows, lines, key=itemgetter("step")), itemgetter("step")):
        line: dict[str, Any] = {}
        for part in parts:
            line |= part
        yield line
