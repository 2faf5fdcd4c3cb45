"""Corpora that are rewritten with equal size and time, before, between and in preparations."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_texts import documents_of, sample_documents

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig
from diffllm.data.preparation import prepare as preparation
from diffllm.data.preparation.prepare import prepare
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.prepared import Prepared, TokenData
from diffllm.data.text import files

WRITERS: dict[str, Callable[[list[str]], str]] = {
    "jsonl": lambda texts: "".join(json.dumps({"text": text}) + "\n" for text in texts),
    "json": lambda texts: json.dumps([{"text": text} for text in texts]),
    "txt": lambda texts: "\n".join(texts),
}


class RewrittenSource:
    """A file of texts; `rewrite` exchanges letters and keeps size and modification time."""

    def __init__(self, directory: Path, form: str, seed: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        self.path, self.form = directory / f"a.{form}", form
        self.texts = sample_documents(40, seed)
        self.path.write_text(WRITERS[form](self.texts), encoding="utf-8")

    def rewrite(self, replaced: bool = False) -> None:
        before, swap = self.path.stat(), str.maketrans("bcd", "cdb")
        self.texts = [text.translate(swap) for text in self.texts]
        if replaced:
            self.path.unlink()
        self.path.write_text(WRITERS[self.form](self.texts), encoding="utf-8")
        os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert self.path.stat().st_size == before.st_size


def sorted_documents(data: Prepared) -> list[str]:
    """List the texts of both splits, sorted."""
    return sorted(documents_of(data, "train") + documents_of(data, "heldout"))


@pytest.fixture
def prepared_with(
    make_config: Callable[..., DataConfig], prepared: TokenData
) -> Callable[[RewrittenSource], Prepared]:
    """Prepare a source with an existing tokenizer."""
    tokenizer = str(prepared.directory / "tokenizer.model")
    return lambda source: prepare(make_config(source.path, tokenizer=tokenizer))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("form", WRITERS)
def test_prepare_detects_rewritten_file_of_same_size(tmp_path, prepared_with, form, replaced):
    source = RewrittenSource(tmp_path, form)
    for _ in range(3):
        assert sorted_documents(prepared_with(source)) == sorted(source.texts)
        source.rewrite(replaced)


MOMENTS = {
    "before division into parts": (files, "parts_of"),
    "before training of the tokenizer": (preparation, "build_tokenizer"),
    "before encoding": (TokensJob, "encode"),
    "before the manifest": (TokensJob, "manifest"),
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_prepare_refuses_corpus_file_rewritten_during_preparation(
    tmp_path, make_config, monkeypatch, form, moment
):
    """No tokens and no tokenizer are stored under the hash of the old text."""
    source, cache, rewritten = RewrittenSource(tmp_path, form), tmp_path / "cache", []
    cfg = make_config(source.path, vocab_size=320)
    owner, name = MOMENTS[moment]
    real = getattr(owner, name)

    def late(*args: Any, **more: Any) -> Any:
        if not rewritten:
            rewritten.append(source.rewrite())
        return real(*args, **more)

    monkeypatch.setattr(owner, name, late)
    with pytest.raises(DataError, match="changed while the command was running; run the command"):
        prepare(cfg)
    made = [path.parent.name for path in cache.glob("tok*/*") if path.name.isalnum()]
    assert made == ["tokenizers"] * (name in ("encode", "manifest"))
    assert sorted_documents(prepare(cfg)) == sorted(source.texts)
