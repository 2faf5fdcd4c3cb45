"""Attention backends: who is refused where, and that every adapter calls its kernel rightly.

Kernels that need a GPU are replaced by stand-ins that check the calling convention and compute
explicit maps; the kernels themselves run only in the tests marked `gpu`.
"""

import importlib.util
import inspect
import math
import sys
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import restore_flash_attention_impl
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from variants import SHAPES, VARIANTS, small_config

from diffllm import build_model, load_config
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.errors import ConfigError
from diffllm.model.attention import ops
from diffllm.model.attention.ops import (
    Backend,
    Packed,
    attend,
    causal_blocks,
    document_blocks,
    prepare_backend,
)
from diffllm.model.documents import Documents

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

MAIN = ("standard", "gated", "diff_v1", "diff_v2")
END = 0
CUDA = torch.device("cuda")


def on(backend):
    return (f"model.attention.backend={backend}",)


# What is refused


@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_backends_of_gpus_are_refused_on_the_cpu_when_building(backend):
    cfg = load_config(["model=tiny", "attention=diff_v2", *on(backend)])
    expected = (
        rf"^model\.attention\.backend={backend} needs a GPU; on the cpu choose sdpa or reference$"
    )
    with pytest.raises(ConfigError, match=expected):
        build_model(cfg.model)
    with torch.device("meta"):  # to be counted, not run
        build_model(cfg.model)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_the_others_are_not(backend):
    prepare_backend(Backend[backend], torch.device("cpu"), 32, torch.float32)
    build_model(small_config("diff_v2", extra=on(backend)).model)


def test_an_unknown_backend_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match=r"model\.attention\.backend=fast") as caught:
        load_config(["model=tiny", *on("fast")])
    assert all(backend.name in str(caught.value) for backend in Backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_a_clamped_map_is_refused_where_maps_are_not_explicit(backend):
    with pytest.raises(ConfigError, match=rf"backend={backend} has no clamped map; choose sdpa"):
        small_config("diff_v1_clamped", extra=on(backend))
    small_config("diff_v1", extra=on(backend))


@pytest.mark.parametrize(
    ("variant", "sink"), [("standard_sink", "learned"), ("standard_off_by_one", "one")]
)
def test_a_sink_is_refused_by_flex_alone(variant, sink):
    with pytest.raises(ConfigError, match=rf"backend=flex has no sink={sink}; choose sdpa, flash"):
        small_config(variant, extra=on("flex"))
    for backend in ("sdpa", "flash", "reference"):
        small_config(variant, extra=on(backend))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU and these packages, as far as `prepare_backend` looks."""

    def make(*packages, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: object() if name in packages else None
        )
        activated = []
        monkeypatch.setattr(ops, "activate_flash_4", lambda: activated.append("FA4"))
        monkeypatch.setattr(ops, "try_flash", lambda device, width: activated.append("tried"))
        return activated

    return make


V2 = ("flash_attn", "flash_attn.flash_attn_interface")
V4 = ("flash_attn", "flash_attn.cute")


@pytest.mark.parametrize(
    ("packages", "capability", "activated"),
    [
        (V2, (8, 0), []),
        (V2, (9, 0), []),
        (V4, (9, 0), ["FA4"]),
        (V4, (10, 0), ["FA4"]),
        ((*V2, *V4), (9, 0), ["FA4"]),
        ((*V2, *V4), (8, 0), []),
    ],
)
def test_flash_takes_the_newest_version_that_the_gpu_runs(gpu, packages, capability, activated):
    calls = gpu(*packages, capability=capability)
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)
    assert calls == [*activated, "tried"]


def test_a_flash_package_that_fails_is_refused_with_its_reason(gpu, monkeypatch):
    def fail(device, width):
        raise ValueError("too many values to unpack")

    gpu(*V2)
    monkeypatch.setattr(ops, "try_flash", fail)
    with pytest.raises(ConfigError, match=r"flash-attn fails with torch .*too many values"):
        prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)


def test_a_flash_package_that_cannot_be_imported_is_refused_with_its_reason(monkeypatch, tmp_path):
    """As one built for another torch."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        with pytest.raises(ConfigError, match=r"flash-attn fails with torch .* undefined symbol"):
            prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)


