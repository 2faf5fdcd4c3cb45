"""Explicit maps equal the maps inside of the modules, and statistics of maps are correct.

Shapes: B batch, T tokens, h heads.
"""

import math

import pytest
import torch
from runs.models import float64_model
from tiers import families, slow_but

from diffllm.config.plugins import config_directory
from diffllm.evaluation.maps import attention_maps, layer_maps
from diffllm.model.attention.ops import weighted
from diffllm.model.attention.standard import Sink
from diffllm.model.stats import entropy, negative_share

VARIANTS = sorted(path.stem for path in (config_directory() / "attention").glob("*.yaml"))
HEADS, KV_HEADS, LENGTH = 4, 2, 9


def token_batch(rows=2):
    return torch.randint(0, 64, (rows, LENGTH))


@pytest.fixture(params=slow_but(families(VARIANTS), VARIANTS))
def variant(request):
    return request.param


@torch.no_grad()
def test_effective_attention_map_reproduces_attention_output(variant):
    model = float64_model(f"attention={variant}")
    attention, rope = model.layers[1].attention, model.rope(0, LENGTH)
    x = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    shown = {}
    attention(x, rope, aux=shown)
    _, _, v = attention.project(x, rope)
    layer = attention_maps(attention, x, rope)
    if variant == "diff_v2_unshared_kv":  # Heads i and H + i of a pair have different values.
        each = v.repeat_interleave(2 * HEADS // KV_HEADS, dim=2)
        second = layer.by_query["lambda"].transpose(1, 2).unsqueeze(-1) * weighted(
            layer.maps["map 2"], each[:, :, HEADS:]
        )
        context = weighted(layer.maps["map 1"], each[:, :, :HEADS]) - second
    else:
        context = weighted(layer.effective, v)
    if variant.startswith("gated"):
        context = shown["gate"] * context
    context = attention.context_scale * context
    torch.testing.assert_close(context, shown["context"], rtol=0, atol=1e-10)


def test_attention_maps_are_causal_and_have_expected_row_sums(variant):
    layer = layer_maps(float64_model(f"attention={variant}"), token_batch(), layer=1)
    names = ["map 1", "map 2", "difference"] if variant.startswith("diff") else ["map"]
    assert list(layer.maps) == names
    heads = {"diff_v1": HEADS // 2, "standard_1p5x": HEADS * 3 // 2, "standard_2x": 2 * HEADS}
    n_heads = next((n for start, n in heads.items() if variant.startswith(start)), HEADS)
    for name, weights in layer.maps.items():
        assert weights.shape == (2, n_heads, LENGTH, LENGTH)
        assert not weights.triu(1).any()
        sums = weights.sum(-1)
        if name == "difference":
            assert (weights < 0).any() != (variant == "diff_v1_clamped")
            continue
        assert (weights >= 0).all()
        if variant in ("standard_sink", "standard_off_by_one"):
            assert (sums < 1).all()
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-12)


def test_each_row_of_clamped_diff_v1_map_sums_to_0_or_1():
    model = float64_model("attention=diff_v1_clamped")
    whole = layer_maps(model, token_batch(), layer=1).effective.sum(-1)
    torch.testing.assert_close(whole, torch.ones_like(whole), rtol=0, atol=1e-12)
    with torch.no_grad():
        for name in ("lambda_q1", "lambda_k1"):
            getattr(model.layers[1].attention, name).fill_(0.4)  # Lambda > 1: row 0 is negative.
    sums = layer_maps(model, token_batch(), layer=1).effective.sum(-1)
    assert not sums[..., 0].any()
    assert ((sums - 1).abs() < 1e-12).any()
    assert ((sums == 0) | ((sums - 1).abs() < 1e-12)).all()


@torch.no_grad()
def test_difference_map_matches_definition_of_differential_attention():
    for variant in ("diff_v1", "diff_v2", "diff_v2_no_sigmoid", "diff_v2_lambda_fixed"):
        layer = layer_maps(float64_model(f"attention={variant}"), token_batch(), layer=0)
        lam = layer.by_query["lambda"].unsqueeze(-1)
        expected = layer.maps["map 1"] - lam * layer.maps["map 2"]
        torch.testing.assert_close(layer.maps["difference"], expected, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("index", slow_but([1], [0, 1, 2]))
def test_layer_maps_function_matches_maps_of_recorded_layer_input(variant, index):
    model, ids, read = float64_model(f"attention={variant}", "model.n_layers=3"), token_batch(), []
    hook = model.layers[index].attention.register_forward_pre_hook(
        lambda module, args: read.append(args[0])
    )
    model(ids)
    hook.remove()
    expected = attention_maps(model.layers[index].attention, read[0], model.rope(0, LENGTH))
    layer = layer_maps(model, ids, index)
    assert layer.maps.keys() == expected.maps.keys()
    assert layer.by_query.keys() == expected.by_query.keys()
    for name, value in (layer.maps | layer.by_query).items():
        assert torch.equal(value, (expected.maps | expected.by_query)[name]), name
        assert not value.requires_grad


@torch.no_grad()
def test_attention_maps_return_lambda_or_gate_or_sink_value_of_each_query(variant):
    if not variant.startswith(("standard", "gated", "diff")):
        pytest.skip("this family has no lambda, gate or sink that the test knows")
    model = float64_model(f"attention={variant}")
    attention, rope = model.layers[0].attention, model.rope(0, LENGTH)
    x = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    layer = attention_maps(attention, x, rope)
    if variant.startswith("standard") and attention.sink_kind is Sink.none:
        assert layer.by_query == {}
        return
    ((name, values),) = layer.by_query.items()
    assert values.shape == layer.effective.shape[:3]
    if variant.startswith("standard"):
        expected = 1 - layer.effective.sum(-1)
    elif variant.startswith("gated"):
        scale = 2 if variant == "gated_init_one" else 1
        gate = scale * torch.sigmoid(x @ attention.w_gate.weight.T)
        expected = gate.unflatten(-1, (HEADS, -1)).mean(-1).transpose(1, 2)
    elif variant.startswith("diff_v1"):
        expected = attention.lambda_value().expand(2, HEADS // 2, LENGTH)
    else:
        expected = attention.lambda_values(x).double().expand(2, LENGTH, HEADS).transpose(1, 2)
    kinds = {"standard": "sink", "gated": "gate"}
    assert name == next((kinds[k] for k in kinds if variant.startswith(k)), "lambda")
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-12)


def test_row_entropy_and_negative_weight_fraction_match_hand_calculation():
    weights = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [-0.5, 0.25, 0.25]])
    assert negative_share(weights).mean() == pytest.approx(0.5 / 3)
    assert negative_share(torch.zeros(3, 3)).tolist() == [0, 0, 0]
    uniform = torch.ones(4, 4).tril() / torch.arange(1, 5).unsqueeze(1)
    expected = sum(math.log(n) for n in range(1, 5)) / 4
    assert entropy(uniform).mean() == pytest.approx(expected)
    assert entropy(0.5 * uniform).mean() == pytest.approx(expected)  # with half on a sink
    assert entropy(torch.ones(1, 1)) == 0
    batch = torch.stack((weights, weights.abs())).view(1, 2, 3, 3)
    assert negative_share(batch).mean(-1).tolist() == [[pytest.approx(0.5 / 3), 0]]
