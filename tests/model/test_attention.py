"""Each variant against a float64 reference with explicit maps, and the identities it must obey."""

import math

import pytest
import torch
from references import diff_v1, diff_v2, gated, rope, standard

from diffllm import build_model, load_config
from diffllm.errors import ConfigError
from diffllm.model.attention.diff_v1 import lambda_init_at
from diffllm.model.attention.ops import attend

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
SHAPES = [(4, 4, 8), (4, 2, 16), (8, 2, 8)]


def small_config(variant, heads=4, kv_heads=2, head_dim=8, extra=()):
    return load_config(
        [
            "model=tiny",
            f"attention={variant}",
            f"model.n_heads={heads}",
            f"model.n_kv_heads={kv_heads}",
            f"model.head_dim={head_dim}",
            "model.dim=24",
            "model.ffn_dim=32",
            "model.vocab_size=64",
            "model.init_std=0.3",
            "seq_len=32",
            *extra,
        ]
    )


def layer_of(variant, heads, kv_heads, head_dim, index=1):
    cfg = small_config(variant, heads, kv_heads, head_dim)
    model = build_model(cfg.model).double()
    model.reset_parameters()  # tables and constants in float64
    return model.layers[index].attention, model.rope, cfg.model.rope.theta


def reference(attention, x, theta, layer_idx):
    """The variant's output from the equations and the module's weights."""
    d = attention.head_dim
    q = rope((x @ attention.wq.weight.T).unflatten(-1, (-1, d)), theta)
    k = rope((x @ attention.wk.weight.T).unflatten(-1, (-1, d)), theta)
    v = (x @ attention.wv.weight.T).unflatten(-1, (-1, d))
    kind = type(attention).__name__
    if kind == "StandardAttention":
        context = standard(q, k, v)
    elif kind == "GatedAttention":
        context = gated(q, k, v, (x @ attention.w_gate.weight.T).unflatten(-1, (-1, d)))
    elif kind == "DiffV1Attention":
        vectors = [getattr(attention, f"lambda_{n}") for n in ("q1", "k1", "q2", "k2")]
        context = diff_v1(q, k, v, vectors, attention.head_norm.weight, layer_idx)
    else:
        context = diff_v2(q, k, v, x @ attention.w_lambda.weight.T)
    return context.flatten(2) @ attention.wo.weight.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_every_gradient_equal_the_reference(variant, shape):
    attention, tables, theta = layer_of(variant, *shape)
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    leaves = [x, *attention.parameters()]
    weights = torch.randn(2, 7, 24, dtype=torch.float64)
    ours = attention(x, tables(0, 7))
    theirs = reference(attention, x, theta, layer_idx=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    ours_grads = torch.autograd.grad((ours * weights).sum(), leaves)
    their_grads = torch.autograd.grad((theirs * weights).sum(), leaves)
    for mine, other in zip(ours_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_never_change_earlier_logits(variant):
    model = build_model(small_config(variant).model)
    tokens = torch.randint(0, 64, (2, 12))
    torch.testing.assert_close(model(tokens)[:, :7], model(tokens[:, :7]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_decoding_equals_the_full_forward_pass(variant):
    model = build_model(small_config(variant).model)
    tokens = torch.randint(0, 64, (3, 12))
    caches = model.new_caches(3, 12)
    steps = [model(tokens[:, :5], caches=caches), model(tokens[:, 5:8], caches=caches)]
    steps += [model(tokens[:, i : i + 1], caches=caches) for i in range(8, 12)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_caches_hold_what_the_baseline_holds(variant):
    model = build_model(small_config(variant).model)
    baseline = build_model(small_config("standard").model)
    held = [
        sum(t.nbytes for c in m.new_caches(2, 9) for t in (c.k, c.v)) for m in (model, baseline)
    ]
    assert held[0] == held[1]
    assert model.kv_cache_bytes_per_token() * 2 * 9 * 2 == held[0]  # caches above are float32


def test_diff_v2_at_zero_w_lambda_subtracts_half():
    attention, tables, _ = layer_of("diff_v2", 4, 2, 8)
    attention.w_lambda.weight.data.zero_()
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    q, k, v = attention.project(x, tables(0, 6))
    maps = attend(q, k, v)
    show = {}
    attention(x, tables(0, 6), show=show)
    expected = maps[:, :, 0::2] - 0.5 * maps[:, :, 1::2]
    torch.testing.assert_close(show["context"], expected, rtol=0, atol=1e-10)
    assert (show["lambda"] == 0.5).all()


def test_diff_v2_with_equal_pairs_scales_attention_by_one_minus_lambda():
    attention, tables, _ = layer_of("diff_v2", 4, 2, 8)
    rows = attention.wq.weight.data.view(8, 8, 24)
    rows[1::2] = rows[0::2]
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    show = {}
    attention(x, tables(0, 6), show=show)
    maps = attend(*attention.project(x, tables(0, 6)))[:, :, 0::2]
    expected = (1 - show["lambda"].unsqueeze(-1)) * maps
    torch.testing.assert_close(show["context"], expected, rtol=0, atol=1e-10)


def test_lambda_init_runs_from_one_fifth_towards_four_fifths():
    assert lambda_init_at(0) == pytest.approx(0.2)
    assert lambda_init_at(1) == pytest.approx(0.8 - 0.6 * math.exp(-0.3))
    assert lambda_init_at(200) == pytest.approx(0.8)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (3, 1), (4, 1)])
def test_diff_v1_refuses_odd_heads(heads, kv_heads):
    with pytest.raises(ConfigError, match="must be even for attention=diff_v1"):
        small_config("diff_v1", heads, kv_heads)


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attend_equals_explicit_maps_with_grouped_heads_and_wide_values(kv_heads, wide):
    q = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    k = torch.randn(2, 5, kv_heads, 8, dtype=torch.float64)
    v = torch.randn(2, 5, kv_heads, 8 * wide, dtype=torch.float64)
    halves = [standard(q, k, part) for part in v.split(8, dim=-1)]
    torch.testing.assert_close(attend(q, k, v), torch.cat(halves, -1), rtol=0, atol=1e-10)
