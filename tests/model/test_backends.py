"""Attention backends call their kernels correctly.

Replacements of GPU kernels check the calling convention and compute explicit maps. The real kernels
run in test_kernels_on_gpu.py.
"""

import inspect
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from stand_ins import (
    END,
    Cuda,
    assert_close_in_bf16,
    explicit,
    heads,
    packed_attention,
    tokens_with_documents,
)
from tiers import slow_but
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from variants import SHAPES

from diffllm.model.attention import ops
from diffllm.model.attention.kernels import causal_blocks, document_blocks
from diffllm.model.attention.masks import Documents, Packed
from diffllm.model.attention.ops import Backend, attend

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

ADAPTED = [(shape, wide) for shape in SHAPES for wide in (1, 2) if shape[1] % wide == 0]


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape", "wide"), slow_but(ADAPTED[:2], ADAPTED))
def test_flex_attention_equals_sdpa(monkeypatch, shape, wide, masked):
    """Uncompiled FlexAttention computes the forward pass on a CPU."""
    monkeypatch.setattr(ops, "compiled_flex", lambda: flex_attention)
    q, k, v = heads(shape, wide)
    documents = Documents.of(tokens_with_documents(), END) if masked else None
    blocks = document_blocks(documents.ids) if documents else causal_blocks(40, q.device)
    out = attend(q, k, v, blocks, Backend.flex, 0.9)
    expected = attend(q, k, v, documents and documents.mask(), scale=0.9)
    assert out.shape == expected.shape == (2, 40, shape[0], wide * shape[2])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def fake_varlen_attn(calls, *args, **kwargs):
    bound = inspect.signature(varlen_attn).bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    assert a["window_size"] == (-1, 0), "causal"
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "flash-attn-4 does not support cuDNN"
    if "enable_gqa" in a:
        assert a["enable_gqa"] or a["query"].shape[1] == a["key"].shape[1]
    assert a["return_aux"] is None
    calls.append("varlen_attn")
    return packed_attention(
        *(a[name] for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")),
        a["scale"],
    )


def stand_in_for_flash_attn(calls):
    """Replace flash-attn 2, with the calling convention of its README."""
    module = ModuleType("flash_attn")

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        assert causal
        assert dropout_p == 0
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert q.ndim == k.ndim == v.ndim == 4
        assert q.shape[1] == k.shape[1] == v.shape[1], "(batch, tokens, heads, width)"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1], "q, k and v must have the same width"
        assert q.shape[2] % k.shape[2] == 0
        assert k.shape[2] == v.shape[2]
        calls.append("flash_attn_func")
        return torch.stack([explicit(*row, softmax_scale) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
    ):
        assert causal
        assert dropout_p == 0
        calls.append("flash_attn_varlen_func")
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return packed_attention(q, k, v, *ends, softmax_scale)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


@pytest.fixture
def ran(monkeypatch):
    """Replace the kernels of torch and flash-attn; return the list of called kernels."""
    calls = []
    monkeypatch.setattr(ops, "varlen_on_cpu", ops.varlen)
    monkeypatch.setattr(varlen, "varlen_attn", partial(fake_varlen_attn, calls))
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in_for_flash_attn(calls))
    return calls


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "called"), [("sdpa", "varlen_attn"), ("flash", "flash_attn_varlen_func")]
)
@pytest.mark.parametrize(("shape", "wide"), ADAPTED)
def test_varlen_attention_matches_masked_sdpa_for_documents(ran, shape, wide, backend, called):
    q, k, v = heads(shape, wide, dtype=torch.bfloat16)
    documents = Documents.of(tokens_with_documents(), END)
    packed = Packed(documents.boundaries, 40)
    for scale in (None, 0.9):
        out = attend(q, k, v, packed, Backend[backend], scale)
        assert_close_in_bf16(out, attend(q, k, v, documents.mask(), scale=scale))
    assert ran == [called] * 2


@torch.no_grad()
def test_flash_attn_4_uses_torch_varlen_attn_for_packed_documents(ran, monkeypatch):
    monkeypatch.setattr(ops, "sdpa_is_flash_4", lambda: True)
    q, k, v = heads((8, 2, 8), dtype=torch.bfloat16)
    documents = Documents.of(tokens_with_documents(), END)
    out = attend(q, k, v, Packed(documents.boundaries, 40), Backend.flash)
    assert ran == ["varlen_attn"]
    assert_close_in_bf16(out, attend(q, k, v, documents.mask()))


@torch.no_grad()
@pytest.mark.parametrize(("shape", "wide"), ADAPTED)
def test_flash_backend_matches_sdpa(ran, shape, wide):
    q, k, v = heads(shape, wide, dtype=torch.bfloat16)
    out = attend(q, k, v, None, Backend.flash)
    assert ran == ["flash_attn_func"]
    assert_close_in_bf16(out, attend(q, k, v))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["flash", "flex", "sdpa"])
def test_every_attention_backend_uses_sdpa_for_decoding_step(ran, backend, monkeypatch):
    monkeypatch.setattr(ops, "flex", lambda *_: pytest.fail("flex was called"))
    q, k, v = heads((4, 2, 8), length=9)
    out = attend(q[:, -1:], k, v, None, Backend[backend])
    torch.testing.assert_close(out, attend(q, k, v)[:, -1:], rtol=0, atol=1e-6)
    assert ran == []


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize(("masked", "half", "d"), [(0, 1, 8), (1, 1, 8), (0, 0, 8), (0, 1, 136)])
def test_sdpa_on_gpu_gets_shapes_supported_by_fused_kernels(monkeypatch, masked, half, d, cudnn):
    """FlashAttention needs equal widths, half precision and no mask. Others need equal heads.

    cuDNN also takes wide values. The question to cuDNN contains no length, which torch.compile may
    trace as a symbol.
    """
    seen = {}

    def cudnn_takes(*question):
        assert question == (dtype, 8, 4, d, 2 * d)
        return cudnn

    monkeypatch.setattr(ops, "cudnn_takes", cudnn_takes)

    def record(q, k, v, attn_mask, enable_gqa, **rest):
        seen.update(q=q, k=k, v=v, mask=attn_mask, gqa=enable_gqa)
        return torch.zeros(*q.shape[:3], v.shape[-1])

    monkeypatch.setattr(ops.F, "scaled_dot_product_attention", record)
    dtype = torch.bfloat16 if half else torch.float32
    q, k, v = (t.as_subclass(Cuda) for t in heads((8, 4, d), wide=2, dtype=dtype))
    mask = torch.ones(40, 40, dtype=torch.bool).tril() if masked else None
    out = ops.sdpa(q, k, ops.repeated(v, k), mask, 0.1)
    assert out.shape == (2, 40, 8, 2 * d)
    if half and not masked and d == 8:
        width = d if cudnn else 2 * d
        assert seen["q"].shape[-1] == seen["k"].shape[-1] == width
        assert seen["v"].shape[-1] == 2 * d
        assert seen["gqa"]
    else:
        assert seen["q"].shape[1] == seen["k"].shape[1] == seen["v"].shape[1]
        assert not seen["gqa"]
