"""A run whose corpus was edited resumes only with run.allow_changes."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs.command import overrides_of, prepared_corpus, start, the_error, write_corpus

from diffllm import load_config
from diffllm.config.saved import load_run_config
from diffllm.core.errors import ConfigError, DataError
from diffllm.data.preparation.prepare import prepare
from diffllm.data.verified import mark_of
from diffllm.evaluation.load import own_data

STEPS = 6


@pytest.fixture
def corpus_and_run(tmp_path: Path) -> tuple[Path, Path]:
    corpus, run = prepared_corpus(tmp_path), tmp_path / "run"
    start(corpus, run, f"steps={STEPS}", "eval.interval=100").finish()
    return corpus, run


def assert_resume_requires_allow_changes(corpus: Path, run: Path, *changed: str) -> None:
    """Assert that a resume is refused because of `changed`, and possible with allow_changes."""
    more = [f"steps={STEPS + 2}", "eval.interval=100", "run.allow_changes=[steps]"]
    refused = start(corpus, run, *more).finish(2)
    error = the_error(refused)
    assert "was saved with a different data order" in error
    assert all(f"{key}: " in error for key in changed)
    allowed = f"run.allow_changes=[steps,{','.join(changed)}]"
    assert error.endswith(allowed)
    said = start(corpus, run, *more[:2], allowed).finish()
    assert f"resumes from step {STEPS}" in said
    (line,) = (run / "changes.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["changes"].keys() == {"steps", *changed}


@pytest.mark.fast_cases(1)
def test_resume_with_edited_corpus_requires_allow_changes(corpus_and_run, tmp_path):
    corpus, run = corpus_and_run
    lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[9] = lines[9].replace("the end", "no end")
    corpus.write_text("".join(lines), encoding="utf-8")
    shutil.rmtree(tmp_path / "cache")
    assert_resume_requires_allow_changes(corpus, run, "corpus", "tokenizer")


@pytest.mark.slow
def test_run_of_version_that_read_all_kinds_needs_cached_tokens(tmp_path):
    docs, run = tmp_path / "docs", tmp_path / "run"
    docs.mkdir()
    rows, note = write_corpus(docs), docs / "note.md"
    note.write_text("a note", encoding="utf-8")
    # With listed files, the corpus has the hash that an older version gave the directory.
    start(docs, run, f"data.paths=[{rows},{note}]", f"steps={STEPS}").finish()
    config = (run / "config.yaml").read_text(encoding="utf-8")
    assert config.count(f"- {rows}\n") == config.count(f"- {note}\n") == 1
    config = "".join(line for line in config.splitlines(True) if line.strip() != f"- {note}")
    config = config.replace(f"- {rows}\n", f"- {docs}\n")
    (run / "config.yaml").write_text(config, encoding="utf-8")
    own_data(run, load_run_config(run))
    more = "run.allow_changes=[steps]"
    assert f"resumes from step {STEPS}" in start(docs, run, f"steps={STEPS + 1}", more).finish()
    for directory in (tmp_path / "cache" / "tokens").iterdir():
        if directory.is_dir():
            shutil.rmtree(directory)
    rule = "older versions read all kinds of files in a directory"
    longer = [f"steps={STEPS + 2}", more]
    with pytest.raises(DataError, match=f"{rule}, and data.cache_dir"):
        own_data(run, load_run_config(run))
    error = the_error(start(docs, run, *longer).finish(2))
    assert "no longer contains the tokens of this run" in error
    prepare(load_config(overrides_of(docs, run, f"data.paths=[{rows},{note}]")).data)
    own_data(run, load_run_config(run))
    note.write_text("another note", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"corpus has changed since training.*{rule}"):
        own_data(run, load_run_config(run))
    error = the_error(start(docs, run, *longer).finish(2))
    assert "was saved with a different data order" in error
    assert rule in error


@pytest.mark.slow
def test_resume_requires_allow_changes_if_prepared_tokens_were_changed(corpus_and_run):
    """Another version of the tokenizer library could give different tokens for equal text."""
    corpus, run = corpus_and_run
    data = prepare(load_config(overrides_of(corpus, run)).data)
    split = data.manifest.splits["train"]
    (shard,) = split.shards
    path = data.directory / shard.file
    mark_of(path).unlink()
    content = np.fromfile(path, "<u2")[::-1]
    content.tofile(path)
    other = dataclasses.replace(shard, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    splits = {**data.manifest.splits, "train": dataclasses.replace(split, shards=[other])}
    dataclasses.replace(data.manifest, splits=splits).save(data.directory)
    assert_resume_requires_allow_changes(corpus, run, "tokens")
