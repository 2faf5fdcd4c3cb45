"""Runs end with the loss of every held-out document, also after an interruption."""

import hashlib
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from runs.command import ForkedRun, Gate, finish, metric_lines, overrides_of
from runs.json_files import read_json, read_jsonl

from diffllm.config import load_config
from diffllm.config.saved import load_run_config
from diffllm.data.heldout import HeldoutSample
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import TokenData
from diffllm.evaluation.heldout import document_losses

STEPS = 3
LAST = f"step-{STEPS:08d}"
WORDS = (
    *(f"steps={STEPS}", "eval.tokens=null", "micro_batch_size=1", "precision=fp32"),
    *("log_interval=1", "diagnostics.interval=0", "data.num_workers=0", "optim.warmup_steps=1"),
)
"""Overrides with one sequence per batch, so that the evaluation has many batches."""
SPEED = ("seconds", "tokens_per_s")


@pytest.fixture(scope="module")
def heldout_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    finish(corpus, run, *WORDS)
    return run


def data_of(corpus: Path) -> TokenData:
    return prepare(load_config(overrides_of(corpus, corpus.parent / "none")).data)


def summary_without_speed(run: Path) -> dict:
    summary = read_json(run / "summary.json")
    return {key: value for key, value in summary.items() if key not in SPEED}


def test_finished_run_has_loss_of_every_heldout_document(corpus, heldout_run):
    split = data_of(corpus).manifest.splits["heldout"]
    losses, summary = document_losses(heldout_run), summary_without_speed(heldout_run)
    total = losses.nats.sum()
    assert summary["heldout_documents"] == len(losses.nats) == split.documents > 5
    assert summary["heldout_tokens"] == losses.tokens.sum() == split.tokens
    assert summary["heldout_loss"] == pytest.approx(total / split.tokens)
    assert summary["heldout_bits_per_byte"] == pytest.approx(total / split.bytes / math.log(2))
    facts = read_json(heldout_run / "run.json")
    assert facts["heldout_tokens"] == facts["heldout_split_tokens"] == split.tokens
    texts = [line["text"].encode() for line in read_jsonl(corpus)]
    sizes = {int.from_bytes(hashlib.sha256(t).digest()[:8], signed=True): len(t) for t in texts}
    assert losses.bytes.tolist() == [sizes[text] for text in losses.texts.tolist()]
    assert metric_lines(heldout_run)[-1]["eval/loss"] != summary["heldout_loss"], (
        "eval/loss is the loss of a sample"
    )


@pytest.mark.slow
def test_logged_bits_per_byte_divide_by_bytes_of_sampled_text(corpus, heldout_run, tmp_path):
    """The corpus is ASCII, so the bytes of cut sequences can be counted separately."""
    data, cfg = data_of(corpus), load_run_config(heldout_run)
    tokenizer, stream = data.tokenizer(), data.split("heldout")
    sample = HeldoutSample(stream, cfg.seq_len, cfg.eval.sequences, data.manifest.eos_id)
    targets = torch.cat([targets for _, targets in sample.batches(1)])
    size = sum(len(tokenizer.decode(row.tolist())) for row in targets)
    finish(corpus, tmp_path / "run", *WORDS, ranks=2)
    for run in (heldout_run, tmp_path / "run"):
        last = metric_lines(run)[-1]
        bits = last["eval/loss"] * targets.numel() / size / math.log(2)
        assert last["eval/bits_per_byte"] == pytest.approx(bits)


def assert_ended_as(run: Path, straight: Path) -> None:
    mine, other = document_losses(run), document_losses(straight)
    for name in ("nats", "tokens", "bytes", "texts"):
        assert np.array_equal(getattr(mine, name), getattr(other, name))
    assert summary_without_speed(run) == summary_without_speed(straight)
    assert metric_lines(run) == metric_lines(straight)


def test_resume_repeats_killed_heldout_evaluation(corpus, heldout_run, tmp_path):
    run = tmp_path / "run"
    gate = Gate(run, "heldout")
    first = ForkedRun(overrides_of(corpus, run, *WORDS), 1, tmp_path)
    first.wait_for(gate.reached, "evaluation of documents")
    first.kill()
    assert (run / "checkpoints" / LAST).is_dir()
    assert not (run / "heldout").exists()
    assert not (run / "summary.json").exists()
    gate.open()
    assert f"resumes from step {STEPS}" in finish(corpus, run, *WORDS)
    assert_ended_as(run, heldout_run)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_signal_in_heldout_evaluation_stops_all_ranks(corpus, heldout_run, tmp_path, ranks, number):
    run = tmp_path / "run"
    first = ForkedRun(overrides_of(corpus, run, *WORDS), ranks, tmp_path)
    said = first.stop_at(Gate(run, "heldout"), number, ranks - 1)
    assert f"stopped by {number.name} after step {STEPS}, saved; the same command resumes" in said
    assert read_json(run / "requeue") == {"signal": number.name, "step": STEPS}
    assert not (run / "summary.json").exists()
    again = finish(corpus, run, *WORDS, ranks=ranks)
    assert f"resumes from step {STEPS}" in again
    assert "bits per byte" in again
    if ranks == 1:
        assert_ended_as(run, heldout_run)


@pytest.mark.slow
def test_error_mentions_rank_killed_during_heldout_evaluation(corpus, tmp_path):
    run = tmp_path / "run"
    gate = Gate(run, "heldout")
    process = ForkedRun(overrides_of(corpus, run, *WORDS), 2, tmp_path)
    process.wait_for(gate.reached, "evaluation of documents")
    process.signal(signal.SIGKILL, 1)
    gate.open()
    assert process.codes()[0] == 1
    assert "rank 1 is missing" in process.text()
    assert "held-out batch" in process.text()
