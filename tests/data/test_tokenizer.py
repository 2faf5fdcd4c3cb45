import hashlib
import inspect
import io
import linecache
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from diffllm.core.errors import DataError
from diffllm.data import tokenizer
from diffllm.data.preparation.prepare import train_tokenizer, training_sample
from diffllm.data.text.corpus import Corpus, TextsPart
from diffllm.data.tokenizer import Tokenizer, write_tokenizer

CODE = [inspect.getsource(module) for module in (inspect, hashlib, linecache, io)]


def sample(texts: list[str | None], size: int) -> Iterator[str]:
    """Yield a training sample of texts, in two parts."""
    half = len(texts) // 2
    parts = [TextsPart("first", texts[:half]), TextsPart("second", texts[half:])]
    return training_sample(Corpus("", "", lambda: parts), size)


@pytest.fixture(scope="module")
def code_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "code.model"
    path.write_bytes(train_tokenizer(sample(CODE, 200_000), 1000, threads=2))
    return Tokenizer.from_file(path)


@given(text=st.text())
@example("a\u2581b\u2581\u2581 c \u2581")
@example("def f():\n    return 1\n\n\n\tx\r\n")
@example("<0x41></s><unk><s>")
@example("\x00\ufeff \u2047 \u2585 \u00a0\ufb01e\u0301")
@example("")
@settings(max_examples=100)
def test_sentencepiece_tokenizer_decodes_encoded_text_exactly(code_tokenizer, text):
    ids = code_tokenizer.encode(text)
    assert code_tokenizer.decode(ids) == text
    assert code_tokenizer.eos_id not in ids


@given(texts=st.lists(st.text(alphabet="ab \n\u2581é"), max_size=6))
def test_encode_batch_returns_same_ids_as_encode(code_tokenizer, texts):
    assert code_tokenizer.encode_batch(texts, threads=2) == [
        code_tokenizer.encode(text) for text in texts
    ]


@given(
    text=st.text(alphabet="abdef():,=_. \n\t0129\u2581é\U0001f600", max_size=300)
    | st.sampled_from(CODE).map(lambda text: text[:3000])
)
@settings(max_examples=50)
def test_splitting_of_long_text_does_not_change_token_ids(code_tokenizer, text):
    """Parts have at least 8 characters and end at allowed cuts."""
    whole = code_tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PART_CHARACTERS", 8)
        cut = code_tokenizer._parts(text)
        assert "".join(cut) == text
        assert all(len(part) >= 8 for part in cut[:-1])
        assert code_tokenizer.encode(text) == whole
        assert code_tokenizer.encode_batch([text, "ab", text], 2) == [
            whole, code_tokenizer.encode("ab"), whole,
        ]  # fmt: skip


def test_long_text_is_not_split_if_tokenizer_normalises_text(tmp_path, monkeypatch):
    foreign = Tokenizer.from_file(_train(tmp_path / "foreign.model"))
    monkeypatch.setattr(tokenizer, "PART_CHARACTERS", 8)
    text = "Two  words and\nmore of them, again and again."
    assert foreign._parts(text) == [text]


def test_trained_tokenizer_does_not_depend_on_thread_count(tmp_path):
    hashes = set()
    for threads in (1, 2):
        path = tmp_path / f"{threads}.model"
        path.write_bytes(train_tokenizer(sample(CODE, 100_000), 600, threads))
        hashes.add(Tokenizer.from_file(path).pieces_hash)
    assert len(hashes) == 1


def test_tokenizer_hash_depends_on_vocabulary_and_normalisation(tmp_path):
    plain = _train(tmp_path / "plain.model")
    more_pieces = _train(tmp_path / "more.model", vocab_size=401)
    same_pieces = sentencepiece_model_pb2.ModelProto.FromString(plain.read_bytes())
    same_pieces.normalizer_spec.add_dummy_prefix = True
    prefixing = tmp_path / "prefixing.model"
    prefixing.write_bytes(same_pieces.SerializeToString())
    models = (plain, more_pieces, prefixing)
    assert len({Tokenizer.from_file(model).pieces_hash for model in models}) == 3


def _train(path: Path, **options: object) -> Path:
    model = io.BytesIO()
    defaults = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CODE[0].splitlines()),
        model_writer=model,
        minloglevel=2,
        **{**defaults, "add_dummy_prefix": False, **options},
    )
    path.write_bytes(model.getvalue())
    return path


def test_tokenizer_training_sample_is_balanced_over_documents():
    documents = [chr(97 + i) * 10_000 for i in range(20)] + [None]
    taken = "".join(sample(documents, 80_000))
    assert len(taken) == pytest.approx(80_000, rel=0.1)
    counts = {letter: taken.count(letter) for letter in set(taken)}
    assert len(counts) == 20
    assert max(counts.values()) <= 4096 * 2


def test_chosen_eos_of_sentencepiece_model_is_kept_in_copies(tmp_path):
    model = _train(tmp_path / "tokenizer.model", eos_id=-1, control_symbols=["<end>"])
    with pytest.raises(DataError, match=r"data.eos_token='a' must be a control token of .*'<end>'"):
        Tokenizer.from_file(model, "a")
    chosen = Tokenizer.from_file(model, "<end>")
    assert chosen.piece(chosen.eos_id) == "<end>"
    assert chosen.decode([*chosen.encode("a <end>"), chosen.eos_id]) == "a <end>"
    assert not chosen.spells_eos
    (tmp_path / "copy").mkdir()
    write_tokenizer(model, tmp_path / "copy", "<end>")
    copied = Tokenizer.from_file(tmp_path / "copy")
    assert (copied.eos_id, copied.pieces_hash) == (chosen.eos_id, chosen.pieces_hash)


@given(text=st.text(alphabet="ab \n\u2581é\U0001f600", max_size=40) | st.sampled_from(CODE[:1]))
@example("\u2581")
@example(" \u2581 a")
def test_dummy_prefix_is_one_token_prefix_that_decoding_removes(text):
    tokenizer = prefixing_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if "\u2581" not in text:  # sentencepiece itself would read U+2581 as a space
        assert ids == tokenizer._processor.encode(text)


def test_tokenizer_model_without_eos_is_refused(tmp_path):
    no_eos = _train(tmp_path / "no_eos.model", eos_id=-1)
    with pytest.raises(DataError, match=r"no_eos.model: the tokenizer has no end-of-sentence"):
        Tokenizer.from_file(no_eos)


@cache
def prefixing_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as place:
        options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        model = _train(Path(place) / "m.model", add_dummy_prefix=True, **options)
        return Tokenizer.from_file(model)


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (50_000, r"vocab_size=50000 does not fit .*too high .* a value <= \d+"),
        (100, r"vocab_size=100 does not fit .* smaller than required_chars\. 100 vs \d+"),
    ],
)
def test_error_of_invalid_vocab_size_contains_the_violated_limit(vocab_size, message):
    with pytest.raises(DataError, match=message) as caught:
        train_tokenizer(sample(CODE, 50_000), vocab_size, threads=2)
    limit = int(re.findall(r"\d+", str(caught.value))[-1])
    train_tokenizer(sample(CODE, 50_000), limit + (vocab_size < limit), threads=2)