def test_heads_wider_than_flash_takes_are_refused(gpu):
    gpu(*V2)
    with pytest.raises(ConfigError, match="heads up to 256 wide, this variant needs 288"):
        prepare_backend(Backend.flash, CUDA, 288, torch.bfloat16)


def test_the_width_that_a_kernel_gets_is_the_variants():
    def width(variant, *extra):
        cfg = small_config(variant, extra=extra)
        return cfg.model.attention.kernel_width(cfg.model) - cfg.model.head_dim

    d = small_config("standard").model.head_dim
    assert width("standard") == width("diff_v2") == width("gated") == 0
    assert width("diff_v1") == d
    assert width("diff_v1", "model.attention.values=split") == 0
    assert width("standard_sink") == 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_come_explicit_to_maps_that_no_kernel_knows(variant):
    documents = Documents.of(tokens_with_documents(), END)
    batch = SimpleNamespace(shape=(2, 40), is_cuda=True)
    attention = build_model(small_config(variant).model).layers[0].attention
    mask = attention.training_mask(documents, batch, torch.bfloat16)
    explicit = variant in ("standard_sink", "standard_off_by_one", "diff_v1_clamped")
    assert isinstance(mask, torch.Tensor if explicit else Packed)


class Cuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize(("masked", "half", "d"), [(0, 1, 8), (1, 1, 8), (0, 0, 8), (0, 1, 136)])
def test_sdpa_on_a_gpu_gets_what_a_fused_kernel_takes(monkeypatch, masked, half, d):
    """FlashAttention: one width, no mask, half precision. Else equally many heads."""
    seen = {}

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
        assert seen["q"].shape[-1] == seen["k"].shape[-1] == seen["v"].shape[-1]
        assert seen["gqa"]
    else:
        assert seen["q"].shape[1] == seen["k"].shape[1] == seen["v"].shape[1]
        assert not seen["gqa"]


@pytest.fixture
def flash_4_stand_in(monkeypatch):
    """The private functions of flash-attn-4 that torch's dispatcher asks for."""
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = lambda *args, **kwargs: ("out", "lse", None, None, None)
    interface._flash_attn_bwd = lambda *args, **kwargs: "gradients"
    package.cute, cute.interface = cute, interface
    for module in (package, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, ops.FLASH_4, raising=False)
    yield
    sys.modules.pop(ops.FLASH_4, None)
    restore_flash_attention_impl(_raise_warn=False)


def test_flash_4_takes_the_place_of_torchs_kernels_with_the_results_torch_expects(flash_4_stand_in):
    assert not ops.sdpa_is_flash_4()
    ops.activate_flash_4()
    assert ops.sdpa_is_flash_4()
    adapted = importlib.import_module(ops.FLASH_4)
    assert adapted._flash_attn_fwd() == ("out", "lse")
    assert adapted._flash_attn_bwd() == "gradients"


@pytest.mark.parametrize(("packages", "capability"), [((), (9, 0)), (V4, (8, 0))])
def test_flash_without_its_package_is_refused(gpu, packages, capability):
    gpu(*packages, capability=capability)
    with pytest.raises(ConfigError, match="needs the flash-attn package, which is not installed"):
        prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)


def test_flash_in_float32_is_refused(gpu):
    gpu(*V2)
    with pytest.raises(ConfigError, match="backend=flash needs precision=bf16"):
        prepare_backend(Backend.flash, CUDA, 64, torch.float32)
    prepare_backend(Backend.flash, CUDA, 64, torch.float16)
    for backend in (Backend.sdpa, Backend.flex, Backend.reference):
        prepare_backend(backend, CUDA, 512, torch.float32)


# Which mask a batch gets


def tokens_with_documents(batch=2, length=40):
    tokens = torch.randint(1, 64, (batch, length))
    tokens[torch.rand(batch, length) < 0.15] = END
    return tokens


