"""Tokenising a corpus, beside the tokenizer alone and beside `datasets.map`.

    python benchmarks/preparation.py [--paths a.parquet ...] [--text-column text] [--megabytes 60]
        [--parts 32] [--turns 3] [--without-fast] [--json FILE]

Every way encodes the same text with the same tokenizer and takes its turn in each round, so that a
ratio compares what ran side by side; it is the median over rounds. "alone" is the library's own
batch call on texts that are in memory, in as many threads as there are processes: its ids are
thrown away. "prepare" is `diffllm prepare`: it reads files, chooses what is held out, writes
shards and hashes them. "datasets.map" writes its ids into an Arrow file. A process has a core of
its own. Without --paths the text is the standard library's, written as parquet.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from measuring import markdown, write

from diffllm.data.config import DataConfig
from diffllm.data.preparation import tokens
from diffllm.data.preparation.config import PrepareConfig
from diffllm.data.preparation.prepare import prepare
from diffllm.data.preparation.workers import available_cores
from diffllm.data.text import files
from diffllm.data.text.corpus import open_corpus
from diffllm.data.tokenizer import Tokenizer

VOCABULARY = 8192
GROUP = 50
"""Documents of a row group."""


def corpus_of(cfg: DataConfig, directory: Path, megabytes: float) -> tuple[DataConfig, list[str]]:
    """Write so much text of a corpus as one parquet file; return its config and the texts."""
    texts: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        for text in open_corpus(cfg, directory).texts():
            texts.append(text)
            size += len(text.encode())
            if size >= megabytes * 1e6:
                break
    path = directory / "corpus.parquet"
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())})
    pyarrow.parquet.write_table(table, path, row_group_size=GROUP, compression="zstd")
    return DataConfig(source="files", paths=[str(path)], vocab_size=VOCABULARY), texts


def fast_tokenizer(texts: list[str], directory: Path) -> Path:
    """Train a byte-level BPE of Hugging Face's library, and return its file."""
    from tokenizers import ByteLevelBPETokenizer

    fast = ByteLevelBPETokenizer()
    fast.train_from_iterator(texts[:2000], VOCABULARY, special_tokens=["<|endoftext|>"])
    fast.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def prepared(cfg: DataConfig, tokenizer: Path, processes: int) -> Callable[[], None]:
    """Prepare the corpus in so many processes, into a new cache that knows its files' hashes."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as cache:
            prepare(
                DataConfig(**{**vars(cfg), "cache_dir": cache, "tokenizer": str(tokenizer)}),
                PrepareConfig(processes=processes),
            )

    return run


def alone(tokenizer: Path, texts: list[str], threads: int) -> Callable[[], None]:
    """Encode texts that are in memory by the library's own call."""
    loaded = Tokenizer.from_file(tokenizer)

    def sentencepiece() -> None:
        for batch in batches(texts):
            loaded._processor.encode(batch, num_threads=threads)

    def fast() -> None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        for batch in batches(texts):
            loaded._fast.encode_batch(batch, add_special_tokens=False)  # type: ignore[attr-defined]

    return fast if tokenizer.suffix == ".json" else sentencepiece


def mapped(cfg: DataConfig, tokenizer: Path, processes: int) -> Callable[[], None]:
    """Load the corpus and encode it by `datasets.map`, as its documentation shows it."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))

    def run() -> None:
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset(
                "parquet", data_files=cfg.paths, split="train", cache_dir=cache
            )
            rows.map(
                lambda batch: {"ids": fast(batch["text"])["input_ids"]},
                batched=True, num_proc=processes, remove_columns=["text"],
            )  # fmt: skip

    return run


def batches(texts: list[str], size: int = 1000) -> Iterator[list[str]]:
    """Yield texts in lists of so many."""
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def in_rounds(ways: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - started)
    return taken


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", nargs="*", default=[])
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--megabytes", type=float, default=60.0)
    parser.add_argument(
        "--parts", type=int, default=32, help="of the corpus: of few, the last wait"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--without-fast", action="store_true", help="sentencepiece alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = available_cores()
    counts = [n for n in (1, 2, 4, 8) if n <= cores]
    files.PART_BYTES = int(args.megabytes * 1e6 / args.parts)
    tokens.to_stderr = lambda _: None
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = {"source": "files", "paths": args.paths} if args.paths else {"source": "stdlib"}
        own = DataConfig(**source, text_column=args.text_column, vocab_size=VOCABULARY)
        cfg, texts = corpus_of(own, directory, args.megabytes)
        own_cache = DataConfig(**{**vars(cfg), "cache_dir": str(directory / "first")})
        model = prepare(own_cache).directory / "tokenizer.model"
        fast = fast_tokenizer(texts, directory)
        ways: dict[str, Callable[[], None]] = {}
        for n in counts:
            ways[f"sentencepiece alone, {n}"] = alone(model, texts, n)
            ways[f"sentencepiece prepare, {n}"] = prepared(cfg, model, n)
            if not args.without_fast:
                ways[f"fast prepare, {n}"] = prepared(cfg, fast, n)
                ways[f"fast datasets.map, {n}"] = mapped(cfg, fast, n)
        every = set(range(cores))
        for name, way in list(ways.items()):
            cpus = sorted(every)[: int(name.rpartition(" ")[2])]
            ways[name] = pinned(way, cpus)
        taken = in_rounds(ways, args.turns)
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        size = {
            model: sum(map(len, Tokenizer.from_file(model).encode_batch(texts, cores))),
            fast: sum(map(len, Tokenizer.from_file(fast).encode_batch(texts, cores))),
        }
    rows, results = [], {}
    for name, seconds in taken.items():
        n = int(name.rpartition(" ")[2])
        best = statistics.median(seconds)
        number = size[fast if name.startswith("fast") else model]
        results[name] = {
            "seconds": seconds, "MB/s a core": megabytes / best / n,
            "tokens/s a core": number / best / n,
        }  # fmt: skip
        rows.append(
            [name, f"{best:.1f}", f"{megabytes / best / n:.2f}", f"{number / best / n:,.0f}"]
        )
    print(markdown(["way, processes", "s", "MB/s a core", "tokens/s a core"], rows))
    ratios = dict(compared(taken, counts))
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    if args.json:
        write(args.json, torch.device("cpu"), results, megabytes=megabytes, ratios=ratios)


def pinned(way: Callable[[], None], cpus: list[int]) -> Callable[[], None]:
    """Let a way run on these cores only."""

    def run() -> None:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)
        try:
            way()
        finally:
            os.sched_setaffinity(0, before)

    return run


def compared(taken: dict[str, list[float]], counts: list[int]) -> Iterator[tuple[str, float]]:
    """Yield speeds over each other, medians over rounds."""

    def ratio(slow: str, fast: str, scale: float = 1.0) -> float:
        pairs: Any = zip(taken[slow], taken[fast], strict=True)
        return statistics.median(a / b * scale for a, b in pairs)

    for n in counts:
        yield (
            f"prepare over sentencepiece alone, {n}",
            ratio(f"sentencepiece alone, {n}", f"sentencepiece prepare, {n}"),
        )
        if f"fast prepare, {n}" in taken:
            yield (
                f"prepare over datasets.map, {n}",
                ratio(f"fast datasets.map, {n}", f"fast prepare, {n}"),
            )
    for few, many in pairwise(counts):
        yield (
            f"efficiency from {few} to {many}",
            ratio(f"sentencepiece prepare, {few}", f"sentencepiece prepare, {many}", few / many),
        )


if __name__ == "__main__":
    main()
