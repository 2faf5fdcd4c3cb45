"""Formats of local files, by their names."""

import os
from pathlib import Path

from diffllm.errors import DataError

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def format_of(path: Path) -> str:
    """Return the format of a file by its name: parquet, json or text; raises DataError."""
    stem, suffix = os.path.splitext(path.name.lower())
    compressed = suffix in COMPRESSIONS
    if compressed:
        suffix = os.path.splitext(stem)[1]
    if suffix not in FORMATS or (compressed and suffix == ".parquet"):
        raise DataError(
            f"{path}: unsupported format; use .parquet, or .jsonl, .json, .txt and these with "
            ".gz or .zst"
        )
    return FORMATS[suffix]
