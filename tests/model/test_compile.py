"""Blocks of all variants compile to one graph with the same results."""

import pytest
import torch
import torch.nn.attention.varlen
from stand_ins import END
from tiers import families, slow_but
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from variants import LOSSES, MIXTURE, VARIANTS, small_config

from diffllm import build_model
from diffllm.model.attention import ops
from diffllm.model.attention.kernels import Kernel, document_blocks, training_mask
from diffllm.model.attention.masks import Documents
from diffllm.model.attention.ops import Backend

CASES = [(variant, ()) for variant in VARIANTS]
SPLIT = ("diff_v1", ("model.attention.values=split",))
CASES += [SPLIT, ("diff_v2", ("model.qk_norm=true",))]
CASES += [(variant, (*MIXTURE, *LOSSES)) for variant in families(VARIANTS)]
FAST = [("diff_v2", ())]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward_and_backward(block, x, *arguments):
    """Return output, statistics, gradients and routing of a block; check that all are finite."""
    x = x.clone().requires_grad_()
    out, stats, routed = block(x, *arguments)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    losses = list(routed.losses.values()) if routed else []
    loss = (out * weights).sum() + sum(losses)
    grads = torch.autograd.grad(loss, [x, *block.parameters()])
    assert [i for i, values in enumerate((out, *grads)) if not values.isfinite().all()] == []
    return out, stats, grads, [routed.counts, *losses] if routed else []


def assert_same(found, expected):
    """Compare two results of `forward_and_backward`."""
    (out, stats, grads, routed), (other, other_stats, other_grads, other_routed) = found, expected
    torch.testing.assert_close(routed, other_routed)
    torch.testing.assert_close(out, other, rtol=1e-4, atol=1e-5)
    assert stats.keys() == other_stats.keys()
    for name, value in other_stats.items():
        torch.testing.assert_close(stats[name], value, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(grads, other_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("variant", "extra"), slow_but(FAST, CASES))
def test_compiled_block_matches_uncompiled_block(variant, extra):
    """Cases: without and with statistics, masked documents and padding."""
    model = build_model(small_config(variant, extra=extra).model)
    block, tokens = model.layers[1], torch.randint(0, 5, (2, 12))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 12, 24)
    padding = torch.arange(12) >= torch.tensor([[8], [12]])
    for documents, own in ((None, None), (Documents.of(tokens, END), padding)):
        rope, mask = model.whole_sequences(tokens, documents, x.dtype)
        diagnose = documents is not None
        arguments = rope, mask, None, diagnose, None, own
        expected = forward_and_backward(block, x, *arguments)
        assert bool(expected[1]) == diagnose
        assert_same(forward_and_backward(compiled, x, *arguments), expected)


@pytest.mark.parametrize(
    "variant", slow_but(["diff_v2"], ["standard", "gated", "diff_v1", "diff_v2", "standard_sink"])
)
def test_compiled_block_takes_several_sequence_lengths(variant):
    """From the second length on, the length is a symbol of torch.compile."""
    model = build_model(small_config(variant).model)
    block = model.layers[1]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for length in (12, 16, 9):
        x, tokens = torch.randn(2, length, 24), torch.zeros(2, length, dtype=torch.int64)
        arguments = *model.whole_sequences(tokens, None, x.dtype), None, False
        expected = forward_and_backward(block, x, *arguments)
        assert_same(forward_and_backward(compiled, x, *arguments), expected)


@pytest.mark.parametrize(
    "variant", slow_but(["diff_v1"], ["standard", "gated", "diff_v1", "diff_v2", "standard_sink"])
)
def test_all_layers_use_same_compiled_graph(variant):
    """Constants that differ by layer do not recompile, so compile time does not grow with depth."""
    model = build_model(small_config(variant, extra=("model.n_layers=4",)).model)
    counter = CompileCounterWithBackend("eager")
    rope, mask = model.whole_sequences(torch.zeros(2, 12, dtype=torch.int64), None, torch.float32)
    for layer in model.layers:
        run = torch.compile(layer.forward, fullgraph=True, backend=counter)
        run(torch.randn(2, 12, 24), rope, mask, None, True)
    assert counter.frame_count == 1


