"""A run whose updates have all gone bad saves and stops, in real processes."""

import json

import pytest
import torch
from forked_runs import start
from runs import checkpoint_tensors, prepared_corpus

from diffllm.study.runs import gave_up

LIMIT, LOGGED = 6, 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_many_skips_in_a_row_save_and_stop(tmp_path, ranks):
    """The first update is finite and so large that no later loss is."""
    run = tmp_path / "run"
    words = (
        *("optim.lr=1e30", "optim.warmup_steps=0", "steps=60", f"log_interval={LOGGED}"),
        *(f"train.max_consecutive_skips={LIMIT}", "precision=fp32"),
    )
    corpus = prepared_corpus(tmp_path)
    output = start(corpus, run, *words, ranks=ranks).finish(2)
    assert output.count("error: stopped after step 10, saved: 9 updates in a row") == 1
    assert "Traceback" not in output
    assert "step 2: update skipped" in output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 5, 10]
    assert [line["spikes/skipped_total"] for line in lines] == [0, 4, 9]
    assert [line["train/grad_norm"] is None for line in lines] == [False, True, True]
    assert lines[2]["train/update_norm"] == 0
    assert not (run / "summary.json").exists()
    assert json.loads((run / "diverged.json").read_text())["step"] == 10
    assert gave_up(run)
    saved = checkpoint_tensors(run, 10)
    assert all(torch.isfinite(value).all() for value in saved.values())
    if ranks == 1:  # the same command goes on, for as many skips again
        output = start(corpus, run, *words).finish(2)
        assert "continues after step 10" in output
        assert "error: stopped after step 20, saved: 10 updates in a row" in output
