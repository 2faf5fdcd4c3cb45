"""The files of a tokenizer, wherever they lie."""

import contextlib
import json
import os
import re
from pathlib import Path

from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.files import open_regular, read_bytes, readable, replace_file
from diffllm.data.verified import usable

MODEL, FAST, FAST_CONFIG = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
"""The file of a sentencepiece model; that of a Hugging Face tokenizer, and the one beside it that
names the token which ends a document."""
TOKENIZER_FILES = (MODEL, FAST, FAST_CONFIG)
LARGEST_TOKENIZER = 2**30
"""Limit in bytes; of 256,000 pieces the largest have a thirtieth of it."""


def located(name: str | Path) -> Path:
    """Return a tokenizer's file: itself, the one in a directory, or that of a hub's repository.

    Raises DataError where there is none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if (file := tokenizer_in(path)).is_file():
            return located(file)
        raise DataError(f"{path} has neither {MODEL} nor {FAST}")
    if path.is_file():
        with usable(path), open_regular(path, LARGEST_TOKENIZER, follow=True):
            return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or path.suffix in (".model", ".json"):
        raise DataError(f"{path}: no such tokenizer file")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        with contextlib.suppress(EntryNotFoundError):
            hf_hub_download(str(name), FAST_CONFIG)
        return Path(hf_hub_download(str(name), FAST))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{name}: no such tokenizer here, and from the hub: {reason}") from error


def tokenizer_in(directory: Path) -> Path:
    """Return the file of the tokenizer in a directory of tokens, a run or a model."""
    fast = directory / FAST
    return fast if fast.is_file() else directory / MODEL


def tokenizer_of(run: Path) -> Path:
    """Return the tokenizer's file in a run; raises CheckpointError where there is none, or what is
    there is no file of the run's own."""
    for name in (FAST, MODEL):
        if os.path.lexists(run / name):
            with readable(run / name):
                open_regular(run / name, LARGEST_TOKENIZER).close()
            return run / name
    raise CheckpointError(f"{run} has no {MODEL}")


def check_tokenizer(path: Path) -> None:
    """Raise DataError unless a tokenizer's file in the cache can be read."""
    with usable(path, path.parent), open_regular(path, LARGEST_TOKENIZER, follow=True):
        pass


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Read what makes up the tokenizer of `path`, by the names that it has in a directory."""
    with usable(path):
        content = read_bytes(path, LARGEST_TOKENIZER, follow=True)
    if path.suffix != ".json":
        return {MODEL: content}
    from diffllm.data.fast_tokenizer import FastTokenizer

    config = json.dumps({"eos_token": FastTokenizer(path).eos_token}) + "\n"
    return {FAST: content, FAST_CONFIG: config.encode()}


def write_tokenizer(path: Path, directory: Path) -> None:
    for name, content in tokenizer_files(path).items():
        replace_file(directory / name, content)
