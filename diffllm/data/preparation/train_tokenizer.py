"""Training the tokenizer: byte-fallback BPE over an even sample of the corpus."""

import io
import re
from collections.abc import Iterator
from typing import Any

from diffllm.core.errors import DataError
from diffllm.data.text.corpus import Corpus, Part, TextBatch

WINDOW_BYTES = 4096
READ_FOR_SAMPLE = 8
"""Bytes of a large corpus that are read for one in the sample."""
MOST_PARTS = 64
"""Parts of a large corpus that are read for a sample."""

# Llama's settings, but for line breaks, which may be part of a piece: a break and the indentation
# after it are then one or two tokens (README.md has the measurements).
TRAINING: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "max_sentencepiece_length": 32,
    "max_sentence_length": 8 * WINDOW_BYTES,
    "unk_id": 0,
    "eos_id": 1,
    "bos_id": -1,
    "pad_id": -1,
}


def train_tokenizer(sample: Iterator[str], vocab_size: int, threads: int) -> bytes:
    """Train a sentencepiece model of exactly `vocab_size` pieces; return it serialised.

    The pieces depend on the text of `sample` and on `vocab_size` alone. Raises DataError for a
    corpus that cannot fill, or does not fit, a vocabulary of that size.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=sample,
            model_writer=model,
            vocab_size=vocab_size,
            num_threads=threads,
            minloglevel=2,
            **TRAINING,
        )
    except RuntimeError as error:
        raise DataError(_training_error(vocab_size, str(error))) from error
    return model.getvalue()


def training_sample(corpus: Corpus, sample_bytes: int) -> Iterator[str]:
    """Yield about `sample_bytes` of text, in windows that lie evenly over the text that is read.

    That is the whole corpus while it is small; of a large one it is the beginnings of parts that
    lie evenly over it.
    """
    number = min(len(corpus.parts), MOST_PARTS)
    parts = [corpus.parts[i * len(corpus.parts) // number] for i in range(number)]
    limit = -(-READ_FOR_SAMPLE * sample_bytes // max(number, 1))
    total = sum(len(text) for part in parts for text in beginning(part, limit))
    windows = -(-min(sample_bytes, total) // WINDOW_BYTES)
    window = end = 0
    for part in parts:
        for text in beginning(part, limit):
            begin, end = end, end + len(text)
            while window < windows and (place := window * total // windows) < end:
                start = place - begin
                yield text[start : start + WINDOW_BYTES].decode(errors="ignore")
                window += 1


def beginning(part: Part, limit: int) -> Iterator[bytes]:
    """Yield the texts of a part, in UTF-8, until there are so many bytes."""
    read = 0
    for documents in part.read():
        for text in filter(None, texts_of(documents)):
            encoded = text.encode()
            yield encoded
            read += len(encoded)
            if read >= limit:
                return


def texts_of(documents: TextBatch) -> list[str | None]:
    """Return the texts of documents and then their prompts; one of several pieces is one text."""
    before = documents.before
    texts = [
        "".join((*pieces, text or "")) if len(pieces) > 1 else text
        for pieces, text in zip(before, documents.texts, strict=True)
    ]
    return [*texts, *(pieces[0] for pieces in before if len(pieces) == 1)]


def _training_error(vocab_size: int, message: str) -> str:
    if limit := re.search(r"set it to a value <= (\d+)", message):
        return (
            f"data.vocab_size={vocab_size} is more than this corpus can fill; "
            f"the largest that works is {limit[1]}"
        )
    if needed := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"data.vocab_size={vocab_size} is too small for this corpus: "
            f"bytes and single characters alone need {int(needed[1]) + 1}"
        )
    return f"training a tokenizer of data.vocab_size={vocab_size} pieces failed: {message}"
