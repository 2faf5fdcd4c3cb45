"""Attention kernels on a GPU, against explicit maps in float32."""

import pytest
import torch
from stand_ins import CUDA, END, MAIN, mask_for, relative, tokens_with_documents
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from variants import small_config

from diffllm import build_model
from diffllm.core.errors import ConfigError
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.model.attention import kernels
from diffllm.model.attention.kernels import Kernel, prepare_backend
from diffllm.model.attention.masks import Documents
from diffllm.model.attention.ops import Backend, attend
from diffllm.model.auto_setting import AutoSetting

pytestmark = pytest.mark.gpu

BACKENDS = ("sdpa", "flex", "flash")
LAYOUTS = [f"model.attention.values={values}" for values in ("auto", "wide", "split")]


def available(backend, width=64, documents=False):
    """Skip a test if the package or the GPU of a backend is missing."""
    try:
        prepare_backend(Backend[backend], CUDA, width, torch.bfloat16, documents)
    except ConfigError as error:
        pytest.skip(str(error))


def bf16_model(variant, head_dim, *extra):
    """Build a model with the parameter dtypes of a bf16 training run."""
    extra = ("model.dim=256", "model.init_std=0.05", "seq_len=256", *extra)
    model = build_model(small_config(variant, 8, 4, head_dim, extra).model).to(CUDA)
    for parameter in set(model.parameters()) - fp32_parameters(model):
        parameter.data = parameter.data.bfloat16()
    return model


def through(backend, model, tokens, documents, weights):
    """Return logits and all gradients in float32."""
    for layer in model.layers:
        layer.attention.backend = Backend[backend]
    model.zero_grad(set_to_none=True)
    logits = model(tokens, documents=documents).float()
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


