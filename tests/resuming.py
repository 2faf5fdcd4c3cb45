"""A checkpoint into a model that is there already, as a run that continues does it."""

from pathlib import Path

from diffllm.checkpoint.state_file import check_loop, check_parameters, read_state
from diffllm.training.build import Training
from diffllm.training.resume import continued
from diffllm.training.state import LoopState, restore


def resume(t: Training, path: Path) -> LoopState:
    """Check a checkpoint, fill `t` from it, and return where its run stood."""
    saved = read_state(path)
    check_loop(path, saved)
    check_parameters(path, saved, t.params)
    state, _ = continued(path, saved, saved["loop"].get("order", {}), [])
    restore(t, state, path, saved["ranks"])
    return state
