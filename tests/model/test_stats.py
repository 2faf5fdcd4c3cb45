"""In-block statistics: against recomputation, in theory, and combined over micro-batches."""

import math

import pytest
import torch
from runs.one_rank import gloo_group
from runs.ranks import run_ranks
from tiers import families, slow_but

from diffllm import build_model, load_config
from diffllm.metrics.diagnostics import merge, named_values, reduce_stats
from diffllm.model.stats import block_stats

WRITES = ("residual_rms", "attn_write_rms", "ffn_write_rms")
COMMON = {
    "hidden_top1",
    "hidden_kurtosis",
    "context_rms",
    "context_rms_min",
    "context_rms_max",
    "context_over_value_rms",
    "context_over_value_rms_min",
    "context_over_value_rms_max",
    *WRITES,
}
ADDED = {"residual": 5.0, "attn_write": 0.3, "ffn_write": 2.0}
LAMBDA = {"lambda_mean", "lambda_min", "lambda_max"}
EXPECTED = {
    "standard": COMMON,
    "standard_1p5x_heads": COMMON,
    "standard_2x_heads": COMMON,
    "standard_half_context": COMMON,
    "diff_v2_2x_context": COMMON | LAMBDA,
    "standard_sink": COMMON,
    "standard_off_by_one": COMMON,
    "gated": COMMON | {"gate_mean"},
    "gated_headwise": COMMON | {"gate_mean"},
    "diff_v1": COMMON | LAMBDA,
    "diff_v1_clamped": COMMON | LAMBDA,
    "diff_v1_lambda_const": COMMON | LAMBDA,
    "diff_v1_no_head_norm": COMMON | LAMBDA,
    "diff_v2": COMMON | LAMBDA,
    "diff_v2_head_norm": COMMON | LAMBDA,
    "diff_v2_lambda_fixed": COMMON | LAMBDA,
    "diff_v2_lambda_scalar": COMMON | LAMBDA,
    "diff_v2_no_lambda": COMMON | LAMBDA,
    "diff_v2_no_sigmoid": COMMON | LAMBDA,
    "diff_v2_unshared_kv": COMMON | LAMBDA,
}


@pytest.fixture(scope="module", autouse=True)
def group():
    with gloo_group():
        yield


def tiny(variant, *extra):
    overrides = ["model=tiny", "model.init_std=0.2", "model.vocab_size=64", "data.vocab_size=64"]
    cfg = load_config([*overrides, f"attention={variant}", "seq_len=16", *extra])
    return build_model(cfg.model)


def batch(size=4):
    tokens = torch.randint(0, 64, (size, 17))
    return tokens[:, :-1], tokens[:, 1:]


def test_nothing_is_computed_unless_asked_for():
    assert block_stats(torch.randn(2, 3, 4), None) == {}


