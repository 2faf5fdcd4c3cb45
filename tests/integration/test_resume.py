"""Runs that are killed, stopped and continued, in real processes."""

import os
import signal
from pathlib import Path

import pytest
from runs import (
    assert_same_weights,
    command,
    finish,
    kill_everything,
    metric_lines,
    pid_of_rank,
    reached,
    start,
    wait_for,
    write_corpus,
)

INTERVALS = (
    *("steps=60", "checkpoint.interval=30", "eval.interval=20", "log_interval=5"),
    *("diagnostics.interval=4", "diagnostics.probe_interval=7", "train.skip_step=spike"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_after_a_checkpoint_and_started_again_is_bit_identical(corpus, tmp_path, ranks):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    finish(start(command(corpus, straight, *INTERVALS, ranks=ranks)))
    first = start(command(corpus, broken, *INTERVALS, ranks=ranks))
    half_way = broken / "checkpoints" / "step-00000030"
    wait_for(half_way.exists, first, "checkpoint at step 30")
    kill_everything(first)
    assert not (broken / "checkpoints" / "step-00000060").exists(), "killed too late"
    output = finish(start(command(corpus, broken, *INTERVALS, ranks=ranks)))
    assert "continues after step 30" in output
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, 60)
    assert_measured_when_due(straight)


def assert_measured_when_due(run: Path) -> None:
    """Each family of metrics stands in the lines of its own interval, and in no other."""
    cadence = {
        "hidden_top1/layer_01": set(range(4, 61, 4)),
        "lambda_mean/layer_00": set(range(4, 61, 4)),
        "attn_entropy/layer_01": set(range(7, 61, 7)),
        "lambda_head_03/layer_00": set(range(7, 61, 7)),
        "train/update_norm": {1, *range(5, 61, 5)},
        "grad_norm/lambda": {1, *range(5, 61, 5)},
        "eval/loss": {20, 40, 60},
    }
    lines = metric_lines(run)
    for name, steps in cadence.items():
        assert {line["step"] for line in lines if name in line} == steps, name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_continues(corpus, tmp_path, number):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    finish(start(command(corpus, straight, *INTERVALS)))
    first = start(command(corpus, stopped, *INTERVALS))
    wait_for(lambda: reached(stopped, 10), first, "step 10")
    first.send_signal(number)
    output = finish(first)
    assert f"stopped by {number.name}" in output
    saved = [p.name for p in (stopped / "checkpoints").iterdir()]
    assert len(saved) >= 1, saved
    assert "step-00000060" not in saved, "stopped too late"
    finish(start(command(corpus, stopped, *INTERVALS)))
    assert metric_lines(stopped) == metric_lines(straight)
    assert_same_weights(straight, stopped, 60)


def test_a_signal_to_one_rank_stops_both_at_the_same_step(corpus, tmp_path):
    run = tmp_path / "run"
    process = start(command(corpus, run, *INTERVALS, ranks=2))
    wait_for(lambda: reached(run, 10), process, "step 10")
    os.kill(pid_of_rank(process, 1), signal.SIGTERM)
    output = finish(process)
    assert "stopped by SIGTERM after step" in output
    assert "Traceback" not in output
    (checkpoint,) = sorted((run / "checkpoints").iterdir())[-1:]
    assert not checkpoint.name.startswith("."), "the last save was not awaited"
    assert "continues after step" in finish(start(command(corpus, run, *INTERVALS, ranks=2)))


def test_another_number_of_ranks_continues_with_the_same_batches(corpus, tmp_path):
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    extra = (*INTERVALS, "precision=fp32")
    finish(start(command(corpus, straight, *extra)))
    first = start(command(corpus, moved, *extra, ranks=2))
    wait_for((moved / "checkpoints" / "step-00000030").exists, first, "checkpoint at step 30")
    kill_everything(first)
    finish(start(command(corpus, moved, *extra, "data.num_workers=0", "micro_batch_size=4")))
    for mine, other in zip(metric_lines(moved), metric_lines(straight), strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() & {"train/loss", "eval/loss", "train/grad_norm"}:
            assert mine[name] == pytest.approx(other[name], abs=1e-4), (mine["step"], name)
