"""What the tests of real clusters need of the machine."""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # nodes.py, slurm.py

from integration.runs import write_corpus


def lacking(*programs: str) -> str | None:
    """Why the tests cannot run here."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [p for p in programs if not shutil.which(p, path=f"{os.environ['PATH']}:/usr/sbin")]
    return f"needs {', '.join(missing)}" if missing else None


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))