def test_block_stats_equal_an_explicit_recomputation():
    x = torch.randn(2, 5, 12)
    x[1, 3, 7] = -40.0
    context, lam, gate = torch.randn(2, 5, 3, 6), torch.rand(2, 5, 3), torch.rand(2, 5, 3, 6)
    added = {name: scale * torch.randn(2, 5, 12) for name, scale in ADDED.items()}
    v = torch.randn(2, 5, 2, 6) * torch.tensor([1.0, 7.0]).view(2, 1, 1, 1)
    stats = block_stats(x, {"context": context, "v": v, "lambda": lam, "gate": gate, **added})
    rms = [
        math.sqrt(sum(c.item() ** 2 for c in context[b, t, h]) / 6)
        for b in range(2)
        for t in range(5)
        for h in range(3)
    ]
    values = [math.sqrt(sum(c.item() ** 2 for c in v[b].flatten()) / 60) for b in range(2)]
    ratios = [r / values[i // 15] for i, r in enumerate(rms)]
    kurtosis = []
    for row in x.flatten(0, 1).double().tolist():
        mean = sum(row) / 12
        variance = sum((v - mean) ** 2 for v in row) / 12
        kurtosis.append(sum((v - mean) ** 4 for v in row) / 12 / variance**2)
    expected = {
        "hidden_top1": 40.0,
        "hidden_kurtosis": sum(kurtosis) / 10,
        "context_rms": sum(rms) / 30,
        "context_rms_min": min(rms),
        "context_rms_max": max(rms),
        "context_over_value_rms": sum(ratios) / 30,
        "context_over_value_rms_min": min(ratios),
        "context_over_value_rms_max": max(ratios),
        "lambda_mean": lam.double().mean().item(),
        "lambda_min": lam.min().item(),
        "lambda_max": lam.max().item(),
        "gate_mean": gate.double().mean().item(),
        **{
            f"{name}_rms": math.sqrt(sum(v**2 for v in value.double().flatten().tolist()) / 120)
            for name, value in added.items()
        },
    }
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected)
    assert all(s.dtype == torch.float32 and s.shape == () for s in stats.values())


def test_statistics_are_detached_and_float32_from_bf16():
    x = torch.randn(1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    shown = {"context": x.view(1, 4, 2, 4) * 1, "lambda": x.mean(-1)}
    for name, value in block_stats(x, shown).items():
        assert not value.requires_grad, name
        assert value.dtype == torch.float32


def test_a_scalar_lambda_is_its_own_mean_minimum_and_maximum():
    shown = {"context": torch.randn(1, 2, 1, 4), "lambda": torch.tensor(0.37)}
    stats = block_stats(torch.randn(1, 2, 4), shown)
    assert {stats[name].item() for name in LAMBDA} == {torch.tensor(0.37).item()}


def kurtosis_of(x):
    return block_stats(x, {"context": torch.zeros(1, 1, 1, 1)})["hidden_kurtosis"].item()


def test_kurtosis_is_3_for_normals_and_the_width_for_a_single_large_channel():
    assert kurtosis_of(torch.randn(4, 16, 8192) * 7 + 3) == pytest.approx(3, rel=0.02)
    assert kurtosis_of(torch.rand(4, 16, 8192)) == pytest.approx(1.8, rel=0.02)
    outlier = torch.zeros(2, 3, 1000)
    outlier[..., 17] = 50.0
    assert kurtosis_of(outlier) == pytest.approx(1000, rel=0.01)
    assert math.isfinite(kurtosis_of(torch.zeros(2, 3, 8)))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_micro_batches_combine_to_the_statistics_of_the_whole(micro_batches):
    x = torch.randn(8, 5, 16) * torch.arange(1, 9).view(8, 1, 1)
    context, lam = torch.randn(8, 5, 2, 4) * x[:, :, :2, None], torch.rand(8, 5, 2)
    gate = torch.rand(8, 5, 2, 4)
    added = {name: torch.randn(8, 5, 16) * x * scale for name, scale in ADDED.items()}

    def stats(rows):
        shown = {"context": context[rows], "lambda": lam[rows], "gate": gate[rows]}
        shown |= {name: value[rows] for name, value in added.items()}
        return {name: value.view(1) for name, value in block_stats(x[rows], shown).items()}

    merged, size = {}, 8 // micro_batches
    for i in range(micro_batches):
        merged = merge(merged, stats(slice(i * size, (i + 1) * size)))
    reduced, whole = reduce_stats(merged, micro_batches), stats(slice(None))
    assert reduced.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(reduced[name], value, msg=name)


def test_named_values_put_the_quantity_first_and_the_layer_in_two_digits():
    stats = {"context_rms": torch.arange(12.0), "hidden_top1": torch.arange(12.0) + 100}
    values = named_values(stats)
    assert len(values) == 24
    assert values["context_rms/layer_00"] == 0.0
    assert values["context_rms/layer_11"] == 11.0
    assert values["hidden_top1/layer_03"] == 103.0
    assert all(type(value) is float for value in values.values())


@pytest.mark.parametrize("variant", slow_but(families(EXPECTED), EXPECTED))
def test_a_diagnosed_forward_pass_returns_exactly_its_names(variant):
    inputs, targets = batch()
    stats = tiny(variant)(inputs, targets, diagnose=True).stats
    assert set(stats) == EXPECTED[variant]
    assert all(value.shape == (2,) and torch.isfinite(value).all() for value in stats.values())
    expected = {f"{name}/layer_{i:02d}" for name in EXPECTED[variant] for i in range(2)}
    assert set(named_values(reduce_stats(stats, 1))) == expected


@pytest.mark.parametrize("variant", slow_but(families(EXPECTED), EXPECTED))
def test_diagnosing_changes_neither_objective_nor_gradients(variant):
    model, (inputs, targets) = tiny(variant), batch()
    plain, diagnosed = (model(inputs, targets, diagnose=d) for d in (False, True))
    assert plain.stats == {}
    assert torch.equal(plain.objective, diagnosed.objective)
    grads = [
        torch.autograd.grad(out.objective, list(model.parameters())) for out in (plain, diagnosed)
    ]
    for mine, other in zip(*grads, strict=True):
        assert torch.equal(mine, other)


def test_rms_combine_by_the_root_of_the_mean_of_squares():
    parts = [torch.tensor([3.0, math.nan, 1e-3]), torch.tensor([4.0, 1.0, 1e-3])]
    merged = merge({"residual_rms": parts[0]}, {"residual_rms": parts[1]})
    first, second, third = reduce_stats(merged, 2)["residual_rms"].tolist()
    assert first == pytest.approx(math.sqrt((9 + 16) / 2))  # not 3.5, the mean of roots
    assert math.isnan(second)
    assert third == pytest.approx(1e-3)


def reduced_with_nan(values):
    """Reduce a statistic of each kind over two ranks, NaN on one of them only."""
    own = torch.tensor(values[torch.distributed.get_rank()])
    stats = {
        name: own.clone()
        for name in ("lambda_min", "lambda_max", "hidden_top1", "attn_entropy", "residual_rms")
    }
    return {name: value.tolist() for name, value in reduce_stats(stats, 1).items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_one_rank_is_seen_on_all(rank, tmp_path):
    values = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    values[rank][0] = values[rank][2] = math.nan
    for reduced in run_ranks(reduced_with_nan, 2, tmp_path, values):
        for name, row in reduced.items():
            assert [math.isfinite(value) for value in row] == [False, True, False], name
        assert reduced["lambda_max"][1] == reduced["attn_entropy"][1] == 2.0