@pytest.mark.parametrize(
    ("backend", "cuda", "dtype", "explicit", "kind"),
    [
        ("sdpa", False, torch.bfloat16, False, torch.Tensor),
        ("sdpa", True, torch.bfloat16, False, Packed),
        ("sdpa", True, torch.float16, False, Packed),
        ("sdpa", True, torch.float32, False, torch.Tensor),
        ("sdpa", True, torch.bfloat16, True, torch.Tensor),
        ("flash", True, torch.bfloat16, False, Packed),
        ("flash", True, torch.bfloat16, True, torch.Tensor),
        ("reference", True, torch.bfloat16, False, torch.Tensor),
    ],
)
def test_documents_come_in_the_form_the_kernel_reads(backend, cuda, dtype, explicit, kind):
    tokens = tokens_with_documents()
    documents = Documents.of(tokens, END)
    batch = SimpleNamespace(shape=tokens.shape, is_cuda=cuda)  # all that is asked of tokens
    mask = ops.training_mask(documents, batch, Backend[backend], dtype, 64, explicit)
    assert isinstance(mask, kind)
    if kind is Packed:
        assert torch.equal(mask.boundaries, documents.boundaries)
        assert mask.longest >= documents.boundaries.diff().max()
    else:
        assert torch.equal(mask, documents.mask())
    assert ops.training_mask(None, batch, Backend[backend], dtype, 64, explicit) is None


# Adapters


def heads(shape, wide=1, batch=2, length=40, dtype=torch.float32):
    """q (B, T, H, d), k (B, T, K, d) and v (B, T, K / wide, wide * d)."""
    n, groups, d = shape
    return (
        torch.randn(batch, length, n, d, dtype=dtype),
        torch.randn(batch, length, groups, d, dtype=dtype),
        torch.randn(batch, length, groups // wide, wide * d, dtype=dtype),
    )


ADAPTED = [(shape, wide) for shape in SHAPES for wide in (1, 2) if shape[1] % wide == 0]


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape", "wide"), ADAPTED)
def test_flex_attends_as_sdpa_does(monkeypatch, shape, wide, masked):
    """FlexAttention itself, uncompiled: it computes the forward pass on a CPU."""
    monkeypatch.setattr(ops, "compiled_flex", lambda: flex_attention)
    q, k, v = heads(shape, wide)
    documents = Documents.of(tokens_with_documents(), END) if masked else None
    blocks = document_blocks(documents.ids) if documents else causal_blocks(40, q.device)
    out = attend(q, k, v, blocks, Backend.flex)
    expected = attend(q, k, v, documents and documents.mask())
    assert out.shape == expected.shape == (2, 40, shape[0], wide * shape[2])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("variant", MAIN)
def test_a_model_through_flex_computes_what_it_does_through_sdpa(monkeypatch, variant, masked):
    monkeypatch.setattr(ops, "compiled_flex", lambda: flex_attention)
    model, tokens = build_model(small_config(variant).model), tokens_with_documents(length=32)
    documents = Documents.of(tokens, END) if masked else None
    expected = model(tokens, documents=documents)
    for layer in model.layers:
        layer.attention.backend = Backend.flex
    torch.testing.assert_close(model(tokens, documents=documents), expected, rtol=0, atol=1e-5)


def explicit(q, k, v, scale):
    """Causal attention of q (T, H, d), k (S, K, d) and v (S, K, dv), one head at a time."""
    out = q.new_zeros(len(q), q.shape[1], v.shape[-1])
    for h in range(q.shape[1]):
        j = h // (q.shape[1] // k.shape[1])
        scores = (q[:, h].float() @ k[:, j].float().T) * scale
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        out[:, h] = (torch.softmax(scores, -1) @ v[:, j].float()).to(q.dtype)
    return out


def packed_attention(q, k, v, ends_q, ends_k, longest_q, longest_k, scale):
    """What variable-length kernels promise, and what they want."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert q.ndim == k.ndim == v.ndim == 3
    assert len(q) == len(k) == len(v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "one width for all"
    assert k.shape[1] == v.shape[1]
    assert q.shape[1] % k.shape[1] == 0
    for ends, longest in ((ends_q, longest_q), (ends_k, longest_k)):
        assert ends.dtype == torch.int32
        assert (ends[0], ends[-1]) == (0, len(q))
        assert (ends.diff() > 0).all()
        assert isinstance(longest, int)
        assert longest >= ends.diff().max()
    assert torch.equal(ends_q, ends_k)
    cuts = ends_q.tolist()
    parts = [explicit(q[a:b], k[a:b], v[a:b], scale) for a, b in pairwise(cuts)]
    return torch.cat(parts)


def stand_in_for_varlen_attn(calls, *args, **kwargs):
    bound = inspect.signature(varlen_attn).bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    assert a["window_size"] == (-1, 0), "causal"
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "what flash-attn-4 does not stand in for"
    if "enable_gqa" in a:
        assert a["enable_gqa"] or a["query"].shape[1] == a["key"].shape[1]
    assert a["return_aux"] is None
    calls.append("varlen_attn")
    return packed_attention(
        *(a[name] for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")),
        a["scale"],
    )


def stand_in_for_flash_attn(calls):
    """flash-attn 2 as its README documents it."""
    module = ModuleType("flash_attn")

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        assert causal
        assert dropout_p == 0
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert q.ndim == k.ndim == v.ndim == 4
        assert q.shape[1] == k.shape[1] == v.shape[1], "(batch, tokens, heads, width)"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1], "one width for all"
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
def kernels(monkeypatch):
    """Stand-ins for torch's and flash-attn's kernels; the names of those that were called."""
    calls = []
    monkeypatch.setattr(ops, "varlen_attn", partial(stand_in_for_varlen_attn, calls))
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in_for_flash_attn(calls))
    return calls


def assert_close_in_bf16(mine, other):
    assert mine.dtype == other.dtype == torch.bfloat16
    torch.testing.assert_close(mine.float(), other.float(), rtol=0.02, atol=0.02)


def relative(mine, other):
    return (torch.linalg.vector_norm(mine - other) / torch.linalg.vector_norm(other)).item()


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "called"), [("sdpa", "varlen_attn"), ("flash", "flash_attn_varlen_func")]
)
@pytest.mark.parametrize(("shape", "wide"), ADAPTED)
def test_packed_documents_meet_the_contract_of_a_stand_in_and_equal_sdpa(
    kernels, shape, wide, backend, called
):
    q, k, v = heads(shape, wide, dtype=torch.bfloat16)
    documents = Documents.of(tokens_with_documents(), END)
    out = attend(q, k, v, Packed(documents.boundaries, 40), Backend[backend])
    assert kernels == [called]
    assert_close_in_bf16(out, attend(q, k, v, documents.mask()))


@torch.no_grad()
def test_packed_documents_go_through_torch_where_its_kernels_are_flash_4(kernels, monkeypatch):
    monkeypatch.setattr(ops, "sdpa_is_flash_4", lambda: True)
    q, k, v = heads((8, 2, 8), dtype=torch.bfloat16)
    documents = Documents.of(tokens_with_documents(), END)
    out = attend(q, k, v, Packed(documents.boundaries, 40), Backend.flash)
    assert kernels == ["varlen_attn"]
    assert_close_in_bf16(out, attend(q, k, v, documents.mask()))


def test_torchs_own_kernel_for_documents_compiles_into_one_graph():
    """On tensors without data, whose shapes torch's own rules tell."""
    q, k, v = (t.detach().to("meta") for t in heads((8, 2, 8), dtype=torch.bfloat16))
    boundaries = torch.empty(5, dtype=torch.int32, device="meta")
    q.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, Packed(boundaries, 40))
    out.float().sum().backward()
    assert out.shape == q.grad.shape == q.shape


