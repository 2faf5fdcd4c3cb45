"""Identities between variants, bounds and symmetries at any shape.

All tests draw shapes, weights, layer indices and lambdas, in float64. Maps come from references.py.
"""

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from references import lambda_init_schedule, rope, standard
from tiers import families, slow_but

from diffllm import build_model, load_config
from diffllm.config.plugins import config_directory
from diffllm.core.errors import ConfigError
from diffllm.model.attention.diff_v1 import clamped, even_heads_first
from diffllm.model.init import Initializer
from diffllm.model.rope import RopeConfig, RotaryEmbedding

VARIANTS = sorted(path.stem for path in (config_directory() / "attention").glob("*.yaml"))
V1 = [name for name in VARIANTS if name.startswith("diff_v1")]
SINKS = ["standard_sink", "standard_off_by_one"]
DIM, SEQ_LEN = 12, 48

few = settings(max_examples=8)
many = settings(max_examples=20)


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    tokens: int
    layer: int
    seed: int


@cache
def base_config(variant):
    cfg = load_config(["model=tiny", f"attention={variant}", f"seq_len={SEQ_LEN}"]).model
    return replace(cfg, dim=DIM, ffn_dim=16, vocab_size=32, init_std=0.3)


@cache
def allowed_heads(variant):
    """List the head counts (H, K) that a variant supports, up to 8 heads."""
    pairs = [(k * group, k) for k in (1, 2, 3, 4) for group in (1, 2, 3, 4) if k * group <= 8]
    taken = []
    for heads, kv_heads in pairs:
        try:
            replace(base_config(variant), n_heads=heads, n_kv_heads=kv_heads).validate()
        except ConfigError:
            continue
        taken.append((heads, kv_heads))
    return taken


@st.composite
def shapes(draw, variant="standard", head_dims=(2, 4, 6, 8), tokens=(1, 9)):
    return Shape(
        *draw(st.sampled_from(allowed_heads(variant))),
        head_dim=draw(st.sampled_from(head_dims)),
        batch=draw(st.integers(1, 2)),
        tokens=draw(st.integers(*tokens)),
        layer=draw(st.integers(0, 6)),
        seed=draw(st.integers(0, 2**20)),
    )


def lambdas(low, high):
    """Draw lambdas that are exact in float32, the dtype of constant lambdas."""
    return st.floats(low, high, width=32)


def configured(variant, shape, **fields):
    base = base_config(variant)
    cfg = replace(
        base,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        init_seed=shape.seed,
        attention=replace(base.attention, **fields),
    )
    cfg.validate()
    return cfg


def normal(shape, *size, what=0):
    generator = torch.Generator().manual_seed(shape.seed * 8 + what)
    return torch.randn(*size, dtype=torch.float64, generator=generator)


def random_attention(variant, shape, **fields):
    """Build an attention module in float64, with random vectors, so no formula is trivial."""
    cfg = configured(variant, shape, **fields)
    attention = cfg.attention.build(cfg, shape.layer).double()
    init = Initializer(shape.seed, {param: name for name, param in attention.named_parameters()})
    init.matrices_(0.3, 0.3)
    attention.reset_parameters(init)
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for module in attention.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.weight.fill_(1)  # like the decoder
        for param in attention.parameters():
            if param.ndim == 1:
                param += 0.3 * torch.randn(param.shape, generator=generator, dtype=param.dtype)
    return attention.requires_grad_(False)


def x_of(shape):
    return normal(shape, shape.batch, shape.tokens, DIM, what=1)


def tables(shape, start=0, length=None, theta=10_000.0):
    embedding = RotaryEmbedding(shape.head_dim, SEQ_LEN, RopeConfig(theta)).double()
    embedding.reset_parameters()
    return embedding(start, length or shape.tokens)


def projected(attention, x):
    """Compute q, k and v from the weights of the module."""
    d = attention.head_dim
    q, k, v = (
        (x @ w.weight.T).unflatten(-1, (-1, d)) for w in (attention.wq, attention.wk, attention.wv)
    )
    return rope(q, 10_000.0), rope(k, 10_000.0), v


def output_and_diagnostics(attention, x, shape):
    aux = {}
    return attention(x, tables(shape), aux=aux), aux


def output(attention, x, shape):
    return output_and_diagnostics(attention, x, shape)[0]


def copy_weights(to, source, *names):
    for name in names:
        getattr(to, name).weight.copy_(getattr(source, name).weight)


def head_rows(linear, width):
    """Return the weight of a projection as a view (heads, width, D)."""
    return linear.weight.data.view(-1, width, DIM)


