"""Odd and damaged corpora: each is used exactly as it is, or refused in a line that names it."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hostile import sources
from hostile.place import documents
from hostile.sources import Drawn
from sample_texts import sample_documents
from tiers import slow_but

from diffllm import load_config
from diffllm.core.errors import DataError, UserError
from diffllm.data import Prepared, prepare, verified
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.preparation import prepare as preparation
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.text import files
from diffllm.data.text.corpus import open_corpus
from diffllm.data.text.file_index import check_unchanged, file_facts

REWRITTEN = ("good jsonl", "good txt", "good json", "line_ends_in_texts jsonl")
FEW = list({kind.split()[0]: kind for kind in sources.kinds()}.values())
"""Each oddity in one of its formats."""
FORMS = ("txt.gz", "txt.zst", "jsonl.gz", "jsonl.zst", "json.gz", "json.zst")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tokenizer that gives every text back."""
    directory = tmp_path_factory.mktemp("tokenizer")
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(sample_documents(200)))
    words = [*sources.words_of("txt", [corpus]), "data.vocab_size=400"]
    return str(prepare(load_config([*words, f"data.cache_dir={directory}/cache"]).data).directory)


def prepared(drawn: Drawn, tokenizer: str, cache: Path) -> Prepared:
    cfg = load_config([*drawn.words, f"data.tokenizer={tokenizer}", f"data.cache_dir={cache}"])
    return prepare(cfg.data, cfg.prepare)


def check(drawn: Drawn, tokenizer: str, cache: Path) -> None:
    """Prepare it, and compare what comes of it with what must."""
    if drawn.expected is not None:
        assert documents(prepared(drawn, tokenizer, cache)) == sorted(drawn.expected), drawn
        return
    with pytest.raises(UserError) as caught:
        prepared(drawn, tokenizer, cache)
    line = str(caught.value)
    assert [part for part in drawn.named if part not in line] == [], drawn
    assert line.isprintable()
    assert [path for path in cache.glob("tokens/*") if path.name.isalnum()] == [], drawn


