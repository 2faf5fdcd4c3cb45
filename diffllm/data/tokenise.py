"""Documents to token shards: choose what is held out, encode, write."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diffllm.data.corpus import Corpus
from diffllm.data.progress import track
from diffllm.data.shards import FORMAT_VERSION, Manifest, ShardWriter, token_dtype
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.tokenizer_files import tokenizer_in
from diffllm.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

BATCH_BYTES = 4_000_000
PIECE = 1_000_000


def write_tokens(
    corpus: Corpus, is_heldout: np.ndarray, directory: Path, cut: bool = False
) -> Manifest:
    """Tokenise `corpus` with the tokenizer in `directory`; write shards and manifest beside it.

    `is_heldout`, (documents,) bool, is what `choose_heldout` says of the corpus; with `cut` it is
    that of `cut_in_two`, whose documents are pieces of one.
    """
    tokenizer = Tokenizer.from_file(tokenizer_in(directory))
    documents = corpus.load()
    writers = {
        name: ShardWriter(directory, name, tokenizer.vocab_size) for name in ("train", "heldout")
    }
    ends = np.append(is_heldout[1:] != is_heldout[:-1], True) if cut else np.ones_like(is_heldout)
    done = 0
    with track("tokenising", len(is_heldout)) as advance:
        for texts in _batches(documents):
            encoded = tokenizer.encode_batch(texts, available_cores())
            chosen = is_heldout[done : done + len(texts)]
            for name, writer in writers.items():
                mine = np.flatnonzero(chosen == (name == "heldout"))
                writer.add(
                    [[*encoded[i], *[tokenizer.eos_id] * bool(ends[done + i])] for i in mine],
                    sum(len(texts[i].encode()) for i in mine),
                    int(ends[done + mine].sum()),
                )
            done += len(texts)
            advance(len(texts))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        source=corpus.description,
        corpus=corpus.identity,
        pieces_hash=tokenizer.pieces_hash,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(tokenizer.vocab_size).name,
        skipped_empty=corpus.skipped_empty + len(documents) - len(is_heldout),
        skipped_undecodable=corpus.skipped_undecodable,
        heldout_unigram_entropy=entropy(writers["heldout"].counts),
        splits={name: writer.finish() for name, writer in writers.items()},
        cut=cut,
    )
    manifest.save(directory)
    return manifest


def choose_heldout(documents: "Dataset", fraction: float) -> np.ndarray:
    """Choose held-out documents: bool, one for each that is more than whitespace, in order.

    The choice hangs on a hash of a document's text alone, so order does not matter and
    duplicates stay on one side. Each side gets at least one document; raises DataError where there
    are fewer than two distinct ones, which `cut_in_two` makes of a single one.
    """
    hashes = np.fromiter(
        (
            int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
            for texts in _batches(documents)
            for text in texts
        ),
        dtype=np.uint64,
    )
    if len(hashes) < 2 or hashes.min() == hashes.max():
        raise DataError(
            "the corpus has fewer than two distinct documents, too few to hold one out; "
            "cut txt files into more with data.sample_by=paragraph"
        )
    heldout = hashes < np.uint64(fraction * 2**64)
    if not heldout.any():
        heldout = hashes == hashes.min()
    if heldout.all():
        heldout = hashes != hashes.max()
    return heldout


def cut_in_two(corpus: Corpus, fraction: float) -> tuple[Corpus, np.ndarray] | None:
    """Cut a corpus of a single document into pieces, and say which of them are its end, held out.

    The end is `fraction` of the text, or a little more to begin with a line or a word. Pieces are
    short enough for the tokenizer, whose memory grows with its text. None for a corpus of several
    documents.
    """
    texts = _texts(corpus.load())
    text = next(texts, "")
    if not text or next(texts, None) is not None:
        return None
    end = len(text.rstrip())
    size = max(1, round(fraction * end))
    latest, earliest = end - size, max(0, end - 2 * size)
    cuts = (text.rfind(mark, earliest, latest) + 1 for mark in "\n ")
    cut = next((cut for cut in cuts if cut), latest)
    if text[:cut].isspace() or not cut:
        return None
    train, heldout = pieces_of(text[:cut]), pieces_of(text[cut:])
    blank = corpus.skipped_empty + len(corpus.load()) - 1
    parts = replace(corpus, load=lambda: _dataset_of(train + heldout), skipped_empty=blank)
    return parts, np.repeat([False, True], [len(train), len(heldout)])


def pieces_of(text: str) -> list[str]:
    """Cut a text into pieces of at most PIECE characters, after line breaks where there are some.

    Whitespace alone, which would be taken for an empty document, goes with the piece beside it.
    """
    pieces: list[str] = []
    start = 0
    while start < len(text):
        stop = start + PIECE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        piece = text[start:stop]
        if pieces and (piece.isspace() or pieces[-1].isspace()):
            pieces[-1] += piece
        else:
            pieces.append(piece)
        start = stop
    return pieces


def _dataset_of(texts: list[str]) -> "Dataset":
    from datasets import Dataset, Features, Value

    return Dataset.from_dict({"text": texts}, Features({"text": Value("large_string")}))


def _texts(documents: "Dataset") -> Iterator[str]:
    """Yield the texts that are more than whitespace, in order."""
    for row in documents:
        text = row["text"]
        if text and not text.isspace():
            yield text


def _batches(documents: "Dataset") -> Iterator[list[str]]:
    """Yield the texts that are more than whitespace, in order, in lists of about BATCH_BYTES."""
    batch: list[str] = []
    size = 0
    for rows in documents.iter(batch_size=64):
        texts = [text for text in rows["text"] if text and not text.isspace()]
        batch += texts
        size += sum(map(len, texts))
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def entropy(counts: np.ndarray) -> float:
    """Compute the entropy, in nats, of the distribution that counts (vocab_size,) describe."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def available_cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
