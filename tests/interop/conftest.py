"""Fixtures: a tokenizer, and run directories with random weights."""

import pytest
from runs.written import small_tokenizer, write_weights


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Return the path of a small sentencepiece model."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(small_tokenizer())
    return path


@pytest.fixture
def make_run(tokenizer, tmp_path):
    """Return a function that writes run directories with random weights for a config."""
    return lambda name, *words: write_weights(tmp_path / name, tokenizer.read_bytes(), *words)