@pytest.mark.parametrize("number", slow_but([0], range(12)))
@pytest.mark.parametrize("kind", slow_but(FEW, sources.kinds()))
def test_it_is_used_as_it_is_or_refused(
    tmp_path: Path, tokenizer: str, kind: str, number: int, rng: random.Random
) -> None:
    drawn = sources.draw(rng, tmp_path, kind)
    check(drawn, tokenizer, tmp_path / "cache")


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are written again at once, and differ in size."""
    monkeypatch.setattr(verified, "TICK", 0)


@pytest.mark.parametrize(
    ("form", "how"),
    slow_but(
        [("jsonl.gz", "one"), ("txt.zst", "flushed")],
        [(form, how) for form in FORMS for how in ("one", "flushed")],
    ),
)
def test_a_packed_file_that_ends_anywhere_is_refused(
    tmp_path: Path, form: str, how: str, no_wait: None
) -> None:
    """Also where what can be unpacked ends with a line, which each flushed block here does."""
    rows = [f"{i} {'abc ' * 10}" for i in range(6)]
    lines = sources.encoded(form, rows).splitlines(keepends=True)
    whole = sources.stream_of(form, lines, how == "flushed")
    path = tmp_path / f"a.{form}"
    for end in range(1, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(DataError, match=rf"{path}: not a whole "):
            read(path, form, tmp_path / "cache")
    path.write_bytes(whole)
    assert read(path, form, tmp_path / "cache") == rows


@pytest.mark.parametrize("form", slow_but(["txt.zst"], FORMS))
def test_of_several_packed_streams_one_that_is_cut_is_found(
    tmp_path: Path, form: str, no_wait: None
) -> None:
    """A file that ends between two whole ones is a whole file: nothing in it says that more was
    there."""
    rows = [f"{i} {'abc ' * 10}" for i in range(30)]
    lines = sources.encoded(form, rows).splitlines(keepends=True)
    streams = [sources.stream_of(form, [line], False) for line in lines]
    ends = set(itertools.accumulate(map(len, streams)))
    path = tmp_path / f"a.{form}"
    for end in range(1, sum(map(len, streams[:4]))):
        if end in ends:
            continue
        path.write_bytes(b"".join(streams)[:end])
        with pytest.raises(DataError, match=rf"{path}: not a whole "):
            read(path, form, tmp_path / "cache")


def read(path: Path, form: str, cache: Path) -> list[str | None]:
    sample_by = SampleBy.line if form.startswith("txt") else SampleBy.document
    cfg = DataConfig(source="files", paths=[str(path)], sample_by=sample_by)
    parts = open_corpus(cfg, cache).parts
    return [text for part in parts for some in part.read() for text in some.texts]


@pytest.mark.parametrize("kind", slow_but(REWRITTEN[:2], REWRITTEN))
@pytest.mark.parametrize("number", slow_but([0], range(8)))
def test_a_file_of_the_same_size_and_time_gives_its_new_text(
    tmp_path: Path, tokenizer: str, kind: str, number: int, rng: random.Random
) -> None:
    drawn = sources.draw(rng, tmp_path, kind)
    for _ in range(3):
        check(drawn, tokenizer, tmp_path / "cache")
        before = drawn
        drawn = sources.rewritten(rng, drawn)
        assert drawn.expected != before.expected


def test_a_file_that_is_only_linked_to_is_the_same(
    tmp_path: Path, tokenizer: str, rng: random.Random
) -> None:
    drawn = sources.draw(rng, tmp_path, "good jsonl")
    facts = file_facts(drawn.paths, tmp_path / "cache")
    for path, of_file in zip(drawn.paths, facts, strict=True):
        (tmp_path / f"{path.name}.link").hardlink_to(path)
        path.chmod(0o600)
        check_unchanged(path, of_file)


MOMENTS = {
    "before it is divided": (files, "parts_of"),
    "before the tokenizer is trained": (preparation, "train_tokenizer"),
    "before it is encoded": (TokensJob, "encode"),
    "before the manifest is written": (TokensJob, "manifest"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", slow_but(REWRITTEN[:1], REWRITTEN[:2]))
def test_a_file_that_is_written_over_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str, rng: random.Random
) -> None:
    """No tokens and no tokenizer appear under the hash of its former text."""
    drawn = [sources.draw(rng, tmp_path, kind)]
    cache = tmp_path / "cache"
    words = [*drawn[0].words, f"data.cache_dir={cache}", "data.vocab_size=320"]
    cfg = load_config(words).data
    owner, name = MOMENTS[moment]
    real = getattr(owner, name)

    def late(*args: Any, **more: Any) -> Any:
        if len(drawn) == 1:
            drawn.append(sources.rewritten(rng, drawn[0]))
        return real(*args, **more)

    monkeypatch.setattr(owner, name, late)
    with pytest.raises(DataError, match=r"changed since it was hashed; start again"):
        prepare(cfg)
    made = [path.parent.name for path in cache.glob("tok*/*") if path.name.isalnum()]
    assert made == ["tokenizers"] * (name in ("encode", "manifest"))
    assert documents(prepare(cfg)) == sorted(drawn[1].expected or [])
    assert not list(cache.glob("tokens/*.partial-*"))


def test_what_was_begun_is_removed_only_where_nobody_needs_it(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """Remove directories of a former content of the same files, and those that a kill left before
    they had an origin, unless a process holds their lock."""
    cache = tmp_path / "cache"

    def begin(drawn: Drawn) -> Path:
        """Start a preparation that dies before its end; the directory of what is done."""
        before = set(cache.glob("tokens/*.partial-*"))
        with monkeypatch.context() as patch:
            patch.setattr(TokensJob, "join", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepared(drawn, tokenizer, cache)
        (made,) = set(cache.glob("tokens/*.partial-*")) - before
        return made

    (tmp_path / "other").mkdir()
    other = begin(sources.draw(rng, tmp_path / "other", "good jsonl"))
    drawn = sources.draw(rng, tmp_path, "good jsonl")
    first = begin(drawn)
    drawn = sources.rewritten(rng, drawn)
    name = first.name.partition(".")[0]
    with FileLock(first.with_name(f"{name}.lock")):
        second = begin(drawn)
        assert first.is_dir()
    killed, held, older = (cache / "tokens" / f"{name * 32}.partial-0" for name in "abc")
    for directory in (killed, held, older):
        directory.mkdir()
    (older / "part-00000.json").touch()
    drawn = sources.rewritten(rng, drawn)
    with FileLock(held.with_name(f"{'b' * 32}.lock")):
        check(drawn, tokenizer, cache)
    assert not any(path.exists() for path in (first, second, killed))
    assert all(path.is_dir() for path in (other, held, older))


def test_prepared_tokens_lose_the_partial_directory_of_a_process_killed_at_its_end(
    tmp_path: Path, tokenizer: str, rng: random.Random
) -> None:
    cache = tmp_path / "cache"
    drawn = sources.draw(rng, tmp_path, "good jsonl")
    check(drawn, tokenizer, cache)
    (whole,) = [path for path in cache.glob("tokens/*") if path.is_dir()]
    left = whole.with_name(f"{whole.name}.partial-0")
    left.mkdir()
    check(drawn, tokenizer, cache)
    assert not left.exists()
