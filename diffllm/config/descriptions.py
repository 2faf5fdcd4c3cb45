"""One line that explains a variant."""

import inspect
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from diffllm.config.compose import hydra
from diffllm.model.attention.base import AttentionConfig


def variant_line(name: str, config: AttentionConfig) -> str:
    """The comment at the top of the variant's YAML, else the first sentence about its config's
    class; empty where there is neither."""
    return yaml_comment("attention", name) or first_paragraph(type(config))


@cache
def yaml_comment(group: str, name: str) -> str:
    """The lines that begin with # at the top of a choice's YAML, its package left out, as one."""
    for directory in config_directories():
        file = directory / group / f"{name}.yaml"
        if file.is_file():
            return comment(file.read_text())
    return ""


def comment(text: str) -> str:
    """The first lines of a YAML as far as they are comments, as one; indented ones are commands."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("# @package", "#  ")):
            lines.append(line.lstrip("# "))
    return " ".join(lines)


def first_paragraph(cls: type) -> str:
    """A class's own docstring up to an empty line, as one line; a dataclass that has none gets its
    signature as one, which says nothing."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("\n\n")[0]
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split())


def config_directories() -> Iterator[Traversable]:
    """The directories that Hydra composes a config from, in its order."""
    with hydra() as loader:
        places = [each.path for each in loader.get_search_path().get_path()]
    for place in places:
        scheme, _, path = place.rpartition("://")
        if scheme == "pkg" and path != "hydra.conf":
            yield files(path)
        elif scheme in ("", "file"):
            yield Path(path)
