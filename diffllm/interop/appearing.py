"""A directory that exists completely or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from diffllm.checkpoint.reader import reason
from diffllm.core.errors import ConfigError
from diffllm.core.files import publish, scratch_directory


def check_free(out: Path) -> None:
    """Raise ConfigError where something has the name already."""
    if os.path.lexists(out):
        raise ConfigError(f"out={out} is there already; choose a new directory")


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Create a hidden directory and rename it to `out` once all of its content is on disk; raises
    ConfigError if it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_directory(out) as scratch:
            yield scratch
            check_free(out)
            publish(scratch, out)
    except (OSError, SafetensorError, CheckpointException) as error:
        raise ConfigError(f"out={out} cannot be written: {reason(error)}") from error