@torch.no_grad()
@pytest.mark.parametrize(("shape", "wide"), ADAPTED)
def test_flash_meets_the_contract_of_a_stand_in_and_equals_sdpa(kernels, shape, wide):
    q, k, v = heads(shape, wide, dtype=torch.bfloat16)
    out = attend(q, k, v, None, Backend.flash)
    assert kernels == ["flash_attn_func"]
    assert_close_in_bf16(out, attend(q, k, v))


@torch.no_grad()
def test_queries_wider_than_values_meet_the_contracts_too(kernels):
    """As with a learned sink, which adds channels to queries and keys."""
    q, k, _ = heads((4, 2, 16), dtype=torch.bfloat16)
    _, _, v = heads((4, 2, 8), dtype=torch.bfloat16)
    documents = Documents.of(tokens_with_documents(), END)
    packed, expected = Packed(documents.boundaries, 40), attend(q, k, v, documents.mask())
    assert expected.shape == (2, 40, 4, 8)
    for backend in (Backend.sdpa, Backend.flash):
        assert_close_in_bf16(attend(q, k, v, packed, backend), expected)
    assert_close_in_bf16(attend(q, k, v, None, Backend.flash), attend(q, k, v))


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "extra"),
    [
        *((name, ()) for name in VARIANTS if name != "diff_v1_clamped"),
        ("diff_v1", ("model.attention.values=split",)),
    ],
)
def test_a_model_through_a_stand_in_for_flash_computes_what_it_does_through_sdpa(
    kernels, variant, extra
):
    model = build_model(small_config(variant, 8, 4, 8, extra).model).bfloat16()
    tokens = tokens_with_documents(length=32)
    expected = model(tokens).float()
    for layer in model.layers:
        layer.attention.backend = Backend.flash
    assert relative(model(tokens).float(), expected) < 0.03
    assert kernels == ["flash_attn_func"] * len(model.layers), "one call a layer"


