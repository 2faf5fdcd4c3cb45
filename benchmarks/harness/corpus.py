"""The corpus of the training run, for a machine that cannot prepare it.

    python benchmarks/harness/corpus.py

writes text and its prepared tokens into gpu-data/, which git ignores. A run finds tokens by the
text's content, so the other machine tokenises nothing and needs no datasets library.
"""

import json
import sysconfig
from pathlib import Path

from diffllm.config import load_config
from diffllm.data import prepare
from diffllm.data.text.packages import python_files

FOLDER = Path(__file__).parents[2] / "gpu-data"
CHARACTERS = 4_000_000
WORDS = [
    "data=files",
    f"data.paths=[{FOLDER / 'text.jsonl'}]",
    f"data.cache_dir={FOLDER / 'cache'}",
    "data.vocab_size=2048",
    "data.tokenizer_sample_bytes=8000000",
    "data.heldout_fraction=0.1",  # more than one sequence of 4,096 tokens
]
"""Overrides that name the corpus."""


def write_text(path: Path) -> None:
    """The first source files of the standard library, one a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size, partial = 0, path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for source in python_files(Path(sysconfig.get_path("stdlib"))):
            text = source.read_bytes().decode("utf-8", errors="ignore")
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > CHARACTERS:
                break
    partial.rename(path)


def make() -> Path:
    """Write all that a run reads, but for what is there already; return the folder."""
    text = FOLDER / "text.jsonl"
    if not text.exists():
        write_text(text)
    prepare(load_config(WORDS).data)
    return FOLDER


if __name__ == "__main__":
    files = [path for path in make().rglob("*") if path.is_file()]
    print(f"{FOLDER}: {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
