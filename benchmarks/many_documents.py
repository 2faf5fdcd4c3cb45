"""Memory of a preparation by the number of documents, which are made as they are read.

    python benchmarks/many_documents.py [--documents 1e6 1e7 1e8] [--json FILE]

Everything is that of `diffllm prepare` but the text and the tokenizer: a document is a number of
two digits, and its tokens are its digits' codes, so that documents cost next to nothing and very
many can be had. Each number of documents is prepared by a process of its own, whose peak of
resident memory, and that of the largest of its workers, is what the kernel has counted.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from measuring import markdown, write

from diffllm.data.preparation import tokens
from diffllm.data.preparation.config import PrepareConfig
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.text.corpus import Corpus, TextBatch

PART = 1_000_000
"""Documents of a part."""


class Numbers:
    """A part whose documents are numbers."""

    def __init__(self, number: int, documents: int) -> None:
        self.name, self.size = f"numbers, part {number}", documents
        self._start = number * PART

    def read(self) -> Iterator[TextBatch]:
        """Yield the numbers, some at a time."""
        for start in range(self._start, self._start + self.size, 1000):
            stop = min(start + 1000, self._start + self.size)
            yield TextBatch([str(i % 100) for i in range(start, stop)])


class Digits:
    """Stands in for a tokenizer: a token for each digit."""

    vocab_size, eos_id, pieces_hash = 300, 10, "digits"

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Return the digits' codes."""
        return [list(text.encode()) for text in texts]


def prepare(documents: int) -> dict[str, float]:
    """Prepare so many documents; return seconds, and peaks of memory in MiB."""
    parts = [Numbers(i, min(PART, documents - i * PART)) for i in range(-(-documents // PART))]
    tokens.Tokenizer.from_file = lambda path: Digits()  # type: ignore[assignment, method-assign]
    tokens.write_tokenizer = lambda path, directory: None
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus("numbers", f"{documents} numbers", lambda: parts)
        TokensJob(corpus, Path(), 0.1, Path(name) / "tokens").build(PrepareConfig())
    own, of_workers = (
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {
        "documents": documents, "seconds": time.perf_counter() - started,
        "peak_mib": own, "peak_of_a_worker_mib": of_workers,
    }  # fmt: skip


def main() -> None:
    """Measure each number of documents in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(prepare(args.only)))
        return
    results = []
    for documents in map(int, args.documents):
        words = [sys.executable, __file__, "--only", str(documents)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout))
    rows = [
        [f"{r['documents']:,}", f"{r['seconds']:.0f}", f"{r['peak_mib']:.0f}",
         f"{r['peak_of_a_worker_mib']:.0f}"]
        for r in results
    ]  # fmt: skip
    print(markdown(["documents", "s", "peak, MiB", "peak of a worker, MiB"], rows))
    if args.json:
        write(args.json, torch.device("cpu"), results)


if __name__ == "__main__":
    main()
