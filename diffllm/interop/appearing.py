"""A directory that is there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from diffllm.checkpoint.reader import reason
from diffllm.errors import ConfigError
from diffllm.files import published


def check_free(out: Path) -> None:
    """Raise ConfigError where something has the name already."""
    if os.path.lexists(out):
        raise ConfigError(f"out={out} is there already; choose a new directory")


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Give a hidden directory that gets the name `out` once all of it is on disk; raises
    ConfigError where it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(mkdtemp(prefix=f".{out.name[:200]}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}") from error
    try:
        with published(hidden, out):
            yield hidden
            hidden.chmod(0o777 & ~umask())
            check_free(out)
    except (OSError, SafetensorError, CheckpointException) as error:
        raise ConfigError(f"out={out} cannot be written: {reason(error)}") from error


def umask() -> int:
    """Return the permissions that new files lack."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
