"""Disks of a few kilobytes, for tests that fill them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a size such as "64k" at a new directory; skip the test if denied."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
