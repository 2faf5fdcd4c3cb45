"""Tokenizers of Hugging Face's library: exact decoding, no special tokens from text."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs.json_files import read_json, write_json

from diffllm.core.errors import ConfigError, DataError
from diffllm.data.preparation.prepare import prepare
from diffllm.data.tokenizer import (
    FastTokenizer,
    Tokenizer,
    guesses_eos,
    located,
    tokenizer_files,
    tokenizer_in,
)

tokenizers = pytest.importorskip("tokenizers")
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def fast(byte_level: Path) -> Tokenizer:
    return Tokenizer.from_file(byte_level)


def test_tokenizer_loads_from_json_file_or_from_directory(byte_level, fast):
    assert isinstance(fast, FastTokenizer)
    again = Tokenizer.from_file(byte_level / "tokenizer.json")
    assert again.pieces_hash == fast.pieces_hash
    assert (fast.vocab_size, fast.eos_id, fast.piece(1)) == (600, 1, END)


@given(text=st.text())
@example(f"one{END}two<pad>")
@example("def f():\n    return 1\n\n\n\tx\r\n" * 3)
@settings(max_examples=100)
def test_fast_tokenizer_decodes_its_tokens_to_the_original_text(fast, text):
    ids = fast.encode(text)
    assert fast.decode(ids) == text
    assert not {0, 1} & set(ids), "text must not encode to special tokens"
    assert fast.encode_batch([text, "a"], 2) == [ids, fast.encode("a")]
    assert fast.decode([*ids, fast.eos_id]) == text


def test_prepare_accepts_gaps_between_token_ids(byte_level, tmp_path, corpus_file, make_config):
    content = read_json(byte_level / "tokenizer.json")
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {k: 3 * i if i > 1 else i for k, i in vocabulary.items()}
    write_json(tmp_path / "tokenizer.json", content)
    cfg = make_config(corpus_file, tokenizer=str(tmp_path))
    data, tokenizer = prepare(cfg), Tokenizer.from_file(tmp_path)
    assert data.manifest.vocab_size == tokenizer.vocab_size == 3 * 599 + 1
    assert 0 < data.manifest.heldout_unigram_entropy < 8
    stream = data.split("train")
    tokens = stream.tokens(0, len(stream))
    assert set(tokens[tokens > 1] % 3) == {0}
    assert tokens.max() > 600
    assert tokenizer.decode([4, *tokens.tolist()]) == tokenizer.decode(tokens.tolist())
    assert corpus_file.read_text(encoding="utf-8").splitlines()[3] in tokenizer.decode(
        tokens.tolist()
    )


@pytest.mark.parametrize("said", ["<pad>", {"content": "<pad>", "special": True}])
def test_tokenizer_config_json_determines_the_eos_token(byte_level, tmp_path, said):
    (tmp_path / "tokenizer.json").write_text(
        (byte_level / "tokenizer.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": said})
    other = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert other.eos_id == 0
    assert other.pieces_hash != Tokenizer.from_file(byte_level).pieces_hash


def write_letters(place: Path, special: list[str], ordinary: list[str]) -> Path:
    """Write a tokenizer.json of single bytes with special and ordinary added tokens."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *ordinary])}
    letters = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = tokenizers.decoders.ByteLevel()
    letters.add_special_tokens(special)
    letters.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ordinary])
    place.mkdir()
    letters.save(str(place / "tokenizer.json"))
    return place / "tokenizer.json"


@pytest.mark.parametrize(
    ("special", "ordinary", "said"),
    [
        (["<pad>", "<eos>"], ["</s>"], "<eos>"),
        (["<|end_of_text|>", "<|eot_id|>"], [], "<|end_of_text|>"),
        (["<pad>"], ["</s>", "<eos>"], r"contains no EOS .* special; special tokens: '<pad>'; set"),
        ([], ["</s>"], r"special tokens: \(no tokens\); set the token"),
        (["<|endoftext|>", "<|im_end|>"], ["a"], r"several .*: '<\|endoftext\|>', '<\|im_end"),
    ],
)
def test_eos_without_config_is_the_only_usual_special_token(tmp_path, special, ordinary, said):
    path = write_letters(tmp_path / "letters", special, ordinary)
    assert guesses_eos(str(path), None)
    if said in special:
        assert Tokenizer.from_file(path).eos_token == said
    else:
        with pytest.raises(DataError, match=said) as caught:
            Tokenizer.from_file(path)
        assert "data.eos_token='<...>'" in str(caught.value)
    for token in special:
        chosen = Tokenizer.from_file(path, token)
        assert (chosen.eos_token, chosen.piece(chosen.eos_id)) == (token, token)
    assert not guesses_eos(str(path), "<pad>")
    with pytest.raises(DataError, match=r"no EOS '<none>'; set data.eos_token to a token of the"):
        Tokenizer.from_file(path, "<none>")


def test_every_document_of_corpus_with_tags_ends_with_one_eos(tmp_path, make_config):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"price <s>{i}</s> <eos>\n" for i in range(300)), encoding="utf-8")
    path = write_letters(tmp_path / "letters", ["<pad>", "<eos>"], ["</s>"])
    directories = set()
    for eos_token, eos_id in ((None, 1), ("<eos>", 1), ("<pad>", 0)):
        data = prepare(make_config(corpus, tokenizer=str(path), eos_token=eos_token))
        stream, split = data.split("train"), data.manifest.splits["train"]
        assert data.manifest.eos_id == data.tokenizer().eos_id == eos_id
        assert (stream.tokens(0, len(stream)) == eos_id).sum() == split.documents
        directories.add(data.directory)
    assert len(directories) == 2, "a guessed and an equal chosen EOS share the cache"
    cfg = make_config(corpus, tokenizer=str(path), eos_token="</s>")
    with pytest.raises(DataError, match=r"the text '</s>' encodes to the EOS, so a document"):
        prepare(cfg)
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"the text '</s>' encodes to the EOS, so a document"):
        prepare(make_config(corpus, tokenizer=str(path)))


def test_data_eos_token_needs_data_tokenizer(corpus_file, make_config):
    with pytest.raises(ConfigError, match=r"data.eos_token=<eos> needs data.tokenizer"):
        prepare(make_config(corpus_file, eos_token="<eos>"))


def test_copied_tokenizer_files_load_as_the_same_tokenizer(byte_level, tmp_path):
    for name, content in tokenizer_files(byte_level / "tokenizer.json").items():
        (tmp_path / name).write_bytes(content)
    copied = Tokenizer.from_file(tokenizer_in(tmp_path))
    assert copied.pieces_hash == Tokenizer.from_file(byte_level).pieces_hash
    assert read_json(tmp_path / "tokenizer_config.json") == {"eos_token": END}


def test_missing_tokenizer_raises_error_with_path_or_repository_name(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"tokenizer\.model: no such tokenizer file"):
        located(tmp_path)
    with pytest.raises(DataError, match=r"a/b\.model: no such tokenizer file"):
        located("a/b.model")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: 1 / 0)
    with pytest.raises(DataError, match="owner/name is not a local tokenizer, and the download"):
        located("owner/name")
