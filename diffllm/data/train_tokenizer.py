"""Training the tokenizer: byte-fallback BPE over an even sample of the corpus."""

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from diffllm.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

WINDOW_BYTES = 4096

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


def training_sample(documents: "Dataset", sample_bytes: int) -> Iterator[str]:
    """Yield about `sample_bytes` of text, in windows that lie evenly over the whole corpus."""
    import pyarrow.compute

    lengths = pyarrow.compute.binary_length(documents.data.column("text")).fill_null(0)
    ends = np.cumsum(lengths.to_numpy(), dtype=np.int64)
    total = int(ends[-1])
    windows = -(-min(sample_bytes, total) // WINDOW_BYTES)
    for window in range(windows):
        position = window * total // windows
        document = int(np.searchsorted(ends, position, side="right"))
        encoded = documents[document]["text"].encode()
        start = position - int(ends[document] - len(encoded))
        yield encoded[start : start + WINDOW_BYTES].decode(errors="ignore")


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
