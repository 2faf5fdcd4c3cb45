"""A corpus from a YAML of one's own: data=FILE.yaml, as overrides."""

import json
from typing import Any

from diffllm.config.overrides import check_shared
from diffllm.config.yaml_file import read_yaml
from diffllm.data.config import check_sizes
from diffllm.errors import ConfigError
from diffllm.files import user_path

SUFFIXES = (".yaml", ".yml")


def with_recipes(words: list[str]) -> list[str]:
    """Replace data=FILE.yaml by the overrides that the file stands for; raises ConfigError."""
    return [part for word in words for part in overrides_of(word)]


def overrides_of(word: str) -> list[str]:
    """The overrides of a word: itself, unless it names a file."""
    key, _, value = word.partition("=")
    if key != "data" or not value.endswith(SUFFIXES) or "," in value:
        return [word]
    content, _ = read_yaml(user_path(value, key))
    if not content:
        raise ConfigError(f"{word} is empty; it needs keys of data, such as sources")
    # Hydra needs about 10 ms per entry, so count the entries before composing.
    sizes = (content.get(key) for key in ("sources", "curriculum"))
    check_sizes(*(len(each) if isinstance(each, dict | list) else 0 for each in sizes))
    source = content.pop("source", "mixture" if "sources" in content else None)
    words = [f"data={source}"] if source else []
    words += [f"data.{name}={as_text(value)}" for name, value in content.items()]
    check_shared(words, word)
    return words


def as_text(value: Any) -> str:
    """A YAML's value in the words of an override."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{quoted}'"
    return json.dumps(value, default=str)
