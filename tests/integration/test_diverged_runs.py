"""Diverging runs: end, summary, report and sweep; and a preset with loss spikes."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from runs.command import Result, checkpoint_tensors, finish, start, success_of, tool, train
from runs.json_files import read_json, read_jsonl, strict_json
from tiers import slow_but

from diffllm.compare.arms.run import load_run
from diffllm.core.run_files import diverged
from diffllm.metrics.events import read_events

DIVERGES = ["optim.lr=100", "optim.clip_norm=0", "train.skip_step=off"]
"""Overrides with a first update so large that no later loss is finite."""
SHAPES = ["diff_v1", "moe on 2 ranks"]


def diverging_output(shape: str, steps: int, corpus: Path, path: Path) -> str:
    is_mixture = shape.startswith("moe")
    model = ["model=moe_tiny", "model.vocab_size=512"] if is_mixture else []
    attention = ["attention=diff_v1"] if shape == "diff_v1" else []
    words = [*DIVERGES, *model, *attention, f"steps={steps}", "run.report=true"]
    return finish(corpus, path, *words, ranks=2 if is_mixture else 1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_summary_marks_run_as_diverged_if_heldout_loss_is_not_finite(corpus, shape, tmp_path):
    path = tmp_path / "run"
    output = diverging_output(shape, 8, corpus, path)
    assert "held-out loss not finite: the run diverged" in output
    assert "not written" not in output
    summary = strict_json((path / "summary.json").read_text(encoding="utf-8"))
    assert summary["diverged"] is True
    assert summary["heldout_loss"] is None
    assert (summary["state"], summary["reason"]) == ("diverged", "no finite held-out loss")
    *events, end = read_events(path)
    rows = np.load(path / "steps.npy")
    spikes = [e for e in events if (e.kind, e.definition) == ("loss_spike", "spikes")]
    not_finite = rows["step"][~np.isfinite(rows["train/loss"])].tolist()
    # train.skip_step=off: the values stay NaN, and their first step has the events.
    assert not_finite == [*range(not_finite[0], 9)]
    assert [event.step for event in spikes] == not_finite[:1]
    assert all(event.value is event.height is None for event in spikes)
    assert (end.kind, end.step, end.detail) == ("diverged", 8, "no finite held-out loss")
    assert summary["sample"]
    assert "is finished: 8 steps, the run diverged" in diverging_output(shape, 8, corpus, path)


@pytest.mark.slow
def test_sweep_and_report_commands_print_name_of_diverged_run(tmp_path, environment, tiny):
    words = ["-m", *tiny, "optim.lr=1e-3,100", *DIVERGES[1:], "run.sweep=rates", "steps=6"]
    swept = success_of(train(words, tmp_path, environment))
    assert runs_with_text(swept, "diverged: no finite held-out loss") == ["outputs/rates/lr100.0"]
    assert runs_with_text(swept, "  held-out loss ") == ["outputs/rates/lr0.001"]
    reported = success_of(tool(["report", "outputs/rates", "out=page"], tmp_path, environment))
    assert "1 of 1 seeds diverged" in reported.out
    assert "outputs/rates/lr100.0 diverged: its held-out loss is not finite" in reported.out


def runs_with_text(result: Result, text: str) -> list[str]:
    found = [line for line in result.out.splitlines() if text in line]
    return [line.split()[0] for line in found if line.startswith("outputs/")]


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "decay", "warmup"), [(1e20, 1e30, 0), (1, 100, 0), (1e20, 0, 5)])
def test_parameters_stay_finite_at_extreme_learning_rate(corpus, tmp_path, lr, decay, warmup):
    """By default, updates that are not finite are skipped."""
    words = [
        *(f"optim.lr={lr}", f"optim.weight_decay={decay}", f"optim.warmup_steps={warmup}"),
        *("steps=60", "precision=fp32", "train.max_consecutive_skips=1000", "log_interval=60"),
    ]
    finish(corpus, tmp_path / "run", *words)
    for name, value in checkpoint_tensors(tmp_path / "run", 60).items():
        assert math.isfinite(value.abs().max()), name


LIMIT, LOGGED = 6, 5


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2]))
def test_training_stops_after_too_many_consecutive_skipped_updates(corpus, tmp_path, ranks):
    """The first update is finite, but so large that no later loss is finite."""
    run = tmp_path / "run"
    words = (
        *("optim.lr=1e20", "optim.warmup_steps=0", "steps=60", f"log_interval={LOGGED}"),
        *(f"train.max_consecutive_skips={LIMIT}", "precision=fp32"),
    )
    output = start(corpus, run, *words, ranks=ranks).finish()
    assert output.count("diverged: 9 updates in a row") == 1
    assert "; stopped after step 10, saved; try a smaller optim.lr" in output
    assert "error" not in output
    assert "held-out loss not measured: the run diverged" in output
    assert "step 2: update skipped" in output
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 5, 10]
    assert [line["spikes/skipped_total"] for line in lines] == [0, 4, 9]
    assert [line["train/grad_norm"] is None for line in lines] == [False, True, True]
    assert lines[2]["train/update_norm"] == 0
    summary = read_json(run / "summary.json")
    assert (summary["steps"], summary["diverged"]) == (10, True)
    assert summary["stopped"].startswith("9 updates in a row were skipped (the last at loss ")
    assert summary["heldout_loss"] is None
    assert summary["spikes/skipped_total"] == 9
    assert summary["sample"]
    assert (summary["state"], summary["reason"]) == ("diverged", summary["stopped"])
    steps_of_kind = defaultdict(list)
    for event in read_events(run):
        steps_of_kind[event.kind, event.definition].append(event.step)
    skipped = list(range(2, 11))
    assert steps_of_kind == {
        ("skipped", None): skipped,
        ("grad_spike", "spikes"): [2],
        ("grad_spike", "spikes_olmo2"): [2],
        ("grad_spike", "spikes_detrended"): [2],
        ("diverged", None): [10],
    }
    assert diverged(run)
    assert load_run(run).state == "diverged, stopped"
    saved = checkpoint_tensors(run, 10)
    assert all(torch.isfinite(value).all() for value in saved.values())
    again = start(corpus, run, *words, ranks=ranks).finish()
    assert f"{run} diverged and stopped after step 10: 9 updates in a row were skipped" in again
    assert "continues" not in again
    if ranks == 1:  # the run resumes with another limit of skips or another learning rate
        output = start(corpus, run, *words, "train.max_consecutive_skips=8").finish()
        assert "resumes from step 10" in output
        assert "diverged: 10 updates in a row" in output
        assert "; stopped after step 20, saved; try a smaller optim.lr" in output
        changed = ("optim.lr=1e-3", "run.allow_changes=[optim.lr]", "steps=60")
        output = start(corpus, run, *words, *changed).finish()
        assert "resumes from step 20" in output
        ends = [e.step for e in read_events(run) if e.kind in ("diverged", "restart")]
        assert ends == [10, 10, 20, 20, 30], "an end, a restart, and so on"


@pytest.mark.slow
def test_sweep_counts_diverged_run_as_finished(tmp_path, environment, tiny):
    swept = ["-m", *tiny, "optim.lr=1e-3,1e20", "optim.warmup_steps=0", "run.sweep=rates"]
    swept += ["steps=12", "log_interval=5", "train.max_consecutive_skips=3"]
    ended = success_of(train(swept, tmp_path, environment))
    assert "lr1e+20  diverged, stopped after step 5: 4 updates in a row were skipped" in ended.out
    assert "did not finish" not in ended.out
    again = success_of(train(swept, tmp_path, environment))
    assert "lr1e+20  diverged, stopped after step 5: 4 updates in a row were skipped" in again.out
    assert "run 2 of 2" not in again.out


@pytest.mark.slow
def test_large_lr_experiment_has_loss_and_gradient_spikes(tmp_path, environment):
    words = ["experiment=large_lr", "run.dir=run", "wandb.mode=disabled"]
    assert train(words, tmp_path, environment).code == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["spikes/loss_total"] >= 1
    assert summary["spikes/grad_total"] >= 1