LENGTH = 40
NUMBERS = (3, 5, 9, 2)


def batch_of_documents(number):
    """Return a batch of two rows with `number` documents in total."""
    tokens = torch.ones(2, LENGTH, dtype=torch.int64)
    tokens[0, torch.arange(number - 2) * 3 + 2] = END
    documents = Documents.of(tokens, END)
    assert len(documents.boundaries) == number + 1
    return documents


def document_maps(q: Tensor, k: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Return maps (H, T, T), causal within documents, of concatenated q and k (T, H, d)."""
    index = torch.arange(len(q))
    ids = torch.bucketize(index, ends[1:-1], right=True)
    mask = (ids[:, None] == ids[None, :]) & (index[:, None] >= index[None, :])
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)


def for_every_head(heads: Tensor, q: Tensor) -> Tensor:
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], 1)


@torch.library.custom_op("diffllm_tests::varlen", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    keys, values = (for_every_head(heads, q) for heads in (k, v))
    out = torch.einsum("hts,shd->thd", document_maps(q, keys, ends, scale), values)
    return out.contiguous()


@varlen.register_fake
def _(q, k, v, ends, longest, scale):
    return torch.empty_like(q)


@torch.library.custom_op("diffllm_tests::varlen_backward", mutates_args=())
def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = (for_every_head(heads, q) for heads in (k, v))
    weights = document_maps(q, keys, ends, scale)
    of_values = torch.einsum("hts,thd->shd", weights, grad)
    of_weights = torch.einsum("thd,shd->hts", grad, values)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_queries = torch.einsum("hts,shd->thd", of_scores, keys)
    of_keys = torch.einsum("hts,thd->shd", of_scores, q)
    grouped = (heads.unflatten(1, (k.shape[1], -1)).sum(2) for heads in (of_keys, of_values))
    return of_queries.contiguous(), *(heads.contiguous() for heads in grouped)


@varlen_backward.register_fake
def _(grad, q, k, v, ends, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def keep(ctx, inputs, output):
    q, k, v, ends, _, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, ends)


def backward(ctx, grad):
    return *varlen_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


varlen.register_autograd(backward, setup_context=keep)


def opaque_varlen_attn(q, k, v, ends, _, longest, __, scale, **rest):
    """Replace the kernel by an operation that is opaque to the compiler and has a backward pass."""
    return varlen(q, k, v, ends, longest, scale)


@pytest.mark.parametrize("variant", slow_but(["diff_v2"], ["standard", "diff_v1", "diff_v2"]))
@pytest.mark.parametrize("kernel", [Kernel.varlen, Kernel.cpu_documents])
def test_varlen_attention_shares_one_graph_for_all_document_counts(monkeypatch, kernel, variant):
    """Forward and backward results equal those with a boolean mask."""
    if kernel is Kernel.varlen:
        monkeypatch.setattr(ops, "varlen_on_cpu", ops.varlen)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", opaque_varlen_attn)
    model = build_model(small_config(variant, extra=(f"seq_len={LENGTH}",)).model)
    block = model.layers[0]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    x = torch.randn(2, LENGTH, 24)
    for number in NUMBERS:
        documents = batch_of_documents(number)
        rope, _ = model.whole_sequences(documents.ids, documents, x.dtype)
        expected = forward_and_backward(block, x, rope, documents.mask())
        mask = training_mask(kernel, documents, documents.ids)
        found = forward_and_backward(compiled, x, rope, mask)
        assert_same(found, expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_uses_same_compiled_graph_for_all_document_counts():
    model = build_model(small_config("diff_v2", extra=(f"seq_len={LENGTH}",)).model)
    block = model.layers[0]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    x = torch.randn(2, LENGTH, 24)
    for number in NUMBERS:
        documents = batch_of_documents(number)
        rope, _ = model.whole_sequences(documents.ids, documents, x.dtype)
        block.attention.backend = Backend.sdpa
        expected = block(x, rope, documents.mask())[0]
        block.attention.backend = Backend.flex
        found = compiled(x, rope, document_blocks(documents.ids))[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
