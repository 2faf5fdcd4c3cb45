"""Checkpoints: written in the background, visible only when complete."""

from diffllm.checkpoint.config import CheckpointConfig
from diffllm.checkpoint.directory import find_checkpoint, list_checkpoints, newest_good, step_of
from diffllm.checkpoint.manifest import verify
from diffllm.checkpoint.reader import load_tensors
from diffllm.checkpoint.state_file import check_loop, check_parameters, faults, read_state
from diffllm.checkpoint.writer import Checkpointer

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "check_loop",
    "check_parameters",
    "faults",
    "find_checkpoint",
    "list_checkpoints",
    "load_tensors",
    "newest_good",
    "read_state",
    "step_of",
    "verify",
]
