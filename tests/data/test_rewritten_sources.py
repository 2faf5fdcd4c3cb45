"""Corpora that are written over under their size and time, before, between and in preparations."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from sample_texts import sample_documents
from tiers import slow_but

from diffllm.core.errors import DataError
from diffllm.data import Prepared, TokenData, prepare
from diffllm.data.config import DataConfig
from diffllm.data.preparation import prepare as preparation
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.text import files
from diffllm.data.text.file_index import check_unchanged, file_facts

MakeConfig = Callable[..., DataConfig]
WRITERS: dict[str, Callable[[list[str]], str]] = {
    "jsonl": lambda texts: "".join(json.dumps({"text": text}) + "\n" for text in texts),
    "json": lambda texts: json.dumps([{"text": text} for text in texts]),
    "txt": lambda texts: "\n".join(texts),
}


class Source:
    """A file of texts, whose letters can be exchanged without another size or time."""

    def __init__(self, directory: Path, form: str, seed: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        self.path, self.form = directory / f"a.{form}", form
        self.texts = sample_documents(40, seed)
        self.path.write_text(WRITERS[form](self.texts))

    def rewrite(self, replaced: bool = False) -> None:
        before, swap = self.path.stat(), str.maketrans("bcd", "cdb")
        self.texts = [text.translate(swap) for text in self.texts]
        if replaced:
            self.path.unlink()
        self.path.write_text(WRITERS[self.form](self.texts))
        os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert self.path.stat().st_size == before.st_size


def documents(data: Prepared) -> list[str]:
    """List the texts of both splits, sorted."""
    read, found = data.tokenizer(), []
    for split in ("train", "heldout"):
        stream = data.split(split)
        document: list[int] = []
        for token in stream.tokens(0, len(stream)).tolist():
            if token == read.eos_id:
                found.append(read.decode(document))
                document = []
            else:
                document.append(token)
    return sorted(found)


@pytest.fixture
def prepared_with(make_config: MakeConfig, prepared: TokenData) -> Callable[[Source], Prepared]:
    """Prepare a source with a tokenizer that exists."""
    tokenizer = str(prepared.directory / "tokenizer.model")
    return lambda source: prepare(make_config(source.path, tokenizer=tokenizer))


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("form", slow_but(["jsonl", "txt"], WRITERS))
def test_rewritten_file_of_same_size_and_time_gives_its_new_text(
    tmp_path: Path, prepared_with: Callable[[Source], Prepared], form: str, replaced: bool
) -> None:
    source = Source(tmp_path, form)
    for _ in range(3):
        assert documents(prepared_with(source)) == sorted(source.texts)
        source.rewrite(replaced)


def test_hard_link_and_other_permissions_do_not_change_a_file(tmp_path: Path) -> None:
    path = Source(tmp_path, "jsonl").path
    (facts,) = file_facts([path], tmp_path / "cache")
    (tmp_path / "a.link").hardlink_to(path)
    path.chmod(0o600)
    check_unchanged(path, facts)


MOMENTS = {
    "before it is divided": (files, "parts_of"),
    "before the tokenizer is trained": (preparation, "train_tokenizer"),
    "before it is encoded": (TokensJob, "encode"),
    "before the manifest is written": (TokensJob, "manifest"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("form", slow_but(["jsonl"], ["jsonl", "txt"]))
def test_file_rewritten_in_a_preparation_is_refused(
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    moment: str,
) -> None:
    """No tokens and no tokenizer appear under the hash of its former text."""
    source, cache, rewritten = Source(tmp_path, form), tmp_path / "cache", []
    cfg = make_config(source.path, vocab_size=320)
    owner, name = MOMENTS[moment]
    real = getattr(owner, name)

    def late(*args: Any, **more: Any) -> Any:
        if not rewritten:
            rewritten.append(source.rewrite())
        return real(*args, **more)

    monkeypatch.setattr(owner, name, late)
    with pytest.raises(DataError, match=r"changed since it was hashed; start again"):
        prepare(cfg)
    made = [path.parent.name for path in cache.glob("tok*/*") if path.name.isalnum()]
    assert made == ["tokenizers"] * (name in ("encode", "manifest"))
    assert documents(prepare(cfg)) == sorted(source.texts)
    assert not list(cache.glob("tokens/*.partial-*"))


def test_partial_directories_are_removed_unless_another_process_needs_them(
    tmp_path: Path,
    prepared_with: Callable[[Source], Prepared],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Remove directories of a former content of the same files, and those that a kill left before
    they had an origin, unless a process holds their lock."""
    cache = tmp_path / "cache"

    def begin(source: Source) -> Path:
        """Start a preparation that dies before its end; return the directory of its work."""
        before = set(cache.glob("tokens/*.partial-*"))
        with monkeypatch.context() as patch:
            patch.setattr(TokensJob, "join", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepared_with(source)
        (made,) = set(cache.glob("tokens/*.partial-*")) - before
        return made

    other = begin(Source(tmp_path / "other", "jsonl", seed=1))
    source = Source(tmp_path, "jsonl")
    first = begin(source)
    source.rewrite()
    name = first.name.partition(".")[0]
    with FileLock(first.with_name(f"{name}.lock")):
        second = begin(source)
        assert first.is_dir()
    killed, held, older = (cache / "tokens" / f"{name * 32}.partial-0" for name in "abc")
    for directory in (killed, held, older):
        directory.mkdir()
    (older / "part-00000.json").touch()
    source.rewrite()
    with FileLock(held.with_name(f"{'b' * 32}.lock")):
        prepared_with(source)
    assert not any(path.exists() for path in (first, second, killed))
    assert all(path.is_dir() for path in (other, held, older))


def test_prepared_tokens_lose_the_partial_directory_of_a_process_killed_at_its_end(
    tmp_path: Path, prepared_with: Callable[[Source], Prepared]
) -> None:
    source = Source(tmp_path, "jsonl")
    prepared_with(source)
    (whole,) = [path for path in (tmp_path / "cache").glob("tokens/*") if path.is_dir()]
    left = whole.with_name(f"{whole.name}.partial-0")
    left.mkdir()
    prepared_with(source)
    assert not left.exists()