def agrees_with_explicit_maps(backend, model, masked, compiled):
    """Compare logits and all gradients with explicit maps."""
    torch._dynamo.reset()
    tokens = tokens_with_documents(2, 256)
    documents = Documents.of(tokens, END).to(CUDA) if masked else None
    arguments = tokens.to(CUDA), documents, torch.randn(2, 256, 64, device=CUDA)
    expected, expected_grads = through("reference", model, *arguments)
    if compiled:
        for layer in model.layers:  # flash-attn 2 may break the graph
            layer.forward = torch.compile(layer.forward, fullgraph=backend != "flash")
    logits, grads = through(backend, model, *arguments)
    assert relative(logits, expected) < 0.03
    lambdas = [name for name in grads if "lambda_q" in name or "lambda_k" in name]
    for name in grads.keys() - set(lambdas):
        assert relative(grads[name], expected_grads[name]) < 0.1, name
    if lambdas:  # gradients of lambda vectors are small differences of large sums
        mine, other = (torch.cat([g[name] for name in lambdas]) for g in (grads, expected_grads))
        assert relative(mine, other) < 0.3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("variant", MAIN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_backends_on_gpu_match_reference_backend(backend, variant, masked, compiled):
    available(backend, documents=masked)
    agrees_with_explicit_maps(backend, bf16_model(variant, 64), masked, compiled)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("variant", "extra"),
    [("standard", ()), ("diff_v2", ()), *(("diff_v1", (layout,)) for layout in LAYOUTS)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_backends_match_reference_at_head_width_128(backend, variant, extra, masked):
    """Values of V1 have width 256, or two halves of width 128."""
    model = bf16_model(variant, 128, *extra)
    available(backend, model.layers[0].attention.resolve(CUDA).width, masked)
    agrees_with_explicit_maps(backend, model, masked, compiled=False)


@pytest.mark.parametrize("kernel", [Kernel.varlen, Kernel.flex])
@pytest.mark.parametrize("variant", ["standard", "diff_v1", "diff_v2"])
def test_varlen_and_flex_kernels_match_reference_for_masked_documents(monkeypatch, variant, kernel):
    """Kernels that backend=sdpa may choose without flash-attn-4."""
    monkeypatch.setattr(kernels, "document_kernel", lambda *_: AutoSetting(kernel, "tested"))
    agrees_with_explicit_maps("sdpa", bf16_model(variant, 128), masked=True, compiled=True)


def long_heads(wide):
    """Draw bf16 q (1, 4096, 4, 128), k (1, 4096, 2, 128), v (1, 4096, 2 / wide, 128 * wide)."""
    made = torch.Generator(CUDA).manual_seed(0)

    def draw(heads, width):
        shape = (1, 4096, heads, width)
        heads = torch.randn(shape, generator=made, device=CUDA).bfloat16()
        return heads.requires_grad_()

    return draw(4, 128), draw(2, 128), draw(2 // wide, 128 * wide)


def long_documents():
    """Draw documents of 100 to 1,100 tokens; the last document is truncated."""
    tokens = torch.ones(1, 4096, dtype=torch.int64)
    tokens[0, torch.tensor([100, 700, 1800, 2300, 3300])] = END
    return Documents.of(tokens, END).to(CUDA)


def out_and_grads(parts, run):
    out = run(*parts)
    weights = torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out)
    grads = torch.autograd.grad((out.float() * weights).sum(), parts)
    return [result.detach().float() for result in (out, *grads)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_attention_over_4096_tokens_matches_float32_reference(backend, wide, masked):
    """Head width 128, and values of width 256 as in V1; kernels use bf16."""
    width = 128 * wide
    available(backend, width, masked)
    parts = long_heads(wide)
    documents = long_documents() if masked else None
    tokens = torch.empty(1, 4096, device=CUDA)
    mask = mask_for(documents, tokens, Backend[backend], torch.bfloat16, width)
    found = out_and_grads(parts, lambda *qkv: attend(*qkv, mask, Backend[backend]))
    exact = [part.detach().float().requires_grad_() for part in parts]
    whole = documents.mask() if masked else None
    expected = out_and_grads(exact, lambda *qkv: attend(*qkv, whole, Backend.reference))
    for name, mine, other in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert relative(mine, other) < (0.02 if name == "out" else 0.03), name


@pytest.mark.parametrize("kernel", [Kernel.varlen, Kernel.flex, None])
def test_block_on_gpu_uses_same_compiled_graph_for_all_document_counts(monkeypatch, kernel):
    """Compile forward and backward for the GPU; None is the kernel chosen for this machine."""
    if kernel:
        monkeypatch.setattr(kernels, "document_kernel", lambda *_: AutoSetting(kernel, "tested"))
    torch._dynamo.reset()
    model = bf16_model("diff_v2", 128)
    counter = CompileCounterWithBackend("inductor")
    block = torch.compile(model.layers[0].forward, fullgraph=True, backend=counter)
    for number in (3, 5, 9, 2):
        tokens = torch.ones(2, 256, dtype=torch.int64)
        tokens[0, torch.arange(number - 2) * 20 + 10] = END
        documents = Documents.of(tokens, END).to(CUDA)
        rope, mask = model.whole_sequences(tokens.to(CUDA), documents, torch.bfloat16)
        x = torch.randn(2, 256, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        block(x, rope, mask)[0].float().square().sum().backward()
        assert x.grad.isfinite().all()
    assert counter.frame_count == 1


def kernels_run(run):
    """Return the names of all operations and kernels during `run`."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return {event.key for event in profiler.key_averages()}


@torch.no_grad()
@pytest.mark.parametrize("variant", MAIN)
def test_decoding_on_gpu_does_not_use_cudnn_attention(variant):
    """Prompts and single tokens; logits equal those of a full forward pass."""
    model = bf16_model(variant, 128)
    tokens = torch.randint(0, 64, (2, 80), device=CUDA)
    logits = []

    def decode():
        caches = model.new_caches(2, 128, torch.bfloat16)
        logits.append(model(tokens[:, :64], caches=caches))
        logits.extend(model(tokens[:, i : i + 1], caches=caches) for i in range(64, 80))

    names = kernels_run(decode)
    assert any("scaled_dot_product" in name for name in names)
    assert not any("cudnn" in name for name in names)
    assert relative(torch.cat(logits, 1).float(), model(tokens).float()) < 0.03
