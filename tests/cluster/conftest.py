"""Import path of this folder's helpers, and a corpus."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # nodes.py, slurm.py

from runs.command import write_corpus


@pytest.fixture(scope="session")
def cluster_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))
