"""A tokenizer, and runs of weights alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from runs.written import small_tokenizer, write_weights

MakeRun = Callable[..., Path]
"""Makes a run directory from a name and the words of a config."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small sentencepiece model."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(small_tokenizer())
    return path


@pytest.fixture
def make_run(tokenizer: Path, tmp_path: Path) -> MakeRun:
    """A function that makes a run directory of a config, with weights drawn for it."""
    return lambda name, *words: write_weights(tmp_path / name, tokenizer.read_bytes(), *words)
