"""Registration of config dataclasses in Hydra's ConfigStore."""

from collections.abc import Callable
from typing import TypeVar

from hydra.core.config_store import ConfigStore

T = TypeVar("T", bound=type)


def schema(group: str, name: str, package: str | None = None) -> Callable[[T], T]:
    """Register the decorated dataclass as ``<group>/<name>_schema`` for YAML defaults lists."""

    def register(cls: T) -> T:
        ConfigStore.instance().store(
            group=group, name=f"{name}_schema", node=cls, package=package or group
        )
        return cls

    return register
