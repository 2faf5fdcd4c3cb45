from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory, and return its path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