def make_pairs_equal(linear, width):
    rows = head_rows(linear, width)
    rows[1::2] = rows[0::2]


def assert_near(mine, other, atol=1e-10):
    torch.testing.assert_close(mine, other, rtol=0, atol=atol)


@given(shape=shapes())
@many
def test_diff_v2_matches_scaled_standard_attention_if_paired_heads_are_identical(shape):
    attention, x = random_attention("diff_v2", shape), x_of(shape)
    make_pairs_equal(attention.wq, shape.head_dim)
    attention.w_lambda.weight.copy_(attention.w_lambda.weight[:1].expand(shape.heads, -1))
    lam = torch.sigmoid(x @ attention.w_lambda.weight[0])[..., None]
    first, aux = output_and_diagnostics(attention, x, shape)
    context = standard(*projected(attention, x))[:, :, 0::2]
    assert_near(aux["context"], (1 - lam[..., None]) * context)

    baseline = random_attention("standard", shape)
    copy_weights(baseline, attention, "wk", "wv", "wo")
    head_rows(baseline.wq, shape.head_dim)[:] = head_rows(attention.wq, shape.head_dim)[0::2]
    assert_near(first, (1 - lam) * output(baseline, x, shape))


@given(shape=shapes(), lam=lambdas(-2, 2))
@many
def test_diff_v2_matches_wide_standard_attention_if_lambda_is_constant(shape, lam):
    v2 = random_attention("diff_v2_lambda_fixed", shape, lambda_value=lam)
    wide = random_attention("standard", shape, query_heads=2.0)
    copy_weights(wide, v2, "wq", "wk", "wv")
    blocks = wide.wo.weight.data.view(DIM, 2 * shape.heads, shape.head_dim)
    blocks[:, 0::2] = v2.wo.weight.view(DIM, shape.heads, shape.head_dim)
    blocks[:, 1::2] = -lam * blocks[:, 0::2]
    x = x_of(shape)
    assert_near(output(v2, x, shape), output(wide, x, shape))


@given(shape=shapes(), lam=lambdas(-2, 2))
@many
def test_diff_v2_output_is_linear_function_of_constant_lambda(shape, lam):
    """none equals fixed 1, scalar with logit 0 equals fixed 0.5; the output is linear in lambda."""
    x, scalar = x_of(shape), random_attention("diff_v2_lambda_scalar", shape)
    scalar.lambda_logit.zero_()

    def fixed(value):
        attention = random_attention("diff_v2_lambda_fixed", shape, lambda_value=value)
        return output(attention, x, shape)

    assert_near(output(random_attention("diff_v2_no_lambda", shape), x, shape), fixed(1.0))
    assert_near(output(scalar, x, shape), fixed(0.5))
    assert_near(fixed(lam), fixed(0.0) + lam * (fixed(1.0) - fixed(0.0)))


@given(shape=shapes())
@many
def test_head_pairing_changes_diff_v2_output_only_if_several_kv_heads_exist(shape):
    """With more kv heads, heads i and H + i do not share key and value."""
    assume(shape.tokens > 1)
    adjacent = random_attention("diff_v2", shape)
    halves = random_attention("diff_v2_unshared_kv", shape)
    copy_weights(halves, adjacent, "wk", "wv", "wo", "w_lambda")
    rows = head_rows(adjacent.wq, shape.head_dim)
    head_rows(halves.wq, shape.head_dim)[:] = torch.cat((rows[0::2], rows[1::2]))
    x = x_of(shape)
    mine, other = output(adjacent, x, shape), output(halves, x, shape)
    assert torch.allclose(mine, other, rtol=0, atol=1e-10) == (shape.kv_heads == 1)


@pytest.mark.parametrize("variant", V1)
@given(data=st.data())
@few
def test_diff_v1_lambda_equals_lambda_init_if_lambda_vectors_are_zero(variant, data):
    shape = data.draw(shapes(variant))
    attention = random_attention(variant, shape)
    for name in ("lambda_q1", "lambda_k2"):  # a zero factor makes each product zero
        getattr(attention, name).zero_()
    lam = output_and_diagnostics(attention, x_of(shape), shape)[1]["lambda"]
    constant = variant == "diff_v1_lambda_const"
    assert lam.item() == (0.8 if constant else lambda_init_schedule(shape.layer))


def equal_pairs(variant, shape):
    """Return diagnostics of V1 with equal pairs, and standard attention over both value halves."""
    attention, x = random_attention(variant, shape), x_of(shape)
    make_pairs_equal(attention.wq, shape.head_dim)
    make_pairs_equal(attention.wk, shape.head_dim)
    aux = output_and_diagnostics(attention, x, shape)[1]
    q, k, v = projected(attention, x)
    halves = [standard(q[:, :, 0::2], k[:, :, 0::2], v[:, :, i::2]) for i in (0, 1)]
    return aux, halves


