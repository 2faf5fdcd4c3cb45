"""The corpus of the training run: text and prepared tokens that travel to a machine without
the datasets library.

    python benchmarks/harness/corpus.py

writes them into gpu-data/, which git ignores. Tokens are found again by the text's content, so on
the other machine nothing is tokenised.
"""

import json
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)] * (__name__ == "__main__")

from diffllm.config import load_config  # noqa: E402
from diffllm.data import prepare  # noqa: E402
from diffllm.data.corpus import python_files  # noqa: E402

FOLDER = ROOT / "gpu-data"
TEXT_BYTES = 4_000_000
WORDS = [
    "data=files",
    f"data.paths=[{FOLDER / 'text.jsonl'}]",
    f"data.cache_dir={FOLDER / 'cache'}",
    "data.vocab_size=2048",
    "data.heldout_fraction=0.1",  # more than one sequence of 4,096 tokens
]
"""Overrides that name the corpus."""


def write_text(path: Path) -> None:
    """The first source files of the standard library, one a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        for source in python_files(Path(sysconfig.get_path("stdlib"))):
            text = source.read_bytes().decode("utf-8", errors="ignore")
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > TEXT_BYTES:
                return


def make() -> Path:
    """The folder, with all that a run reads; what is there already stays."""
    text = FOLDER / "text.jsonl"
    if not text.exists():
        write_text(text)
    prepare(load_config(WORDS).data)
    return FOLDER


if __name__ == "__main__":
    files = [path for path in make().rglob("*") if path.is_file()]
    print(f"{FOLDER}: {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
