"""The chunked loss against torch's cross-entropy."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from diffllm import build_model, load_config
from diffllm.core.errors import ConfigError
from diffllm.model.loss import (
    CPU_CHUNK,
    GPU_CHUNK,
    LARGE_CPU_CHUNK,
    add_weight_gradient,
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
    """Hidden states, weight and targets, of which every fifth is ignored."""
    hidden = torch.randn(n, dim, dtype=dtype, device=device).requires_grad_()
    weight = torch.randn(vocab, dim, dtype=dtype, device=device).requires_grad_()
    targets = torch.randint(0, vocab, (n,), device=device)
    targets[::5] = -1
    return hidden, weight, targets


def exact(hidden, weight, targets, z_weight, scale):
    """Objective, and the gradients of `scale` times it, in float64."""
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    objective, _, _ = torch_objective(*wide, targets, z_weight)
    return objective.detach(), torch.autograd.grad(objective * scale, wide)


@pytest.mark.parametrize("chunk", [1, 7, 20, 37, 1000])
def test_float64_is_exact_whatever_the_chunk(chunk):
    hidden, weight, targets = problem(37, 23, 8, torch.float64)
    total, parts = chunked_cross_entropy(hidden, weight, targets, 1e-2, chunk)
    expected, theirs = exact(hidden, weight, targets, 1e-2, 0.3)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    _, *sums = torch_objective(hidden, weight, targets, 1e-2)
    for mine, other in zip(parts, sums, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(total * 0.3, (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [3, 64, 512])
def test_bf16_gradients_keep_a_scale_that_bf16_cannot_hold(chunk):
    """0.3349 is 0.3340 in bf16: gradients that are 0.3% too small everywhere."""
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


class Made(TorchDispatchMode):
    """Counts the tensors of a shape in float32 that operations make, and notes the operations."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count, self.calls = torch.Size(shape), 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append(str(func))
        writes = any(a.alias_info is not None for a in func._schema.arguments)
        if isinstance(out, torch.Tensor) and not writes:
            self.count += out.shape == self.shape and out.dtype == torch.float32
        return out


@pytest.mark.parametrize(("dtype", "chunk", "made"), [
    (torch.bfloat16, 4, 1), (torch.bfloat16, 64, 0), (torch.float32, 4, 1), (torch.float32, 64, 1),
])  # fmt: skip
def test_a_weight_gradient_is_made_in_float32_once_at_most(dtype, chunk, made):
    hidden, weight, targets = problem(64, 24, 6, dtype)
    with Made(weight.shape) as mode:
        chunked_cross_entropy(hidden, weight, targets, chunk=chunk)
    assert mode.count == made
    assert sum("log_softmax" in call for call in mode.calls) == 64 // chunk


@pytest.mark.slow
def test_compiled_the_probabilities_are_never_written_in_float32():
    n, vocab = 16, 192
    hidden, weight, targets = problem(n, vocab, 8, torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(chunk_loss, fullgraph=True, dynamic=False)
    written = []

    def stop(code):  # before it is compiled, which takes long
        written.append(code)
        raise InterruptedError

    with (
        torch.no_grad(),
        torch._inductor.config.patch(force_disable_caches=True),
        patch.object(GraphLowering, "save_output_code", stop),
        pytest.raises(BackendCompilerFailed, match="InterruptedError"),
    ):
        compiled(hidden, weight, targets, 1e-4, True)
    (code,) = written
    made = [line for line in code.splitlines() if f"empty_strided_cpu(({n}, {vocab})" in line]
    assert len(made) == 2, made  # logits and their gradient
    assert all("bfloat16" in line for line in made)
    assert "atomic_add" not in code  # a scatter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_uncompiled_chunks_agree(dtype):
    hidden, weight, targets = problem(40, 23, 8, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(chunk_loss, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        ours = compiled(hidden, weight, targets, 1e-2, True)
        theirs = chunk_loss(hidden, weight, targets, 1e-2, True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, with the products that are only there.

    aten::mm.dtype and addmm.dtype_out take inputs of one low dtype and give float32; the latter
    sums in place where it is given its output to begin with.
    """

    products = 0
    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.mm, torch.addmm):
            return super().__torch_function__(func, types, args, kwargs)
        cls.products += 1
        assert kwargs.pop("out_dtype") is torch.float32
        *total, left, right = (a.as_subclass(torch.Tensor) for a in args)
        assert left.dtype == right.dtype == torch.bfloat16
        product = left.float() @ right.float()
        if func is torch.mm:
            assert not kwargs
            return product
        assert kwargs.pop("out") is args[0]
        assert not kwargs
        assert (total[0].dtype, total[0].shape) == (torch.float32, product.shape)
        return args[0].add_(product)


def test_a_gpu_sums_weight_gradients_in_the_product():
    hidden, _, _ = problem(64, 1, 8, torch.bfloat16)
    grad_logits = torch.randn(64, 24, dtype=torch.bfloat16)
    OnGpu.products, total = 0, None
    for h, g in zip(hidden.detach().split(7), grad_logits.split(7), strict=True):
        total = add_weight_gradient(total, g.as_subclass(OnGpu), h.as_subclass(OnGpu))
    assert OnGpu.products == 10
    assert total.dtype == torch.float32
    expected = grad_logits.double().T @ hidden.detach().double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("chunk", [300, 512, 2048])
def test_on_a_gpu_the_loss_and_its_gradients_are_those_of_float64(chunk, compiled):
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


def test_the_chunk_is_what_is_asked_for_or_suits_the_device():
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


@pytest.mark.parametrize(("asked", "sizes"), [(None, [CPU_CHUNK, 88]), (256, [256, 256, 88])])
def test_a_model_takes_the_chunk_of_its_device_unless_asked(asked, sizes):
    cfg = load_config(["model=micro", "seq_len=300", "attention=standard"]).model
    cfg.loss_chunk = asked
    model, seen = build_model(cfg), []

    def noted(hidden, *args):
        seen.append(len(hidden))
        return chunk_loss(hidden, *args)

    model.chunk_loss = noted
    tokens = torch.zeros(2, 300, dtype=torch.int64)
    model(tokens, tokens)
    assert seen == sizes
