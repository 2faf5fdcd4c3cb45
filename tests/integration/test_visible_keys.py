"""Counts of visible keys in runs with masked documents, and costs of runs: tokens and FLOPs."""

from pathlib import Path

import numpy as np
import pytest
from runs import planted_train
from runs.command import ForkedRun, Gate, finish, metrics, overrides_of
from runs.json_files import read_json, write_json
from runs.one_rank import sign
from runs.planted_train import Fault

from diffllm import load_config
from diffllm.checkpoint.manifest import read_state
from diffllm.compare.arms.run import load_run
from diffllm.data.preparation.prepare import prepare
from diffllm.data.samples import training_samples
from diffllm.metrics.events import read_events
from diffllm.model import without_storage
from diffllm.model.attention.masks import Documents
from diffllm.training import record

BATCH, STEPS, PEAK = 8, 7, 1e12
SETTINGS = (
    *(f"global_batch_size={BATCH}", f"steps={STEPS}", "log_interval=4", "compile=false"),
    *("checkpoint.interval=1000", "eval.interval=1000", "precision=fp32"),
)
MASKED = ("data.mask_documents=true", "data.packing=best_fit")
INTERVALS = {1: (0, 1), 4: (1, 4), 7: (4, 7)}
"""Steps counted from 0 that a logged line covers, (first, last + 1), by the line's step."""


def main_with_known_peak(fault: Fault, words: list[str]) -> int:
    record.peak_flops = lambda device: PEAK
    return planted_train.main(fault, words)


def masked_words(corpus: Path, run: Path, *more: str) -> list[str]:
    return overrides_of(corpus, run, *SETTINGS, *more)


def start_masked(corpus: Path, run: Path, *more: str, ranks: int = 1) -> ForkedRun:
    return ForkedRun(masked_words(corpus, run, *more), ranks, run, main=main_with_known_peak)


def keys_in_masks(overrides: list[str]) -> list[int]:
    """Count the visible keys of each step in explicit masks of the global batch."""
    cfg = load_config(overrides)
    data = prepare(cfg.data)
    samples = training_samples(data, cfg.data, cfg.seq_len, cfg.seed, STEPS * BATCH)
    batches = [samples[range(step * BATCH, (step + 1) * BATCH)] for step in range(STEPS)]
    documents = [Documents.of(inputs, data.manifest.eos_id) for inputs, _ in batches]
    return [int(each.mask().tril().sum()) for each in documents]


def assert_counted(run: Path, overrides: list[str], ranks: dict[int, int]) -> None:
    """Assert that metrics, MFU and summary of a run follow from the masks of its batches.

    Args:
        ranks: world size by logged step.
    """
    cfg, keys = load_config(overrides), keys_in_masks(overrides)
    model, queries = without_storage(cfg.model), BATCH * cfg.seq_len
    means = {}
    for step, (first, end) in INTERVALS.items():
        means[step] = sum(keys[first:end]) / ((end - first) * queries)
    lines = [line for line in metrics(run) if "perf/step_ms" in line]
    assert {line["step"]: line["data/visible_keys"] for line in lines} == means
    for line in lines:
        flops = model.flops_per_token(means[line["step"]])
        expected = flops * line["perf/tokens_per_s"] / PEAK
        assert line["perf/mfu"] * ranks[line["step"]] == pytest.approx(expected, rel=1e-12)
    summary, facts = (read_json(run / f"{name}.json") for name in ("summary", "run"))
    mean = sum(keys) / (STEPS * queries)
    assert 1 < mean < (cfg.seq_len + 1) / 2 - 1
    assert summary["visible_keys"] == mean
    assert summary["flops_per_token"] == model.flops_per_token(mean)
    whole, per_key = facts["flops_per_token"], facts["flops_per_visible_key"]
    assert whole == model.flops_per_token()
    fewer = (cfg.seq_len + 1) / 2 - mean
    assert summary["flops_per_token"] == pytest.approx(whole - per_key * fewer, rel=1e-12)


@pytest.mark.slow
def test_visible_keys_metric_matches_reference_if_resume_changes_rank_count(corpus, tmp_path):
    """The run stops between logged steps; micro-batches and ranks differ before and after."""
    run = tmp_path / "run"
    two = (*MASKED, "micro_batch_size=2")
    said = start_masked(corpus, run, *two, ranks=2).stop_at(Gate(run, 5))
    assert "stopped by SIGTERM after step 5" in said or "after step 6" in said
    said = start_masked(corpus, run, *MASKED).finish()
    assert "visible keys  " in said
    assert_counted(run, masked_words(corpus, run, *MASKED), {1: 2, 4: 2, 7: 1})


