"""A run whose updates have all gone bad saves and ends as one that diverged, in real processes."""

import json

import pytest
import torch
from runs.command import checkpoint_tensors, prepared_corpus, start, train
from tiers import slow_but

from diffllm.compare.report.runs import load_run
from diffllm.metrics.records import diverged

LIMIT, LOGGED = 6, 5


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2]))
def test_too_many_skips_in_a_row_save_and_end_the_run(tmp_path, ranks):
    """The first update is finite and so large that no later loss is."""
    run = tmp_path / "run"
    words = (
        *("optim.lr=1e20", "optim.warmup_steps=0", "steps=60", f"log_interval={LOGGED}"),
        *(f"train.max_consecutive_skips={LIMIT}", "precision=fp32"),
    )
    corpus = prepared_corpus(tmp_path)
    output = start(corpus, run, *words, ranks=ranks).finish()
    assert output.count("diverged: stopped after step 10, saved: 9 updates in a row") == 1
    assert "error" not in output
    assert "held-out loss not measured: the run diverged" in output
    assert "step 2: update skipped" in output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 5, 10]
    assert [line["spikes/skipped_total"] for line in lines] == [0, 4, 9]
    assert [line["train/grad_norm"] is None for line in lines] == [False, True, True]
    assert lines[2]["train/update_norm"] == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["diverged"]) == (10, True)
    assert summary["stopped"].startswith("9 updates in a row were skipped (the last at loss ")
    assert summary["heldout_loss"] is None
    assert summary["spikes/skipped_total"] == 9
    assert summary["sample"]
    assert diverged(run)
    assert load_run(run).state == "diverged, stopped"
    saved = checkpoint_tensors(run, 10)
    assert all(torch.isfinite(value).all() for value in saved.values())
    again = start(corpus, run, *words, ranks=ranks).finish()
    assert f"{run} diverged and stopped after step 10: 9 updates in a row were skipped" in again
    assert "continues" not in again
    if ranks == 1:  # where more may be skipped, or what is computed is another, it goes on
        output = start(corpus, run, *words, "train.max_consecutive_skips=8").finish()
        assert "continues after step 10" in output
        assert "diverged: stopped after step 20, saved: 10 updates in a row" in output
        changed = ("optim.lr=1e-3", "run.allow_changes=[optim.lr]", "steps=60")
        output = start(corpus, run, *words, *changed).finish()
        assert "continues after step 20" in output


@pytest.mark.slow
def test_a_sweep_counts_it_as_ended(tmp_path, environment, tiny):
    swept = ["-m", *tiny, "optim.lr=1e-3,1e20", "optim.warmup_steps=0", "run.sweep=rates"]
    swept += ["steps=12", "log_interval=5", "train.max_consecutive_skips=3"]
    ended = train(swept, tmp_path, environment)
    assert ended.code == 0, ended
    assert "lr1e+20  diverged, stopped after step 5: 4 updates in a row were skipped" in ended.out
    assert "did not finish" not in ended.out
    again = train(swept, tmp_path, environment)
    assert again.code == 0, again
    assert "outputs/rates/lr1e+20 diverged, stopped: 5 steps" in again.out
    assert "run 2 of 2" not in again.out
