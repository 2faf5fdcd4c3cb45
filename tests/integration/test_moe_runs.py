"""Whole runs of a mixture of experts: the metrics of its routers, a kill and a resume."""

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
EXPERTS, TOP_K = 8, 2


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    run = tmp_path_factory.mktemp("moe") / "finished"
    finish(corpus, run, *MIXTURE)
    return run


def test_metrics_of_routers_are_in_bounds_and_those_of_the_checkpoint(finished):
    lines = metric_lines(finished)
    measured = [line for line in lines if "router_entropy/layer_01" in line]
    assert [line["step"] for line in measured] == list(range(4, STEPS + 1, 4))
    for line in measured:
        assert "router_entropy/layer_00" not in line, "a dense layer"
        for layer in ("layer_01", "layer_02"):
            assert 0 < line[f"router_entropy/{layer}"] <= torch.tensor(float(EXPERTS)).log()
            low, high = (line[f"expert_load_{end}/{layer}"] for end in ("min", "max"))
            assert 0 <= low <= 1 <= high <= EXPERTS / TOP_K
            assert 0 < line[f"router_bias_range/{layer}"] <= 2 * 0.01 * line["step"] * (1 + 1e-6)
    for name in ("grad_norm/router", "train/balance_loss", "train/router_z_loss"):
        logged = {line["step"]: line[name] for line in lines if name in line}
        assert list(logged) == [1, *range(5, STEPS + 1, 5)], name
        assert min(logged.values()) > 0
    state = load_model(finished)[0].router_state()
    for layer in (1, 2):
        bias, load = (state[f"layers.{layer}.ffn.router.{name}"] for name in ("bias", "load"))
        for name, value in (
            ("router_bias_range", bias.max() - bias.min()),
            ("expert_load_max", load.max()),
            ("expert_load_min", load.min()),
        ):
            assert lines[-1][f"{name}/layer_0{layer}"] == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_started_again_is_bit_identical(corpus, finished, tmp_path, ranks):
    straight, broken = finished, tmp_path / "broken"
    if ranks > 1:
        straight = tmp_path / "straight"
        finish(corpus, straight, *MIXTURE, ranks=ranks)
    gate = Gate(broken, HALF + 4)
    first = start(corpus, broken, *MIXTURE, ranks=ranks)
    first.kill_at(gate, broken / "checkpoints" / f"step-{HALF:08d}")
    assert f"continues after step {HALF}" in finish(corpus, broken, *MIXTURE, ranks=ranks)
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, STEPS)
    mine, other = (load_model(run)[0].router_state() for run in (broken, straight))
    assert {name.rpartition(".")[2] for name in mine} == {"bias", "load"}
    assert all(torch.equal(value, other[name]) for name, value in mine.items())
