"""Attention variants against a float64 reference with explicit maps."""

import pytest
import torch
from references import REFERENCES, clamp_and_renormalise, rope
from runs.models import add_noise_to_vectors
from tiers import families, slow_but, variant_cases
from variants import SHAPES, VARIANTS, is_refused, small_config

from diffllm import build_model
from diffllm.core.errors import ConfigError
from diffllm.model.attention.diff_v1 import clamped
from diffllm.model.attention.ops import attention_weights


def float64_attention(variant, heads, kv_heads, head_dim, index=1, extra=()):
    cfg = small_config(variant, heads, kv_heads, head_dim, extra)
    model = build_model(cfg.model).double()
    model.reset_parameters()  # computes RoPE tables and constants in float64
    return model.layers[index].attention, model.rope, cfg.model.rope.theta


def reference_output(variant, attention, x, theta, layer_idx):
    """Return the output of a variant by its equations, with the weights of the module."""
    d = attention.head_dim
    q = rope((x @ attention.wq.weight.T).unflatten(-1, (-1, d)), theta)
    k = rope((x @ attention.wk.weight.T).unflatten(-1, (-1, d)), theta)
    v = (x @ attention.wv.weight.T).unflatten(-1, (-1, d))
    assert variant in REFERENCES, (
        f"attention={variant} has no reference: write its equations in tests/model/references.py"
    )
    context = REFERENCES[variant](q, k, v, x, attention, layer_idx)
    return context.flatten(2) @ attention.wo.weight.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_output_and_gradients_equal_paper_reference(variant, shape):
    if is_refused(variant, *shape[:2]):
        with pytest.raises(ConfigError, match=r"must be even|a multiple of"):
            small_config(variant, *shape)
        return
    assert_reference_attention(variant, *float64_attention(variant, *shape), length=7)


def test_attention_variant_refuses_only_unsupported_head_counts():
    for heads, kv_heads, _ in [*SHAPES, (3, 3, 8), (3, 1, 8), (6, 2, 8)]:
        for variant in ("standard", "gated", "diff_v2"):
            assert not is_refused(variant, heads, kv_heads), (variant, heads, kv_heads)
        odd = bool(heads % 2 or kv_heads % 2)
        for variant in ("diff_v1", "diff_v1_clamped", "diff_v1_no_head_norm"):
            assert is_refused(variant, heads, kv_heads) == odd, (variant, heads, kv_heads)
        uneven = bool((1.5 * heads) % kv_heads)
        assert is_refused("standard_1p5x_heads", heads, kv_heads) == uneven, (heads, kv_heads)


@pytest.mark.parametrize("variant", slow_but(families(VARIANTS), VARIANTS))
def test_context_scale_multiplies_attention_output(variant):
    """Statistics measure the scaled context."""
    plain, tables, _ = float64_attention(variant, 4, 2, 8)
    x, positions = torch.randn(2, 7, 24, dtype=torch.float64), tables(0, 7)
    shown, scaled = {}, {}
    expected = 0.5 * plain(x, positions, aux=shown)
    halved, _, _ = float64_attention(
        variant, 4, 2, 8, extra=(f"model.attention.context_scale={0.5 * plain.context_scale}",)
    )
    torch.testing.assert_close(halved(x, positions, aux=scaled), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(scaled["context"], 0.5 * shown["context"], rtol=0, atol=1e-15)


@pytest.mark.parametrize(("variant", "length"), variant_cases(VARIANTS, [31, 1, 2]))
def test_attention_equals_paper_reference_at_any_sequence_length(variant, length):
    assert_reference_attention(variant, *float64_attention(variant, 4, 2, 8), length)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] % 2 == 0])
@pytest.mark.parametrize("variant", ["diff_v1", "diff_v1_no_head_norm", "diff_v1_lambda_const"])
def test_diff_v1_matches_paper_reference_if_value_layout_is_split(variant, shape):
    layer = float64_attention(variant, *shape, extra=("model.attention.values=split",))
    assert_reference_attention(variant, *layer, length=7)


def assert_reference_attention(variant, attention, tables, theta, length):
    """Compare the output and the gradients of input and all parameters."""
    add_noise_to_vectors(attention)  # initial values could hide a wrong formula
    for name, param in attention.named_parameters():
        assert param.dtype == torch.float64, name
    x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
    leaves = [x, *attention.parameters()]
    weights = torch.randn(2, length, 24, dtype=torch.float64)
    ours = attention(x, tables(0, length))
    theirs = reference_output(variant, attention, x, theta, layer_idx=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    ours_grads = torch.autograd.grad((ours * weights).sum(), leaves)
    their_grads = torch.autograd.grad((theirs * weights).sum(), leaves)
    for mine, other in zip(ours_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_clamped_attention_map_equals_hand_computed_example():
    """Non-causal example with scale sqrt(2) and lambda 0.4; expected values have 4 decimals."""
    q = torch.tensor([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1.0]])
    k = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]])
    v = torch.cat((torch.eye(4), torch.full((1, 4), 0.5))).double()
    q, k = (t.double().view(1, 5, 2, 2) for t in (q, k))
    everything = torch.ones(5, 5, dtype=torch.bool)
    first, second = attention_weights(q, k, everything)[0]
    weights = clamped(first - 0.4 * second)
    expected = torch.tensor([0.4164, 0.0575, 0.5052, 0.0000, 0.0209], dtype=torch.float64)
    torch.testing.assert_close(weights[1], expected, rtol=0, atol=5e-5)
    outputs = [
        [0.2626, 0.3830, 0.4746, 0.1710],
        [0.4269, 0.0679, 0.5156, 0.0104],
        [0.2909, 0.2021, 0.5917, 0.0848],
        [0.3189, 0.3189, 0.3801, 0.1947],
        [0.1710, 0.4746, 0.4746, 0.1710],
    ]
    expected = torch.tensor(outputs, dtype=torch.float64)
    torch.testing.assert_close(weights @ v, expected, rtol=0, atol=5e-5)
    assert (weights == 0).nonzero().tolist() == [[1, 3], [2, 3]]
    torch.testing.assert_close(weights, clamp_and_renormalise(first - 0.4 * second))


def test_row_of_clamped_attention_map_is_zero_if_no_entry_is_positive():
    weights = torch.tensor([[-0.2, -0.1], [0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    out = clamped(weights)
    assert out.tolist() == [[0, 0], [1, 0]]
    (grad,) = torch.autograd.grad((out * torch.randn(2, 2)).sum(), weights)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        (
            "diff_v2",
            ["lambda_value=0.3"],
            "lambda_value=0.3 needs .*lambda_form=fixed, not sigmoid",
        ),
        ("diff_v1_clamped", ["values=split"], "values=split has no effect with .*clamp=true"),
        ("diff_v1", ["head_norm_eps=0"], "head_norm_eps=0.0 must be positive"),
        ("diff_v1", ["lambda_init=1"], "lambda_init=1 makes all attention outputs zero"),
        ("standard", ["query_heads=0.6"], "query_heads=0.6 times .* gives 2.4 query heads"),
    ],
)
def test_invalid_or_unused_attention_settings_raise_config_error(variant, fields, message):
    with pytest.raises(ConfigError, match=message):
        small_config(variant, extra=tuple(f"model.attention.{field}" for field in fields))
