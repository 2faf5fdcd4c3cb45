"""Documents with prompts: a prompt is context and never a target."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs.json_files import write_jsonl
from sample_texts import sample_documents

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig, Packing
from diffllm.data.preparation.prepare import prepare
from diffllm.data.preparation.workers import PrepareConfig
from diffllm.data.prepared import TokenData
from diffllm.data.samples import training_samples
from diffllm.data.text import files

TEXTS = sample_documents(400)
PAIRS = list(zip(TEXTS[:200], TEXTS[200:], strict=True))


@pytest.fixture
def prompted(tmp_path: Path, make_config: Callable[..., DataConfig]) -> DataConfig:
    rows = [{"prompt": a, "completion": b} for a, b in PAIRS]
    rows[0]["prompt"] = rows[1]["prompt"] = ""
    write_jsonl(tmp_path / "a.jsonl", rows)
    return make_config(
        tmp_path / "a.jsonl", text_column="completion", prompt_column="prompt",
        heldout_fraction=0.2,
    )  # fmt: skip


def split_of(data: TokenData, name: str) -> list[tuple[list[int], list[bool]]]:
    """Return tokens and loss mask of each document."""
    stream, eos_id = data.split(name), data.manifest.eos_id
    tokens, mask = stream.tokens(0, len(stream)), stream.loss_mask(0, len(stream))
    ends = np.flatnonzero(tokens == eos_id) + 1
    parts = zip(np.split(tokens, ends)[:-1], np.split(mask, ends)[:-1], strict=True)
    return [(part.tolist(), flags.tolist()) for part, flags in parts]


@pytest.mark.parametrize("shard_tokens", [97, 2**27])
def test_loss_mask_excludes_only_prompt_tokens(prompted, monkeypatch, shard_tokens):
    monkeypatch.setattr("diffllm.data.shards.SHARD_TOKENS", shard_tokens)
    monkeypatch.setattr(files, "PART_BYTES", 10_000)
    data = prepare(prompted, PrepareConfig(processes=2))
    tokenizer = data.tokenizer()
    expected = {}
    for i, (prompt, completion) in enumerate(PAIRS):
        before = tokenizer.encode(prompt) if i > 1 else []
        ids = [*tokenizer.encode(completion), tokenizer.eos_id]
        expected[(*before, *ids)] = [False] * len(before) + [True] * len(ids)
    found = split_of(data, "train") + split_of(data, "heldout")
    assert len(found) == len(PAIRS)
    assert {tuple(tokens): flags for tokens, flags in found} == expected
    splits = data.manifest.splits.values()
    assert sum(split.bytes for split in splits) == sum(len(text.encode()) for _, text in PAIRS)
    assert sum(split.predicted or 0 for split in splits) == sum(map(sum, expected.values()))
    assert sum(split.tokens for split in splits) == sum(map(len, expected))
    counts = np.bincount([
        token
        for tokens, flags in split_of(data, "heldout")
        for token, flag in zip(tokens, flags, strict=True)
        if flag
    ])  # fmt: skip
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * np.log(shares)).sum()
    assert data.manifest.heldout_unigram_entropy == pytest.approx(entropy)


@pytest.mark.parametrize("packing", list(Packing))
def test_training_targets_contain_no_prompt_token(prompted, packing):
    data = prepare(prompted)
    cfg = replace(prompted, packing=packing)
    read = training_samples(data, cfg, seq_len=32, seed=0, total=100)[range(40)]
    assert not isinstance(read, DataError)
    inputs, targets = (part.numpy() for part in read)
    stream = data.split("train")
    tokens, mask = stream.tokens(0, len(stream)), stream.loss_mask(0, len(stream))
    known = {(a, b) for a, b, flag in zip(tokens, tokens[1:], mask[1:], strict=False) if flag}
    known |= {(data.manifest.eos_id, b) for b, flag in zip(tokens, mask, strict=True) if flag}
    pairs = zip(inputs.ravel(), targets.ravel(), strict=True)
    assert {(a, b) for a, b in pairs if b >= 0} <= known
    assert 0.1 < (targets < 0).mean() < 0.9


def test_prompt_column_changes_corpus_identity(prompted):
    with_prompts = prepare(prompted)
    without = prepare(replace(prompted, prompt_column=None, tokenizer=str(with_prompts.directory)))
    assert without.manifest.corpus != with_prompts.manifest.corpus
    assert not without.manifest.splits["train"].masked


@pytest.mark.parametrize("prompts", [["a", "b"], ["a", "a"]])
def test_documents_are_distinct_if_only_prompts_differ(tmp_path, make_config, prompts):
    rows = [{"prompt": prompt, "completion": " ".join(TEXTS)} for prompt in prompts]
    write_jsonl(tmp_path / "a.jsonl", rows)
    cfg = make_config(tmp_path / "a.jsonl", text_column="completion", prompt_column="prompt")
    if prompts == ["a", "b"]:
        assert {s.documents for s in prepare(cfg).manifest.splits.values()} == {1}
    else:
        with pytest.raises(DataError, match="at least two different documents with text"):
            prepare(cfg)


def test_error_of_missing_prompt_column_proposes_a_column(tmp_path, make_config):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    (tmp_path / "b.txt").write_text("a\nb\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"has no column 'x' .*; use data.prompt_column=prompt$"):
        prepare(make_config(tmp_path / "a.jsonl", text_column="completion", prompt_column="x"))
    with pytest.raises(DataError, match=r"data.prompt_column=\w+ needs files with columns"):
        prepare(make_config(tmp_path / "b.txt", prompt_column="x"))