@given(shape=shapes("diff_v1"))
@many
def test_diff_v1_matches_scaled_standard_attention_if_paired_heads_are_identical(shape):
    aux, halves = equal_pairs("diff_v1", shape)
    assert_near(aux["context"], (1 - aux["lambda"]) * torch.cat(halves, -1))


@given(shape=shapes("diff_v1"))
@many
def test_clamped_diff_v1_matches_closed_form_if_paired_heads_are_identical(shape):
    """The sign of (1 - lambda) * map is constant, so renormalising gives the map or zeros."""
    aux, halves = equal_pairs("diff_v1_clamped", shape)
    assume(abs(aux["lambda"].item() - 1) > 1e-3)
    assert_near(aux["context"], (aux["lambda"] < 1) * torch.cat(halves, -1))


@pytest.mark.parametrize("variant", ["gated", "gated_headwise"])
@given(data=st.data())
@few
def test_outputs_of_opposite_gates_sum_to_standard_attention_output(variant, data):
    shape = data.draw(shapes())
    attention, baseline = random_attention(variant, shape), random_attention("standard", shape)
    copy_weights(baseline, attention, "wq", "wk", "wv", "wo")
    x = x_of(shape)
    one = output(attention, x, shape)
    attention.w_gate.weight.neg_()
    assert_near(one + output(attention, x, shape), output(baseline, x, shape))


@given(shape=shapes())
@many
def test_elementwise_gate_equals_headwise_gate_if_gate_weights_are_repeated(shape):
    headwise = random_attention("gated_headwise", shape)
    elementwise = random_attention("gated", shape)
    copy_weights(elementwise, headwise, "wq", "wk", "wv", "wo")
    repeated = headwise.w_gate.weight.repeat_interleave(shape.head_dim, dim=0)
    elementwise.w_gate.weight.copy_(repeated)
    x = x_of(shape)
    assert_near(output(headwise, x, shape), output(elementwise, x, shape))


def drawn_qk(shape, n_query_heads, scale=1.0):
    """Draw q and k such that scores have a standard deviation of about `scale`."""
    q = normal(shape, shape.batch, shape.tokens, n_query_heads, shape.head_dim, what=2)
    k = normal(shape, shape.batch, shape.tokens, shape.kv_heads, shape.head_dim, what=3)
    return scale * q, k


@given(shape=shapes())
@many
def test_sink_attention_matches_simpler_variants_for_special_sink_logits(shape):
    sink, x = random_attention("standard_sink", shape), x_of(shape)
    for variant, logit in (("standard", -1e3), ("standard_off_by_one", 0.0)):
        other = random_attention(variant, shape)
        copy_weights(other, sink, "wq", "wk", "wv", "wo")
        sink.sink.fill_(logit)
        assert_near(output(sink, x, shape), output(other, x, shape))


@given(
    lam=st.floats(-1, 3),
    rows=st.lists(st.tuples(*[st.floats(-6, 6)] * 10), min_size=1, max_size=6),
)
@many
def test_clamped_attention_map_rows_sum_to_1_or_0(lam, rows):
    scores = torch.tensor(rows, dtype=torch.float64)
    first, second = (torch.softmax(part, dim=-1) for part in scores.split(5, dim=-1))
    difference = first - lam * second
    weights = clamped(difference)
    positive = (difference > 0).any(-1)
    assert (weights >= 0).all()
    assert torch.equal(weights > 0, difference > 0)
    assert_near(weights.sum(-1), positive.double())
    assert (weights[~positive] == 0).all()


def two_layer_model(variant, shape, **fields):
    cfg = replace(configured(variant, shape), n_layers=2, **fields)
    model = build_model(cfg).double()
    model.reset_parameters()
    return model.requires_grad_(False)


def drawn_tokens(shape, count):
    generator = torch.Generator().manual_seed(shape.seed)
    return torch.randint(0, 32, (shape.batch, count), generator=generator)


