"""Commands that need packages which diffllm does not come with."""

from collections.abc import Iterator
from contextlib import contextmanager

from diffllm.core.errors import ConfigError


@contextmanager
def needing_interop(command: str) -> Iterator[None]:
    """Import in this context what a command needs of diffllm[interop]; raises ConfigError where it
    is not installed."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"diffllm {command} needs diffllm[interop], transformers 5: {error}"
        ) from error
