"""Runs with a damaged newest checkpoint, and runs that save at intervals of time."""

import pytest
from runs.command import Gate, assert_same_weights, finish, metric_lines, start
from runs.one_rank import flip_bit

from diffllm.checkpoint.manifest import verify
from diffllm.core.run_files import list_checkpoints

WORDS = ("steps=24", "checkpoint.interval=8", "checkpoint.keep_last=0", "log_interval=5")


@pytest.mark.slow
def test_resume_matches_uninterrupted_run_if_newest_checkpoint_is_damaged(corpus, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    finish(corpus, straight, *WORDS)
    gate = Gate(broken, 19)
    first = start(corpus, broken, *WORDS)
    newest = broken / "checkpoints" / "step-00000016"
    first.kill_at(gate, newest)
    flip_bit(newest / "__0_0.distcp")
    cut_short = broken / "checkpoints" / ".step-00000020.incomplete"
    cut_short.mkdir()
    (cut_short / "__0_0.distcp").write_bytes(b"half")

    output = finish(corpus, broken, *WORDS)
    (skipped, moved) = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert f"damaged checkpoint {newest} (__0_0.distcp has a wrong checksum)" in skipped
    assert "using step-00000008" in skipped
    assert "resumes from step 8" in output
    assert moved.endswith("to damaged-step-00000016: a new checkpoint needs the name")
    names = {path.name for path in (broken / "checkpoints").iterdir()}
    steps = {f"step-{step:08d}" for step in (8, 16, 24)}
    assert names == {*steps, "damaged-step-00000016"}
    assert all(verify(path) == [] for path in list_checkpoints(broken / "checkpoints"))
    assert metric_lines(broken) == metric_lines(straight)
    for step in (16, 24):
        assert_same_weights(straight, broken, step)


@pytest.mark.slow
def test_all_ranks_save_at_same_steps_if_checkpoint_interval_is_in_seconds(corpus, tmp_path):
    """If ranks saved at different steps, each rank would wait forever."""
    run = tmp_path / "run"
    words = ("steps=24", "checkpoint.interval=0.1s", "checkpoint.keep_last=0", "log_interval=1")
    finish(corpus, run, *words, ranks=2)
    found = list_checkpoints(run / "checkpoints")
    assert len(found) > 1
    assert found[-1].name == "step-00000024"
    assert all(verify(path) == [] for path in found)
