"""Token files of other libraries are read in place, with the tokens that were written."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs.json_files import read_json, write_json

from diffllm.core.errors import ConfigError, DataError
from diffllm.data.config import DataConfig
from diffllm.data.imported import FilesStream, ImportedData
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import TokenData
from diffllm.data.token_files import MAGIC, MEGATRON_HEADER, TokenFile, WithEnds, open_tokens

FILES = Path(__file__).parents[1] / "data_files" / "imported"
NAMES = ["megatron_uint16.bin", "megatron_int32.bin", "datatrove_2.ds", "datatrove_4.ds"]
DOCUMENTS = read_json(FILES / "documents.json")
ALL = np.concatenate(DOCUMENTS)
EOS = 1

Make = Callable[..., DataConfig]


@pytest.fixture
def make_config(prepared: TokenData, tmp_path: Path) -> Make:
    """Make configs for token files, with a tokenizer of 400 pieces; piece 1 is the EOS."""

    def config(*paths: Path, **changes: Any) -> DataConfig:
        options: dict[str, Any] = {
            "source": "tokens",
            "paths": [str(path) for path in paths],
            "tokenizer": str(prepared.directory / "tokenizer.model"),
            "heldout_fraction": 0.1,
            "vocab_size": 400,
            "cache_dir": str(tmp_path / "cache"),
        }
        return DataConfig(**{**options, **changes})

    return config


def copy_file(name: str, directory: Path) -> Path:
    """Copy a token file and its index to a new directory."""
    directory.mkdir(exist_ok=True)
    for path in FILES.glob(f"{Path(name).stem}.*"):
        shutil.copy(path, directory)
    return directory / name


@pytest.mark.parametrize("name", NAMES)
def test_imported_token_file_has_the_tokens_of_all_documents(name):
    file = open_tokens(FILES / name, 400, EOS)
    assert len(file) == len(ALL)
    assert file.documents == len(DOCUMENTS)
    assert np.array_equal(file.tokens(0, len(file)), ALL)
    ends = np.cumsum([len(document) for document in DOCUMENTS])
    assert [file.end_of(i) for i in range(file.documents)] == ends.tolist()
    rng = np.random.default_rng(0)
    for start, stop in np.sort(rng.integers(0, len(ALL) + 1, (200, 2)), axis=1).tolist():
        assert np.array_equal(file.tokens(start, stop), ALL[start:stop])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_token_file_without_eos_gets_an_eos_after_every_document(lengths, data):
    documents = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths, start=1)]
    whole = [token for document in documents for token in [*document, EOS]]
    ends = np.cumsum(lengths)
    content = np.array([token for document in documents for token in document], np.int32)
    file = WithEnds(TokenFile(Path("f"), content, lambda i: ends[i], len(lengths), 90), EOS)
    assert len(file) == len(whole)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert file.tokens(start, stop).tolist() == whole[start:stop]


@pytest.mark.parametrize("names", [NAMES[:1], NAMES])
def test_prepare_uses_last_documents_of_token_files_as_heldout_split(make_config, names):
    data = prepare(make_config(*(FILES / name for name in names)))
    assert isinstance(data, ImportedData)
    train, heldout = data.split("train"), data.split("heldout")
    whole = np.tile(ALL, len(names))
    assert np.array_equal(train.tokens(0, len(train)), whole[: len(train)])
    assert np.array_equal(heldout.tokens(0, len(heldout)), whole[len(train) :])
    assert whole[len(train) - 1] == EOS
    assert 0.1 < len(heldout) / len(whole) <= 0.2, "the minimum of the split"
    splits = data.manifest.splits
    assert splits["train"].documents + splits["heldout"].documents == len(names) * len(DOCUMENTS)
    assert splits["heldout"].documents == (whole[len(train) :] == EOS).sum()
    counts = np.bincount(whole[len(train) :])
    shares = counts[counts > 0] / counts.sum()
    assert data.manifest.heldout_unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())
    assert list((data.directory).glob("*.bin")) == [], "tokens must not be copied"
    assert data.manifest.source == f"tokens of {', '.join(names[:3])}{', ...' * (len(names) > 3)}"


def test_corpus_identity_does_not_change_if_token_files_are_moved(make_config, tmp_path):
    first = prepare(make_config(FILES / NAMES[0]))
    moved = copy_file(NAMES[0], tmp_path / "moved")
    second = prepare(make_config(moved))
    assert second.directory == first.directory
    assert second.paths == (str(moved),)
    (tmp_path / "moved" / "README.md").write_text("Tokens.", encoding="utf-8")
    assert prepare(make_config(tmp_path / "moved")) == second
    reason = "not a .bin or .ds file"
    listing = second.directory / "skipped.txt"
    assert listing.read_text(encoding="utf-8") == f"{tmp_path / 'moved' / 'README.md'}: {reason}\n"
    assert np.array_equal(second.split("heldout").tokens(0, 9), first.split("heldout").tokens(0, 9))


def write_index(path: Path, lengths: np.ndarray) -> None:
    """Write the index of a file of 2-byte tokens with documents of these lengths."""
    ends = np.cumsum(lengths)
    if path.suffix == ".ds":
        ends.astype("<u8").tofile(path.with_name(f"{path.name}.index"))
        return
    head = MEGATRON_HEADER.pack(MAGIC, 1, 8, len(lengths), len(lengths) + 1)
    places, firsts = 2 * (ends - lengths), np.arange(len(lengths) + 1)
    content = lengths.astype("<i4").tobytes() + np.append(places, firsts).astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + content)


@pytest.mark.parametrize("name", ["t.bin", "t.ds"])
@pytest.mark.parametrize("ended", [True, False])
def test_document_count_equals_eos_count_with_empty_documents(make_config, tmp_path, name, ended):
    lengths = np.tile([3, 5, 0, 2, 4, 0, 0], 30)
    tokens = [7] * lengths.sum()
    for end in np.cumsum(lengths):
        tokens[end - 1] = EOS if ended else 7
    np.array(tokens, "<u2").tofile(tmp_path / name)
    write_index(tmp_path / name, lengths)
    data = prepare(make_config(tmp_path / name))
    for split, counts in data.manifest.splits.items():
        stream = data.split(split)
        assert counts.documents == (stream.tokens(0, len(stream)) == EOS).sum() > 0
    # Without EOS in the file, every document of the index gets an EOS, also empty documents.
    expected = (lengths > 0).sum() if ended else len(lengths)
    assert sum(counts.documents for counts in data.manifest.splits.values()) == expected


def test_empty_document_in_megatron_index_becomes_a_single_eos(make_config, tmp_path):
    lengths = np.full(30, 4, "<i4")
    places, firsts = 8 * np.arange(30), [0, 0, *range(31)]  # the first two contain no sequence
    head = MEGATRON_HEADER.pack(MAGIC, 1, 8, 30, len(firsts))
    index = head + lengths.tobytes() + np.append(places, firsts).astype("<i8").tobytes()
    (tmp_path / "t.idx").write_bytes(index)
    np.full(120, 7, "<u2").tofile(tmp_path / "t.bin")
    train = prepare(make_config(tmp_path / "t.bin")).split("train")
    expected = np.append([EOS, EOS], np.tile([7, 7, 7, 7, EOS], 30))
    assert np.array_equal(train.tokens(0, len(train)), expected[: len(train)])


@pytest.mark.parametrize("name", ["t.bin", "t.ds"])
def test_document_counts_match_index_if_documents_have_several_eos(make_config, tmp_path, name):
    (tmp_path / "several").mkdir()
    paths = [tmp_path / name, tmp_path / "several" / name]
    for path, document in zip(paths, ([7, EOS], [7, EOS] * 5), strict=True):
        np.array(document * 20, "<u2").tofile(path)
        write_index(path, np.full(20, len(document)))
    data = prepare(make_config(*paths, heldout_fraction=0.52))
    counts = {split: counts.documents for split, counts in data.manifest.splits.items()}
    # 116 tokens: 20 documents of the first file, 7 documents of 10 tokens, and a part of the next.
    assert len(data.split("train")) == 116
    assert counts == {"train": 20 + 8, "heldout": 13}, "the cut document counts in both splits"


@pytest.mark.parametrize("name", ["t.bin", "t.ds"])
def test_stream_raises_data_error_if_token_file_index_changes(make_config, tmp_path, name):
    lengths, path = np.arange(20, 60), tmp_path / name
    np.full(lengths.sum(), 7, "<u2").tofile(path)
    write_index(path, lengths)
    before = prepare(make_config(path))
    train = before.split("train")
    edited = np.concatenate([lengths[:10], lengths[20:9:-1], lengths[21:]])
    write_index(path, edited)
    for read in (lambda: before.split("heldout"), lambda: train.tokens(0, len(train))):
        with pytest.raises(DataError, match=r"was changed while|changed after it was opened"):
            read()
    after = prepare(make_config(path))
    assert after.manifest.corpus != before.manifest.corpus
    assert after.directory != before.directory
    write_index(path, lengths)
    assert prepare(make_config(path)).manifest == before.manifest


@pytest.mark.parametrize("ends", [[3, 1, 9], [9, 9, 9], [0, 0, 9], [2**62, 4, 9], [5, -1, 9]])
def test_invalid_document_ends_never_cause_a_wrong_token_count(ends):
    content = np.arange(9, dtype=np.int32)
    file = WithEnds(TokenFile(Path("f"), content, lambda i: np.array(ends)[i], len(ends), 90), EOS)
    for start in range(len(file)):
        with suppress(DataError):
            assert len(file.tokens(start, len(file))) == len(file) - start


def test_token_source_reads_diffllm_shards_in_original_directory(make_config, prepared):
    data = prepare(make_config(prepared.directory, tokenizer=None))
    assert type(data) is TokenData
    assert data.directory == prepared.directory.absolute()


def test_eos_token_of_config_must_be_the_eos_of_token_shards(make_config, prepared):
    same = prepare(make_config(prepared.directory, eos_token="</s>"))
    assert same.directory == prepared.directory
    with pytest.raises(DataError, match=r"data.eos_token=<s> cannot change the EOS '</s>' of the"):
        prepare(make_config(prepared.directory, eos_token="<s>"))


def test_token_source_ignores_obsolete_field_of_old_manifest(make_config, tmp_path, prepared):
    old = shutil.copytree(prepared.directory, tmp_path / "old")
    content = read_json(old / "manifest.json")
    write_json(old / "manifest.json", {**content, "skipped_duplicates": 7})
    data = prepare(make_config(old, tokenizer=None))
    assert data.manifest == prepared.manifest
    for split in ("train", "heldout"):
        expected, stream = prepared.split(split), data.split(split)
        assert np.array_equal(stream.tokens(0, len(stream)), expected.tokens(0, len(expected)))


def test_token_files_of_another_tokenizer_raise_data_error(tmp_path):
    stream = FilesStream("train", [str(FILES / NAMES[0])], (250, EOS), 0, len(ALL))
    with pytest.raises(DataError, match=r"megatron_uint16.bin: token id 2\d\d is not in .* 250"):
        stream.tokens(0, len(ALL))
    np.array([5, EOS, 5, 6], "<u2").tofile(tmp_path / "half.ds")
    write_index(tmp_path / "half.ds", np.array([2, 2]))
    with pytest.raises(DataError, match="1 of 2 documents end with token 1"):
        open_tokens(tmp_path / "half.ds", 400, EOS)


def test_token_source_refuses_missing_tokenizer_or_token_files(make_config, tmp_path):
    with pytest.raises(DataError, match=r"data\.tokenizer=null is not supported with data=tokens"):
        prepare(make_config(FILES / NAMES[0], tokenizer=None))
    with pytest.raises(ConfigError, match=r"source=tokens needs data\.paths"):
        prepare(make_config())
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"neither a \.bin or \.ds file nor"):
        prepare(make_config(tmp_path / "a.txt"))