@pytest.mark.parametrize("variant", slow_but(families(VARIANTS), VARIANTS))
@given(data=st.data())
@few
def test_appended_tokens_do_not_change_logits_of_earlier_tokens(variant, data):
    shape = data.draw(shapes(variant, tokens=(2, 12)))
    model = two_layer_model(variant, shape, qk_norm=data.draw(st.booleans()))
    tokens = drawn_tokens(shape, shape.tokens)
    kept = data.draw(st.integers(1, shape.tokens - 1))
    assert_near(model(tokens)[:, :kept], model(tokens[:, :kept]))


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
@few
def test_shift_of_all_positions_does_not_change_attention_output(variant, data):
    shape = data.draw(shapes(variant))
    start = data.draw(st.integers(1, SEQ_LEN - shape.tokens))
    attention, x = random_attention(variant, shape), x_of(shape)
    assert_near(attention(x, tables(shape, start)), attention(x, tables(shape)))


# With orthogonal values of RMS 1, the context RMS is the Euclidean norm of the row of weights.


def orthogonal_values(shape, heads, width):
    """Return values (B, T, heads, width) with RMS 1 that are orthogonal between tokens."""
    square = normal(shape, shape.batch, heads, width, width, what=5)
    rows = torch.linalg.qr(square).Q[:, :, : shape.tokens] * math.sqrt(width)
    return rows.transpose(1, 2)


def rms(context):
    return context.square().mean(-1).sqrt()


def context_rms(variant, shape, sharpness, **fields):
    """Return the RMS (B, T, heads) of the context before any head norm."""
    attention = random_attention(variant, shape, **fields)
    q, k = drawn_qk(shape, attention.n_query_heads, sharpness)
    v = orthogonal_values(shape, shape.kv_heads, shape.head_dim)
    aux = {}
    returned = attention.context(x_of(shape), q, k, v, None, aux)
    return rms(aux.get("context", returned)), aux


def positions(shape):
    return torch.arange(1, shape.tokens + 1, dtype=torch.float64).view(-1, 1)


WIDE = {"head_dims": (12, 16), "tokens": (2, 12)}
SHARPNESS = st.floats(0, 4)
ROUNDING = 1e-12


@given(shape=shapes(**WIDE), sharpness=SHARPNESS)
@many
def test_rms_of_standard_attention_context_stays_within_theoretical_bounds(shape, sharpness):
    values, _ = context_rms("standard", shape, sharpness)
    assert (values >= positions(shape) ** -0.5 - ROUNDING).all()
    assert (values[:, 1:] < 1).all()
    assert_near(values[:, 0], torch.ones_like(values[:, 0]))


@pytest.mark.parametrize("variant", [*SINKS, "gated", "gated_headwise"])
@given(data=st.data())
@few
def test_rms_of_gated_or_sink_attention_context_is_between_0_and_1(variant, data):
    shape = data.draw(shapes(variant, **WIDE))
    values, _ = context_rms(variant, shape, data.draw(SHARPNESS))
    assert ((values > 0) & (values < 1)).all()


@given(shape=shapes(**WIDE))
@many
def test_rms_of_off_by_one_attention_context_equals_closed_form(shape):
    """With a unit sink, n equal scores have weights 1 / (n + 1) instead of 1 / n."""
    values, _ = context_rms("standard_off_by_one", shape, 0.0)
    n = positions(shape)
    assert_near(values, (n.sqrt() / (n + 1)).expand_as(values))


@given(shape=shapes(**WIDE), sharpness=SHARPNESS)
@many
def test_rms_of_diff_v2_attention_context_stays_within_theoretical_bounds(shape, sharpness):
    values, aux = context_rms("diff_v2", shape, sharpness)
    lam = aux["lambda"]
    assert (values >= (1 - lam) * positions(shape) ** -0.5 - ROUNDING).all()
    assert (values <= (1 + lam**2).sqrt() + ROUNDING).all()
    assert ((values > 0) & (values < math.sqrt(2))).all()


@given(shape=shapes("diff_v1", head_dims=(8,), tokens=(2, 16)), lam=lambdas(0, 0.875))
@many
def test_head_norm_multiplies_attention_context_rms_by_sqrt_of_key_count(shape, lam):
    attention = random_attention("diff_v1", shape, lambda_init=lam, head_norm_eps=1e-12)
    attention.head_norm.weight.fill_(1)
    for name in attention.fp32_parameters:
        getattr(attention, name).zero_()
    q, k = drawn_qk(shape, shape.heads, 0.0)
    v = orthogonal_values(shape, shape.kv_heads // 2, 16)
    aux = {}
    context = attention.context(x_of(shape), even_heads_first(q), even_heads_first(k), v, None, aux)
    normed = rms(context) / (1 - lam)
    before = rms(aux["context"]) / (1 - lam)
    assert_near(before, (positions(shape) ** -0.5).expand_as(before))
    assert_near(normed / before, positions(shape).sqrt().expand_as(before), atol=1e-6)
