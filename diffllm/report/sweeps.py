"""What a sweep's own record says that its runs cannot."""

from pathlib import Path

from diffllm.errors import CheckpointError
from diffllm.report.find import is_run
from diffllm.report.runs import read_object

NAMES = 8
"""How many runs a note names."""


def sweep_notes(sweep: Path) -> list[str]:
    """The planned runs of sweep.json that have left nothing yet."""
    try:
        record = read_object(sweep / "sweep.json") or {}
    except CheckpointError as error:
        return [f"{error}: which runs have not started is unknown."]
    planned = record.get("runs")
    if not isinstance(planned, dict):
        return [f"{sweep}/sweep.json names no runs: which have not started is unknown."]
    waiting = [name for name in planned if not is_run(sweep / name)]
    if not waiting:
        return []
    more = f" and {len(waiting) - NAMES} more" if len(waiting) > NAMES else ""
    return [
        f"{len(waiting)} of {len(planned)} runs of {sweep} have not started: "
        f"{', '.join(waiting[:NAMES])}{more}."
    ]
