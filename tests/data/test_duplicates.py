"""Documents with the same text, left out of a source or of a mixture."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_texts import sample_documents

from diffllm.core.errors import DataError
from diffllm.core.files.arrays import write_array
from diffllm.data import MixtureData, Prepared, prepare
from diffllm.data.config import DataConfig, SampleBy, SourceConfig
from diffllm.data.preparation import duplicates
from diffllm.data.preparation.config import PrepareConfig
from diffllm.data.preparation.duplicates import Hashes, write_left_out
from diffllm.data.preparation.encoding import left_out_path
from diffllm.data.text import files
from diffllm.data.text.corpus import Corpus, TextsPart

MakeConfig = Callable[..., DataConfig]


def documents_of(data: Prepared, split: str) -> list[str]:
    tokenizer, stream = data.tokenizer(), data.split(split)
    tokens = stream.tokens(0, len(stream))
    ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
    return [tokenizer.decode(part.tolist()) for part in np.split(tokens, ends)[:-1]]


def all_documents(data: Prepared) -> list[str]:
    return documents_of(data, "train") + documents_of(data, "heldout")


def test_each_text_is_there_once(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in parts, several processes, with blank documents among them."""
    monkeypatch.setattr(files, "PART_BYTES", 8_000)
    texts = sample_documents(150)
    some = [*texts, *texts[:60], "", " ", *texts[30:90]]
    random.Random(0).shuffle(some)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in some))
    cfg = make_config(tmp_path / "a.jsonl", deduplicate=True, heldout_fraction=0.2)
    data = prepare(cfg, PrepareConfig(processes=3))
    assert sorted(all_documents(data)) == sorted(texts)
    first_seen = [text for text in dict.fromkeys(some) if text.strip()]
    for split in ("train", "heldout"):
        found = documents_of(data, split)
        assert found == [text for text in first_seen if text in set(found)]
    assert data.manifest.skipped_duplicates == 120
    assert data.manifest.skipped_empty == 2
    plain = prepare(replace(cfg, deduplicate=False))
    assert plain.directory != data.directory
    assert len(all_documents(plain)) == 270


def test_a_text_of_two_sources_stays_with_the_first(
    tmp_path: Path, make_config: MakeConfig
) -> None:
    texts = sample_documents(120)
    for name, own in (("a", texts[:80]), ("b", texts[50:] + texts[100:])):
        (tmp_path / f"{name}.txt").write_text("\n".join(own))

    def source(name: str) -> SourceConfig:
        paths = [str(tmp_path / f"{name}.txt")]
        return SourceConfig(source="files", paths=paths, sample_by=SampleBy.line)

    def mixture(*names: str) -> MixtureData:
        sources = {name: source(name) for name in names}
        data = prepare(make_config(source="mixture", sources=sources, deduplicate=True))
        assert isinstance(data, MixtureData)
        return data

    data = mixture("a", "b")
    assert sorted(all_documents(data.sources["a"])) == sorted(texts[:80])
    assert sorted(all_documents(data.sources["b"])) == sorted(texts[80:])
    assert data.manifest.skipped_duplicates == 30 + 20
    data = mixture("b", "a")
    assert sorted(all_documents(data.sources["b"])) == sorted(texts[50:])
    assert sorted(all_documents(data.sources["a"])) == sorted(texts[:50])


def test_a_source_that_repeats_another_is_refused(tmp_path: Path, make_config: MakeConfig) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n".join(sample_documents(40)))
    paths = {name: [str(tmp_path / f"{name}.txt")] for name in "ab"}
    sources = {
        name: SourceConfig(source="files", paths=paths[name], sample_by=SampleBy.line)
        for name in "ab"
    }
    with pytest.raises(DataError, match="fewer than two documents that differ are left"):
        prepare(make_config(source="mixture", sources=sources, deduplicate=True, vocab_size=300))


@given(
    corpora=st.lists(st.lists(st.lists(st.integers(0, 30), max_size=12)), min_size=1, max_size=4),
    at_once=st.integers(1, 40),
)
@settings(max_examples=60)
def test_what_is_left_out_is_what_a_set_has_seen(
    tmp_path_factory: pytest.TempPathFactory, corpora: list[list[list[int]]], at_once: int
) -> None:
    directory = tmp_path_factory.mktemp("hashes")
    seen: set[int] = set()
    hashed, expected = [], []
    for i, parts in enumerate(corpora):
        own = Corpus("", "", lambda parts=parts: [TextsPart("", [])] * len(parts))
        hashes = Hashes(own, directory / str(i))
        hashes.directory.mkdir()
        expected = []
        for number, part in enumerate(parts):
            spread = np.array([value * 2**59 % 2**64 for value in part], dtype=np.uint64)
            write_array(hashes.path(number), spread)
            expected.append([])
            for place, value in enumerate(spread.tolist()):
                if value in seen:
                    expected[-1].append(place)
                seen.add(value)
        hashed.append(hashes)
    (directory / "out").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "AT_ONCE", at_once)
        write_left_out(hashed, directory / "out")
    found = [np.load(left_out_path(directory / "out", i)).tolist() for i in range(len(expected))]
    assert found == expected
