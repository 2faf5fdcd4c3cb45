"""Curves over all stages of a run that started with resume=stage:PATH."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from diffllm.compare.arms.directories import is_run
from diffllm.compare.arms.run import Run, load_run
from diffllm.compare.report.curves import Spike
from diffllm.compare.report.step_curves import StepCurve
from diffllm.core.errors import CheckpointError

MOST = 100
"""Largest number of stages; protects against a cycle of run directories."""


def stages_of(run: Run) -> list[tuple[Run, int]]:
    """Return the stages up to `run`, oldest first, with the tokens before each stage.

    The list begins after the newest stage whose directory is missing or damaged.
    """
    found = [(run, tokens_before(run))]
    while len(found) < MOST and (earlier := previous_run(found[0][0])):
        found.insert(0, (earlier, tokens_before(earlier)))
    return found


def tokens_before(run: Run) -> int:
    return (run.facts.get("previous") or {}).get("tokens") or 0


def previous_run(run: Run) -> Run | None:
    """Read the run whose checkpoint this run continued.

    Relative paths start at the current directory, or at the directory that contains `run`. Return
    None for a first stage, and if the previous run is missing or damaged.
    """
    if not (previous := run.facts.get("previous")):
        return None
    path = Path(previous["path"]).parent.parent
    places = [path, run.path.parent / path.name]
    found = (p for p in places if is_run(p) and p.resolve() != run.path.resolve())
    with suppress(CheckpointError):
        return next(map(load_run, found), None)
    return None


def over_stages(curves: list[StepCurve], starts: list[int]) -> StepCurve:
    """Return one curve over the tokens of all stages, from the curve of each stage.

    `starts` has the number of tokens before each stage, see `stages_of`.
    """
    ends = [*starts[1:], np.inf]
    parts = []
    for curve, start, end in zip(curves, starts, ends, strict=True):
        shifted = curve._replace(tokens=curve.tokens + start)
        # The next stage may start from a checkpoint before the end of this stage.
        earlier = shifted.tokens <= end
        parts.append([column[earlier] for column in shifted])
    return StepCurve(*map(np.concatenate, zip(*parts, strict=True)))


def spikes_over_stages(spikes_of_stages: list[list[Spike]], starts: list[int]) -> list[Spike]:
    """Return the spikes of all stages at the tokens of all stages; see `over_stages`."""
    ends = [*starts[1:], np.inf]
    shifted = []
    for spikes, start, end in zip(spikes_of_stages, starts, ends, strict=True):
        for spike in spikes:
            if spike.x + start <= end:
                shifted.append(spike._replace(x=spike.x + start, end=spike.end + start))
    return shifted
