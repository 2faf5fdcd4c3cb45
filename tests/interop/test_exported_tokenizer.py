"""A fast tokenizer gives the same ids as its sentencepiece model."""

import random

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiers import slow_but

from diffllm.core.errors import DataError
from diffllm.data.tokenizer import Tokenizer
from diffllm.interop.export import fast_tokenizer

PIECES = (
    "\u2581", " ", "  ", "\n", "\r\n", "\t", "\0", "\x7f", "\U0001f600", "é", "e\u0301", "中", "ﬁ",
    "</s>", "<s>", "<unk>", "<0x0A>", "def ", "return", "    ", "aaaa", "abab", "ab", "a", "0",
    "12", "_", "==", "(", "):", "\u200b", "\ufeff", "\U0010ffff",
)  # fmt: skip


def drawn(rng: random.Random) -> str:
    """Draw a text of odd pieces, of any characters, or of repeated characters."""
    kind, size = rng.randrange(4), rng.randrange(30)
    if kind == 0:
        return "".join(rng.choices(PIECES, k=size))
    if kind == 1:
        ranges = ((0, 127), (0, 0xD7FF), (0xE000, 0x10FFFF))
        return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(size))
    if kind == 2:
        return rng.choice(" aA0_-=\n\t.x") * size + rng.choice(PIECES)
    return "".join(rng.choices("abdefnrtu _=.\n", k=size))


@pytest.mark.parametrize("number", slow_but([0], range(50)))
def test_exported_fast_tokenizer_matches_tokenizer_of_run(tokenizer, number, rng):
    texts = [drawn(rng) for _ in range(5_000)]
    slow, fast = Tokenizer.from_file(tokenizer), fast_tokenizer(tokenizer)
    encoded = fast.encode_batch(texts, add_special_tokens=False)
    expected = slow.encode_batch(texts, threads=1)
    wrong = [t for t, a, b in zip(texts, expected, encoded, strict=True) if a != b.ids]
    assert wrong == []
    assert fast.decode_batch([each.ids for each in encoded]) == texts


def test_export_raises_data_error_if_tokenizer_is_not_bpe(tmp_path):
    with (tmp_path / "unigram.model").open("wb") as model:
        SentencePieceTrainer.train(
            sentence_iterator=iter([f"words of text {i}" for i in range(200)]),
            model_writer=model, vocab_size=40, model_type="unigram", minloglevel=2,
        )  # fmt: skip
    assert SentencePieceProcessor(model_file=str(tmp_path / "unigram.model"))
    with pytest.raises(DataError, match="because it is not a BPE model"):
        fast_tokenizer(tmp_path / "unigram.model")
