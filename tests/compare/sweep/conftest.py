from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_workplace(workplace: Path) -> None:
    """Run all tests of sweeps in an empty directory."""
