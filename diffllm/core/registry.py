"""Registries to which plugins can add config dataclasses and text sources."""

from collections.abc import Callable
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore

from diffllm.core.errors import ConfigError

T = TypeVar("T", bound=type)
Source = TypeVar("Source", bound=Callable[..., Any])

SCHEMAS: dict[tuple[str, str], type] = {}
SOURCES: dict[str, Callable[..., Any]] = {}


def schema(group: str, name: str, package: str | None = None) -> Callable[[T], T]:
    """Return a class decorator that registers a config dataclass as ``<group>/<name>_schema``.

    YAML files of the group contain ``<name>_schema`` in their defaults list.
    `diffllm.core.keys.key` declares the fields of the dataclass. A field with a plain default takes
    over the declaration and the bounds of the same field in the base class. Raises ConfigError if
    another class is registered as `name` in `group`.

    Args:
        group: Hydra config group, such as "attention".
        package: Hydra package, such as "model.attention"; None means the same as `group`.
    """

    def register(cls: T) -> T:
        check_free(f"the {group} {name}", SCHEMAS.get((group, name)), cls)
        SCHEMAS[group, name] = cls
        ConfigStore.instance().store(
            group=group, name=f"{name}_schema", node=cls, package=package or group
        )
        return cls

    return register


def source(name: str) -> Callable[[Source], Source]:
    """Return a decorator that registers a function as the text source ``data.source=<name>``.

    The function takes the DataConfig and the cache directory, and returns a Corpus of
    `diffllm.data.text.corpus`. Raises ConfigError if another function has the same name.
    """

    def register(function: Source) -> Source:
        check_free(f"the data source {name}", SOURCES.get(name), function)
        SOURCES[name] = function
        return function

    return register


def check_free(entry: str, registered: Any, new: Any) -> None:
    # Names instead of objects: a reloaded module registers new objects with the same names.
    existing = registered or new
    first = f"{existing.__module__}.{existing.__qualname__}"
    second = f"{new.__module__}.{new.__qualname__}"
    if first != second:
        raise ConfigError(
            f"{entry} is registered twice, by {first} and {second}; rename one of them"
        )
