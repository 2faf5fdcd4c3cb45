"""A directory that one process at a time may use."""

from pathlib import Path

from filelock import FileLock, Timeout

from diffllm.errors import ConfigError


def hold(path: Path, what: str, instead: str) -> FileLock:
    """Make the directory and keep other processes out until this one ends.

    Args:
        what: it is, for messages.
        instead: what to choose where it cannot be written.

    Raises:
        ConfigError: another process is there, or the directory cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"{what} {path} is in use by another process") from None
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be written ({error.strerror}); choose {instead}"
        ) from error
    return lock
