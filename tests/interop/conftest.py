"""A tokenizer, and runs of weights alone."""

import pytest
from runs.written import small_tokenizer, write_weights


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The file of a small sentencepiece model."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(small_tokenizer())
    return path


@pytest.fixture
def make_run(tokenizer, tmp_path):
    """A function that makes a run directory of a config, with weights drawn for it."""
    return lambda name, *words: write_weights(tmp_path / name, tokenizer.read_bytes(), *words)
