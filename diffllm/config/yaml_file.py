"""A YAML file of a user's."""

from pathlib import Path
from typing import Any

import yaml

from diffllm.errors import ConfigError


def read_yaml(path: Path, called: str | None = None) -> tuple[Any, bytes]:
    """Return a file's content, and its bytes; raises ConfigError: one line.

    Args:
        called: what the error names it by; its path unless given.
    """
    called = called or str(path)
    try:
        text = path.read_bytes()
        return yaml.safe_load(text), text
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{called} is not YAML: {' '.join(str(error).split())}") from error