@torch.no_grad()
def test_a_scale_of_ones_own_reaches_every_stand_in(kernels, monkeypatch):
    monkeypatch.setattr(ops, "compiled_flex", lambda: flex_attention)
    q, k, v = heads((4, 2, 8), dtype=torch.bfloat16)
    documents = Documents.of(tokens_with_documents(), END)
    packed = Packed(documents.boundaries, 40)
    expected = attend(q, k, v, documents.mask(), scale=0.9)
    for backend in (Backend.sdpa, Backend.flash):
        assert_close_in_bf16(attend(q, k, v, packed, backend, 0.9), expected)
    blocks = document_blocks(documents.ids)
    assert_close_in_bf16(attend(q, k, v, blocks, Backend.flex, 0.9), expected)
    whole = attend(q, k, v, scale=0.9)
    assert_close_in_bf16(attend(q, k, v, None, Backend.flash, 0.9), whole)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["flash", "flex", "sdpa"])
def test_a_decoding_step_goes_through_sdpa_whatever_the_backend(kernels, backend, monkeypatch):
    monkeypatch.setattr(ops, "flex", lambda *_: pytest.fail("flex was called"))
    q, k, v = heads((4, 2, 8), length=9)
    out = attend(q[:, -1:], k, v, None, Backend[backend])
    torch.testing.assert_close(out, attend(q, k, v)[:, -1:], rtol=0, atol=1e-6)
    assert kernels == []


# The kernels themselves


def available(backend):
    """Skip where this machine lacks it."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        prepare_backend(Backend[backend], CUDA, 64, torch.bfloat16)
    except ConfigError as error:
        pytest.skip(str(error))


def through(backend, model, tokens, documents, weights):
    """Logits and every gradient, float32."""
    for layer in model.layers:
        layer.attention.backend = Backend[backend]
    model.zero_grad(set_to_none=True)
    logits = model(tokens, documents=documents).float()
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("variant", MAIN)
@pytest.mark.parametrize("backend", ["sdpa", "flex", "flash"])
def test_on_a_gpu_every_backend_agrees_with_explicit_maps(backend, variant, masked, compiled):
    """In bf16 but for what a training run keeps in float32, forward and every gradient."""
    available(backend)
    torch._dynamo.reset()
    extra = ("model.dim=256", "model.init_std=0.05", "seq_len=256")
    model = build_model(small_config(variant, 8, 4, 64, extra).model).to(CUDA)
    for parameter in set(model.parameters()) - fp32_parameters(model):
        parameter.data = parameter.data.bfloat16()
    tokens = tokens_with_documents(2, 256)
    documents = Documents.of(tokens, END).to(CUDA) if masked else None
    arguments = tokens.to(CUDA), documents, torch.randn(2, 256, 64, device=CUDA)
    expected, expected_grads = through("reference", model, *arguments)
    if compiled:
        for layer in model.layers:  # functions of flash-attn 2 may break the graph
            layer.forward = torch.compile(layer.forward, fullgraph=backend != "flash")
    logits, grads = through(backend, model, *arguments)
    assert relative(logits, expected) < 0.03
    lambdas = [name for name in grads if "lambda_q" in name or "lambda_k" in name]
    for name in grads.keys() - set(lambdas):
        assert relative(grads[name], expected_grads[name]) < 0.1, name
    if lambdas:  # multiples of one small difference of large sums a layer
        mine, other = (torch.cat([g[name] for name in lambdas]) for g in (grads, expected_grads))
        assert relative(mine, other) < 0.3
