"""Runs of a mixture of experts that are killed and resumed."""

import pytest
import torch
from runs.command import Gate, assert_same_weights, finish, metric_lines, start

from diffllm.evaluation.load import load_model

STEPS, HALF = 20, 10
MIXTURE = (
    *("model=moe_tiny", "model.vocab_size=512", "model.n_layers=3", "model.moe.n_dense_layers=1"),
    *("model.moe.balance_loss=0.01", "model.moe.router_z_loss=0.001", "attention=diff_v2"),
    *(f"steps={STEPS}", f"checkpoint.interval={HALF}", f"eval.interval={HALF}", "log_interval=5"),
    *("diagnostics.interval=4", "model.moe.bias_update_rate=0.01"),
)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    run = tmp_path_factory.mktemp("moe") / "finished"
    finish(corpus, run, *MIXTURE)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_moe_run_resumes_bit_identically(corpus, finished, tmp_path, ranks):
    straight, broken = finished, tmp_path / "broken"
    if ranks > 1:
        straight = tmp_path / "straight"
        finish(corpus, straight, *MIXTURE, ranks=ranks)
    gate = Gate(broken, HALF + 4)
    first = start(corpus, broken, *MIXTURE, ranks=ranks)
    first.kill_at(gate, broken / "checkpoints" / f"step-{HALF:08d}")
    assert f"resumes from step {HALF}" in finish(corpus, broken, *MIXTURE, ranks=ranks)
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, STEPS)
    mine, other = (load_model(run)[0].router_state() for run in (broken, straight))
    assert {name.rpartition(".")[2] for name in mine} == {"bias", "load"}
    assert all(torch.equal(value, other[name]) for name, value in mine.items())
