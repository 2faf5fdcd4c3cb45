"""Runs on packed documents, and on tokens with a loss mask."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from runs.command import (
    ForkedRun,
    documents,
    metric_lines,
    overrides_of,
    prepared_corpus,
    step_samples,
    the_error,
)
from runs.json_files import read_json, read_jsonl, write_json, write_jsonl
from tiers import slow_but

from diffllm import load_config
from diffllm.data.preparation.prepare import prepare
from diffllm.data.samples import training_samples
from diffllm.data.sequences import packing_counts
from diffllm.data.shards import Manifest

STEPS, BATCH = 4, 8
SETTINGS = (
    *(f"global_batch_size={BATCH}", f"steps={STEPS}", "log_interval=1", "precision=fp32"),
    *("optim.warmup_steps=1", "checkpoint.interval=1000", "eval.interval=1000"),
)
PACKED = ("data.packing=best_fit", "data.mask_documents=true", "compile=false")


def packing_words(corpus: Path, run: Path, *more: str) -> list[str]:
    return overrides_of(corpus, run, *SETTINGS, *more)


def shares(overrides: list[str]) -> list[float]:
    """Return the share of targets that count in the loss, for each step's batch."""
    cfg = load_config(overrides)
    data = prepare(cfg.data)
    samples = training_samples(data, cfg.data, cfg.seq_len, cfg.seed, STEPS * BATCH)
    batches = [samples[range(step * BATCH, (step + 1) * BATCH)] for step in range(STEPS)]
    return [(targets >= 0).float().mean().item() for _, targets in batches]


@pytest.mark.slow
def test_packed_run_on_two_ranks_matches_single_rank_run(corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    overrides = packing_words(corpus, one, *PACKED)
    said = ForkedRun(overrides, 1, one).finish()
    ForkedRun(packing_words(corpus, two, *PACKED, "micro_batch_size=2"), 2, two).finish()
    assert step_samples(one) == step_samples(two)
    for mine, other in zip(metric_lines(one), metric_lines(two), strict=True):
        assert mine["train/loss"] == pytest.approx(other["train/loss"], abs=2e-4)
    found = [line["train/target_share"] for line in metric_lines(one)]
    assert found == pytest.approx(shares(overrides))
    cfg = load_config(overrides)
    counts = packing_counts(prepare(cfg.data), cfg.data, cfg.seq_len)
    assert f"packing: {counts.text()}" in said
    for file in ("run.json", "summary.json"):
        assert read_json(one / file)["packing"] == counts.numbers()
    epochs = STEPS * BATCH / counts.sequences
    assert f"{epochs:.2g} epochs" in said


@pytest.mark.slow
def test_resume_refuses_changed_packing_without_allow_changes(corpus, tmp_path):
    run, new, fresh = (tmp_path / name for name in ("run", "new", "fresh"))
    packed = PACKED[:1]
    ForkedRun(packing_words(corpus, run), 1, run).finish()
    for named in (
        packing_words(corpus, run, *packed, "steps=6", "run.allow_changes=[steps]"),
        packing_words(corpus, new, *packed, "steps=6", f"resume={run}"),
    ):
        refused = ForkedRun(named, 1, tmp_path / "refused")
        assert refused.codes() == [2]
        assert "data.packing: stream in the run, best_fit in this command" in refused.text()
    allowed = "run.allow_changes=[steps,data.packing]"
    ForkedRun(packing_words(corpus, run, *packed, "steps=6", allowed), 1, run).finish()
    (note,) = read_jsonl(run / "changes.jsonl")
    assert note["changes"]["data.packing"] == ["stream", "best_fit"]
    ForkedRun(packing_words(corpus, fresh, *packed), 1, fresh).finish()
    later, begun = step_samples(run), step_samples(fresh)
    assert [later[STEPS + 1], later[STEPS + 2]] == [begun[1], begun[2]]


def mask_every_third(directory: Path) -> dict[str, int]:
    """Write masks next to all shards; return the number of unmasked tokens per split."""
    manifest = read_json(directory / "manifest.json")
    left = {}
    for name, split in manifest["splits"].items():
        left[name] = 0
        for shard in split["shards"]:
            mask = (np.arange(shard["tokens"]) % 3 > 0).astype(np.uint8)
            left[name] += int(mask.sum())
            shard["mask"] = f"{shard['file']}.mask"
            shard["mask_sha256"] = hashlib.sha256(mask.tobytes()).hexdigest()
            (directory / shard["mask"]).write_bytes(mask.tobytes())
    write_json(directory / "manifest.json", manifest)
    return left


@pytest.mark.parametrize("packing", slow_but(["best_fit"], ["stream", "best_fit"]))
def test_training_and_heldout_losses_ignore_masked_tokens(tmp_path, packing):
    corpus = prepared_corpus(tmp_path)
    run = tmp_path / "run"
    overrides = packing_words(corpus, run, f"data.packing={packing}", "eval.tokens=null")
    directory = prepare(load_config(overrides).data).directory
    left = mask_every_third(directory)
    ForkedRun(overrides, 1, run).finish()
    found = [line["train/target_share"] for line in metric_lines(run)]
    assert found == pytest.approx(shares(overrides))
    assert max(found) < 0.7
    summary = read_json(run / "summary.json")
    split = Manifest.load(directory).splits["heldout"]
    assert summary["heldout_tokens"] == left["heldout"] < split.tokens
    assert 0 < summary["heldout_loss"] < 7
    facts = read_json(run / "run.json")
    assert facts["heldout_tokens"] == facts["heldout_split_tokens"] == left["heldout"]


def test_train_refuses_heldout_sample_that_contains_only_prompt_tokens(tmp_path):
    """The first sequence is part of a prompt; among sixteen sequences, some contain an answer."""
    rows = [{"prompt": text, "completion": text[:40]} for text in documents(60)]
    corpus, run = tmp_path / "corpus.jsonl", tmp_path / "run"
    write_jsonl(corpus, rows)
    prompts = packing_words(corpus, run, "data.text_column=completion", "data.prompt_column=prompt")
    prompts += ["data.vocab_size=400", "data.heldout_fraction=0.2", "eval.interval=2"]
    refused = ForkedRun([*prompts, "eval.sequences=1"], 1, tmp_path / "said")
    assert refused.codes() == [2]
    assert "all tokens of the held-out sample (eval.sequences=1)" in the_error(refused.text())
    assert not run.exists()
    ForkedRun([*prompts, "eval.sequences=16"], 1, tmp_path / "said").finish()
    losses = [line["eval/loss"] for line in metric_lines(run) if "eval/loss" in line]
    assert len(losses) == 2
    assert None not in losses
