"""Attention within documents on CPUs, against explicit masks; memory grows linearly."""

import pytest
import torch
from runs.allocations import allocations, kept_bytes

from diffllm.model.attention.masks import Documents, Packed
from diffllm.model.attention.ops import Backend, attend

END = 0
HEADS = {"equal": (2, 2, 2, 8), "grouped": (6, 3, 3, 8), "V1": (8, 4, 2, 16)}
"""Numbers of query, key and value heads, and the width of a value head; queries have width 8."""


def random_tokens(batch, length, seed=0):
    return torch.randint(END, 5, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_heads(batch, length, shape, dtype=torch.float64):
    n_heads, n_keys, n_values, width = shape
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(batch, length, n, d, generator=generator, dtype=dtype).requires_grad_()
        for n, d in ((n_heads, 8), (n_keys, 8), (n_values, width))
    ]


def outputs(parts, mask, backend):
    out = attend(*parts, mask, backend)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, torch.autograd.grad((out * weights).sum(), parts)


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 40), (2, 700)])
def test_attention_of_documents_and_its_gradients_match_explicit_mask(batch, length, shape):
    documents = Documents.of(random_tokens(batch, length), END)
    parts = random_heads(batch, length, HEADS[shape])
    packed = Packed(documents.boundaries, length)
    out, grads = outputs(parts, packed, Backend.sdpa)
    expected, of_mask = outputs(parts, documents.mask(), Backend.reference)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, of_mask, rtol=0, atol=1e-11)


def test_bf16_documents_have_the_rounding_of_bf16():
    documents = Documents.of(random_tokens(2, 64), END)
    parts = random_heads(2, 64, HEADS["V1"])
    rounded = [part.detach().bfloat16().requires_grad_() for part in parts]
    out, grads = outputs(rounded, Packed(documents.boundaries, 64), Backend.sdpa)
    exact = [part.detach().double().requires_grad_() for part in rounded]
    expected, of_mask = outputs(exact, documents.mask(), Backend.reference)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)
    for grad, of in zip(grads, of_mask, strict=True):
        torch.testing.assert_close(grad.double(), of, rtol=2**-6, atol=2**-6)


def allocated(length):
    """Return the bytes that forward and backward allocate, and those that the forward keeps."""
    documents = Documents.of(random_tokens(1, length), END)
    parts = random_heads(1, length, HEADS["grouped"], torch.float32)
    forward, out = allocations(lambda: attend(*parts, Packed(documents.boundaries, length)))
    backward, _ = allocations(out.sum().backward)
    each = [
        event.cpu_memory_usage for run in (forward, backward) for event in run.events()
        if event.cpu_memory_usage > 0
    ]  # fmt: skip
    return max(each), kept_bytes(forward)


@pytest.mark.slow
def test_memory_of_document_attention_grows_linearly_with_length():
    short, long = allocated(1024), allocated(8192)
    for of_short, of_long in zip(short, long, strict=True):
        assert of_long <= 8.1 * of_short
