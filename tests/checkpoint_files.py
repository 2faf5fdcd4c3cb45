"""Checkpoints that hold no tensors, and ways to damage any."""

import json
import os
from pathlib import Path

from diffllm.checkpoint.manifest import FORMAT, describe, write_manifest
from diffllm.metrics.spikes import SpikeMonitor


def write_checkpoint(directory: Path, step: int, **parts: object) -> Path:
    """A whole checkpoint of a run directory's `checkpoints/`, as far as its manifest goes.

    Args:
        parts: of state.json, over those of an empty run.
    """
    path = directory / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"no index")
    state = {"format": FORMAT, "step": step, "parameters": {}, "ranks": 1, "loop": loop_of(step)}
    (path / "state.json").write_text(json.dumps({**state, **parts}))
    sign(path)
    return path


def loop_of(step: int) -> dict[str, object]:
    """The loop state of a run that has seen no data."""
    spikes = SpikeMonitor().state_dict()
    return {"step": step, "data": {}, "order": {}, "spikes": spikes, "wandb_id": None}


def sign(path: Path) -> None:
    """Make the manifest agree with the files, as whoever forges a checkpoint would."""
    files = describe(file for file in path.iterdir() if file.name != "manifest.json")
    step = int(path.name.removeprefix("step-"))
    write_manifest(path, step, files)


def flip_bit(file: Path) -> None:
    """One bit in the middle; size and time of the file stay."""
    about, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
