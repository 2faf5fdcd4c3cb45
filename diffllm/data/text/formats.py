"""Formats of local files, by their names."""

import os
from pathlib import Path

from diffllm.core.errors import DataError

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FORMATS = {**dict.fromkeys((*JSON_LINES, ".json"), "json"), ".txt": "text"}
FORMATS = {".parquet": "parquet", **TEXT_FORMATS}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def format_of(path: Path) -> str:
    """Return the format of a file by its name: parquet, json or text; raises DataError."""
    stem, suffix = os.path.splitext(path.name.lower())
    compressed = suffix in COMPRESSIONS
    if compressed:
        suffix = os.path.splitext(stem)[1]
    if suffix not in (TEXT_FORMATS if compressed else FORMATS):
        known = f"use .parquet, or {', '.join(TEXT_FORMATS)} and these with .gz or .zst"
        raise DataError(f"{path}: unsupported format; {known}")
    return FORMATS[suffix]
