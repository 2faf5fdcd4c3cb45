"""Compiled graphs that measurements share, and that can be copied to another machine."""

import tarfile
from pathlib import Path

from harness.process import ROOT

FOLDER = ROOT / "gpu-cache"
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder."""
ARCHIVE = "compiled.tar.gz"
PARTS = ("aotautograd", "fxgraph")
"""Subfolders to copy; `fxgraph` also contains the Triton kernels of each graph."""


def restore(folder: Path) -> None:
    """Unpack the folder's archive, unless the folder already contains graphs."""
    archive = folder / ARCHIVE
    if archive.exists() and not any((folder / part).exists() for part in PARTS):
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError) as error:
            print(f"{archive} is damaged and is not used: {error}")


def pack(folder: Path, archive: Path) -> None:
    """Write the graphs in `folder` to a compressed archive."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        for part in PARTS:
            if (folder / part).exists():
                packed.add(folder / part, part)
