"""state.json of a checkpoint: everything of a run's state that is no tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.checkpoint.manifest import FORMAT, named_step, reading, shown, verify
from diffllm.core.errors import CheckpointError
from diffllm.data.mixture.place import check_place
from diffllm.metrics.spikes import SpikeMonitor

if TYPE_CHECKING:
    from torch import Tensor

PARTS = {
    "step": (int,), "ranks": (int,), "parameters": (dict,), "loop": (dict, type(None)),
}  # fmt: skip
"""The entries of state.json, and their types; without a loop there are parameters alone."""


def faults(path: Path, checksums: bool = True) -> list[str]:
    """Return what keeps a run from going on from a checkpoint: the faults of its files, a phrase a
    file, or of its state; empty for one that is whole.

    Args:
        checksums: read every file; without, only its size is looked at.
    """
    if problems := verify(path, checksums):
        return problems
    try:
        check_loop(path, read_state(path))
    except CheckpointError as error:
        return [str(error).removeprefix(f"{path} is not a checkpoint: ")]
    return []


def read_state(path: Path) -> dict[str, Any]:
    """Read the JSON part of a checkpoint; raises CheckpointError if it is not one of ours."""
    with reading(path, "state.json") as state:
        if state.get("format") != FORMAT:
            raise ValueError(f"is not of format {FORMAT}, the one this version reads")
        for name, kinds in PARTS.items():
            if name not in state or type(state[name]) not in kinds:
                raise ValueError(f"has no {name}")
        if state["step"] != (step := named_step(path, state["step"])):
            raise ValueError(f"is of step {state['step']}, not of the {step} in its name")
        if state["ranks"] < 1:
            raise ValueError("has no ranks")
        return state


def check_loop(path: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a run can go on from the loop state in `state`; a checkpoint of
    parameters alone has none."""
    loop = state["loop"]
    if loop is None:
        return
    run_id, seconds = loop.get("wandb_id"), loop.get("seconds", 0.0)
    mode = loop.get("mkl_mode", "")
    wrong = {
        "step": type(loop.get("step")) is not int or loop["step"] != state["step"],
        "data": not is_place(loop.get("data")),
        "order": not isinstance(loop.get("order"), dict),
        "spikes": not are_spikes(loop.get("spikes")),
        "wandb_id": "wandb_id" not in loop
        or (run_id is not None and not re.fullmatch(r"[\w-]{1,64}", str(run_id))),
        "compiled": type(loop.get("compiled")) not in (bool, type(None)),
        "mkl_mode": type(mode) is not str or not mode.isprintable() or len(mode) > 1000,
        "seconds": type(seconds) not in (int, float) or not 0 <= seconds < 2**63,
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise CheckpointError(f"{path} is not a checkpoint: state.json has no usable loop.{name}")


def is_place(data: Any) -> bool:
    """Whether a loader can resume from this place."""
    try:
        check_place(data)
    except ValueError:
        return False
    return True


def are_spikes(values: Any) -> bool:
    """Whether a monitor of spikes can go on from these values."""
    if not isinstance(values, dict) or not numbers_only(values):
        return False
    monitor = SpikeMonitor()
    try:
        monitor.load_state_dict(values)
        monitor.update(1.0, 1.0)
        monitor.metrics()
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    return True


def numbers_only(value: Any) -> bool:
    """Whether a JSON value holds numbers and nulls at its ends, none of them text."""
    if isinstance(value, dict | list):
        return all(map(numbers_only, value.values() if isinstance(value, dict) else value))
    return value is None or type(value) in (int, float)


def check_parameters(path: Path, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless a checkpoint's state names just these parameters and shapes."""
    saved = state["parameters"]
    here = {name: list(param.shape) for name, param in params.items()}
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f"{path} is a checkpoint of another model: {shown(name)} is "
                f"{shown(saved.get(name, 'absent'))} there and {here.get(name, 'absent')} here"
            )
