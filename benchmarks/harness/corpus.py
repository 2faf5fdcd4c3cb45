"""Prepare the corpus of the training run, for a machine that cannot tokenize.

    python benchmarks/harness/corpus.py

The text and its tokens are written to gpu-data/, which git ignores. The cache key of tokens depends
on the content of the text, so another machine can use a copy without the datasets library.
"""

import json
import sysconfig
from pathlib import Path

from diffllm.config import load_config
from diffllm.data.preparation.prepare import prepare
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
"""Overrides that select the corpus."""


def main() -> None:
    """Write the first CHARACTERS of the standard library's source files, and tokenize the text."""
    text, size = FOLDER / "text.jsonl", 0
    if not text.exists():
        FOLDER.mkdir(exist_ok=True)
        partial = text.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8") as file:
            for source in python_files(Path(sysconfig.get_path("stdlib"))):
                document = source.read_bytes().decode("utf-8", errors="ignore")
                file.write(json.dumps({"text": document}) + "\n")
                if (size := size + len(document)) > CHARACTERS:
                    break
        partial.rename(text)
    prepare(load_config(WORDS).data)
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(f"{FOLDER}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
