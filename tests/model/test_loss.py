"""The chunked loss against torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from diffllm import load_config
from diffllm.core.errors import ConfigError
from diffllm.model.loss import (
    CPU_CHUNK,
    GPU_CHUNK,
    LARGE_CPU_CHUNK,
    chunk_loss,
    chunked_cross_entropy,
    loss_chunk,
)
from diffllm.plan.simulate import as_on_gpu


def torch_objective(hidden, weight, targets, z_weight):
    logits = hidden @ weight.T
    nll = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-1)
    lse = torch.logsumexp(logits, -1)[targets >= 0]
    return nll + z_weight * lse.square().sum(), nll, lse.square().sum()


def problem(n, vocab, dim, dtype, device="cpu"):
    """Return hidden states, weight and targets; every fifth target is ignored."""
    hidden = torch.randn(n, dim, dtype=dtype, device=device).requires_grad_()
    weight = torch.randn(vocab, dim, dtype=dtype, device=device).requires_grad_()
    targets = torch.randint(0, vocab, (n,), device=device)
    targets[::5] = -1
    return hidden, weight, targets


def exact(hidden, weight, targets, z_weight, scale):
    """Return the objective and the gradients of scale * objective, in float64."""
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    objective, _, _ = torch_objective(*wide, targets, z_weight)
    return objective.detach(), torch.autograd.grad(objective * scale, wide)


@pytest.mark.parametrize("chunk", [1, 7, 20, 37, 1000])
def test_chunked_loss_equals_unchunked_loss_for_any_chunk_size(chunk):
    hidden, weight, targets = problem(37, 23, 8, torch.float64)
    total, parts = chunked_cross_entropy(hidden, weight, targets, 1e-2, chunk)
    expected, theirs = exact(hidden, weight, targets, 1e-2, 0.3)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    _, *sums = torch_objective(hidden, weight, targets, 1e-2)
    for mine, other in zip(parts.values(), sums, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(total * 0.3, (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [3, 64, 512])
def test_chunked_loss_scales_bf16_gradients_in_float32(chunk):
    """The scale 0.3349 rounds to 0.3340 in bf16, so all gradients would be 0.3% too small."""
    hidden, weight, targets = problem(512, 32, 16, torch.bfloat16)
    total, _ = chunked_cross_entropy(hidden, weight, targets, 1e-3, chunk)
    once = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    more = torch.autograd.grad(total * 0.3349, (hidden, weight))
    for grad, scaled in zip(once, more, strict=True):
        assert scaled.dtype == torch.bfloat16
        ratio = (grad.double() * scaled.double()).sum() / grad.double().square().sum()
        assert ratio.item() == pytest.approx(0.3349, rel=1e-3)
    _, expected = exact(hidden, weight, targets, 1e-3, 1.0)
    for grad, other in zip(once, expected, strict=True):
        assert (grad.double() - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_chunk_loss_equals_uncompiled_chunk_loss(dtype):
    hidden, weight, targets = problem(40, 23, 8, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(chunk_loss, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        ours = compiled(hidden, weight, targets, 1e-2, True)
        theirs = chunk_loss(hidden, weight, targets, 1e-2, True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("chunk", [300, 512, 2048])
def test_chunked_loss_and_gradients_on_gpu_agree_with_float64(chunk, compiled):
    hidden, weight, targets = problem(2048, 1024, 64, torch.bfloat16, "cuda")
    with torch.no_grad():
        weight.mul_(0.1)
    compute = torch.compile(chunk_loss, fullgraph=True) if compiled else chunk_loss
    total, _ = chunked_cross_entropy(hidden, weight, targets, 1e-3, chunk, compute)
    expected, theirs = exact(hidden, weight, targets, 1e-3, 0.3349)
    torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=0)
    ours = torch.autograd.grad(total * 0.3349, (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - other).norm() < 0.01 * other.norm()


def test_config_value_of_loss_chunk_overrides_device_default():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert loss_chunk(7, gpu, 8, 8) == (7, "asked for")
    assert loss_chunk(None, gpu, 8, 8).value == GPU_CHUNK == 4096
    assert loss_chunk(None, cpu, 2**14, 2**8 - 1).value == CPU_CHUNK
    assert loss_chunk(None, cpu, 2**14, 2**8).value == LARGE_CPU_CHUNK == 2048
    assert loss_chunk(None, cpu, 2**15, 2**8).value == 1024
    assert loss_chunk(None, cpu, 150_000, 2**8).value == CPU_CHUNK
    assert as_on_gpu(load_config(["model=micro"])).model.loss_chunk == GPU_CHUNK
    assert as_on_gpu(load_config(["model=micro", "model.loss_chunk=7"])).model.loss_chunk == 7
    with pytest.raises(ConfigError, match=r"model\.loss_chunk=0 must be at least 1"):
        load_config(["model=micro", "model.loss_chunk=0"])
