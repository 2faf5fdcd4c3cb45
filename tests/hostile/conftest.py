"""Copies of valid directories."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffllm.data import verified
from hostile.places import PLACES


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a directory of PLACES once per session."""
    directories: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in directories:
            directories[name] = tmp_path_factory.mktemp(name) / name
            directories[name].mkdir()
            PLACES[name](directories[name])
        return directories[name]

    return write


@pytest.fixture
def copy(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a new copy of a directory of PLACES."""

    def new(name: str) -> Path:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        return shutil.copytree(written(name), tmp_path / name)

    return new


@pytest.fixture(autouse=True, scope="session")
def no_wait() -> Any:
    """Do not wait for a clock tick before files are rewritten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified, "TICK", 0)
        yield
