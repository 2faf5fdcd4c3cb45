"""Whole runs of a mixture of experts: metrics, a kill and a resume, and the tools on them."""

import json
from pathlib import Path

import pytest
import torch
from runs.command import Gate, assert_same_weights, finish, metric_lines, prepared_corpus, start

from diffllm import cli as tools
from diffllm.evaluation.load import load_model

STEPS, HALF = 20, 10
MIXTURE = (
    *("model=moe_tiny", "model.vocab_size=512", "model.n_layers=3", "model.moe.n_dense_layers=1"),
    *("model.moe.balance_loss=0.01", "model.moe.router_z_loss=0.001", "attention=diff_v2"),
    *(f"steps={STEPS}", f"checkpoint.interval={HALF}", f"eval.interval={HALF}", "log_interval=5"),
    *("diagnostics.interval=4", "model.moe.bias_update_rate=0.01"),
)
EXPERTS, TOP_K = 8, 2
BY_LAYER = ("router_entropy", "expert_load_max", "expert_load_min", "router_bias_range")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("moe") / "finished"
    finish(corpus, run, *MIXTURE)
    return run


def test_a_run_writes_the_named_metrics_of_its_layers_of_experts(finished):
    lines = metric_lines(finished)
    for name in BY_LAYER:
        for layer in ("layer_01", "layer_02"):
            found = [line["step"] for line in lines if f"{name}/{layer}" in line]
            assert found == list(range(4, STEPS + 1, 4)), name
        assert not any(f"{name}/layer_00" in line for line in lines), "a dense layer"
    logged = [1, *range(5, STEPS + 1, 5)]
    for name in ("grad_norm/router", "train/balance_loss", "train/router_z_loss"):
        assert [line["step"] for line in lines if name in line] == logged, name
        assert all(line[name] > 0 for line in lines if name in line)
    assert all("hidden_top1/layer_00" in line for line in lines if line["step"] % 4 == 0)
    measured = [line for line in lines if "router_entropy/layer_01" in line]
    for line in measured:
        for layer in ("layer_01", "layer_02"):
            assert 0 < line[f"router_entropy/{layer}"] <= torch.tensor(float(EXPERTS)).log()
            low, high = (line[f"expert_load_{end}/{layer}"] for end in ("min", "max"))
            assert 0 <= low <= 1 <= high <= EXPERTS / TOP_K
            assert 0 < line[f"router_bias_range/{layer}"] <= 2 * 0.01 * line["step"] * (1 + 1e-6)
    assert "train/z_loss" not in lines[0]


def test_the_last_bias_is_in_the_checkpoint_and_in_the_metrics(finished):
    state = load_model(finished)[0].router_state()
    last = metric_lines(finished)[-1]
    assert last["step"] == STEPS
    for layer in (1, 2):
        bias = state[f"layers.{layer}.ffn.router.bias"]
        assert bias.any()
        shown = last[f"router_bias_range/layer_0{layer}"]
        assert shown == pytest.approx((bias.max() - bias.min()).item(), rel=1e-6)
        load = state[f"layers.{layer}.ffn.router.load"]
        for end, value in (("max", load.max()), ("min", load.min())):
            shown = last[f"expert_load_{end}/layer_0{layer}"]
            assert shown == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_started_again_is_bit_identical(corpus, finished, tmp_path, ranks):
    straight, broken = finished, tmp_path / "broken"
    if ranks > 1:
        straight = tmp_path / "straight"
        finish(corpus, straight, *MIXTURE, ranks=ranks)
    gate = Gate(broken, HALF + 4)
    first = start(corpus, broken, *MIXTURE, ranks=ranks)
    first.wait_for((broken / "checkpoints" / f"step-{HALF:08d}").exists, "checkpoint half way")
    first.kill()
    gate.open()
    output = finish(corpus, broken, *MIXTURE, ranks=ranks)
    assert f"continues after step {HALF}" in output
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, STEPS)
    mine, other = (load_model(run)[0].router_state() for run in (broken, straight))
    assert {name.rpartition(".")[2] for name in mine} == {"bias", "load"}
    for name, value in mine.items():
        assert torch.equal(value, other[name]), name


def test_a_checkpoint_without_its_routers_bias_is_another_model(finished):
    """The bias decides where tokens go: a tool that leaves it out would show another model."""
    model, tokens = load_model(finished)[0], torch.arange(120).view(2, 60)
    with torch.no_grad():
        logits = model(tokens)
        for layer in model.layers[1:]:
            layer.ffn.router.bias.zero_()
        assert (model(tokens) - logits).abs().max() > 1e-3


@pytest.mark.slow
def test_the_tools_work_on_a_run(finished, tmp_path, capsys):
    assert tools.main(["generate", f"run={finished}", "prompt=3 times", "max_new_tokens=8"]) == 0
    assert capsys.readouterr().out.startswith("3 times")
    figure = tmp_path / "map.png"
    words = ["attention-map", f"run={finished}", "prompt=3 times 4 is", f"out={figure}"]
    assert tools.main(words) == 0
    assert figure.stat().st_size > 1000
    assert tools.main(["report", str(finished), f"out={tmp_path}"]) == 0
    assert "diff_v2" in (tmp_path / "report.html").read_text()
    facts = json.loads((finished / "run.json").read_text())
    assert 0 < facts["active_parameters"] < facts["parameters"]