@pytest.mark.slow
def test_visible_keys_metric_of_unpacked_run_matches_reference(corpus, tmp_path):
    run = tmp_path / "run"
    masked = ("data.mask_documents=true", "data.packing=stream", "micro_batch_size=1")
    start_masked(corpus, run, *masked, ranks=2).finish()
    assert_counted(run, masked_words(corpus, run, *masked), dict.fromkeys(INTERVALS, 2))


def test_mfu_counts_flops_of_whole_sequences_if_document_mask_is_disabled(corpus, tmp_path):
    run = tmp_path / "run"
    start_masked(corpus, run).finish()
    flops = without_storage(load_config(masked_words(corpus, run)).model).flops_per_token()
    for line in metrics(run):
        assert "data/visible_keys" not in line
        if "perf/mfu" in line:
            assert line["perf/mfu"] == flops * line["perf/tokens_per_s"] / 1 / PEAK
    summary = read_json(run / "summary.json")
    assert (summary["visible_keys"], summary["flops_per_token"]) == (None, flops)


def forget_costs(run: Path, step: int) -> None:
    """Remove the entries of state.json that older versions did not write."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    state = read_json(checkpoint / "state.json")
    for name in ("tokens", "training_flops", "visible_keys"):
        del state["loop"][name]
    write_json(checkpoint / "state.json", state)
    sign(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "more", "older"),
    [((8, 4, 16), (), False), ((8, 4), MASKED, False), ((8, 4), (), True), ((8, 4), MASKED, True)],
    ids=["batch", "masked", "older", "older masked"],
)
def test_costs_add_up_over_resumes_with_other_batches(corpus, tmp_path, batches, more, older):
    run, seq_len = tmp_path / "run", 64
    common = (
        *more,
        "log_interval=3",
        "eval.interval=1000",
        "compile=false",
        "optim.warmup_steps=1",
    )
    tokens = np.cumsum(np.repeat(batches, 4) * seq_len)
    for number, batch in enumerate(batches):
        if older and number:
            forget_costs(run, 4 * number)
        changes = (f"steps={4 * number + 4}", f"global_batch_size={batch}")
        allowed = "run.allow_changes=[steps,global_batch_size]"
        said = finish(corpus, run, *common, *changes, *[allowed][:number])
    rows = np.load(run / "steps.npy")
    assert rows["tokens"].tolist() == tokens.tolist()
    for name in ("tokens_per_parameter", "training_flops", "train_seconds", "wall_seconds"):
        assert (np.diff(rows[name], prepend=0) > 0).all(), name
    saved = read_state(run / "checkpoints" / f"step-{len(tokens):08d}")["loop"]
    assert saved["tokens"] == tokens[-1]
    assert isinstance(saved["training_flops"], float)  # An integer may exceed 64 bits.
    assert saved["training_flops"] == rows["training_flops"][-1]
    by_step = dict(zip(rows["step"].tolist(), rows, strict=True))
    for line in metrics(run):
        row = by_step[line["step"]]
        assert line["tokens"] == row["tokens"]
        assert line["training_flops"] == row["training_flops"]
    cfg = load_config(masked_words(corpus, run))
    flops_per_token = without_storage(cfg.model).flops_per_token()
    if more:
        assert rows["training_flops"][-1] < flops_per_token * tokens[-1]
    else:
        assert rows["training_flops"] == pytest.approx(flops_per_token * tokens, rel=1e-12)
    restarts = [event for event in read_events(run) if event.kind == "restart"]
    assert [event.tokens for event in restarts] == tokens[3:-1:4].tolist()
    assert f"tokens        {tokens[-1]:,} in " in said
    assert load_run(run).summary["tokens"] == load_run(run).planned_tokens == tokens[-1]
    finish(corpus, tmp_path / "next", *common, "steps=2", f"resume=stage:{run}")
    facts = read_json(tmp_path / "next" / "run.json")
    assert facts["previous"]["tokens"] == tokens[-1]
    assert np.load(tmp_path / "next" / "steps.npy")["tokens"].tolist() == [512, 1024]
