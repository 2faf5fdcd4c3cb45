"""Products of experts: grouped or looped, gate and up as one or two products."""

import pytest
import torch
import torch.nn.functional as F

from diffllm.model.ffn import experts
from diffllm.model.ffn.experts import (
    GROUPED,
    LOOPED,
    Experts,
    expert_weight_grad,
    grouped_product,
    joined,
    leaves_garbage,
)

E, DIM, WIDTH = 6, 32, 48
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HALF = torch.bfloat16
COUNTS = [0, 9, 0, 20, 3, 0]
ROWS = sum(COUNTS)


def capability(monkeypatch, major, minor=0):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))


def watched(monkeypatch, owner, name):
    """Record the arguments of all calls of a function, without changing the function."""
    calls, real = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: calls.append(a) or real(*a, **k))
    return calls


def rows_and_ends(dtype):
    """Return gradients, inputs and the end index of the rows of each expert."""
    grad, x = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(ROWS, DIM).to(dtype)
    return grad, x, torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("major", "minor", "garbage"),
    [(8, 0, False), (8, 9, False), (9, 0, False), (10, 0, True), (10, 3, True), (12, 0, True)],
)
def test_leaves_garbage_is_true_only_for_blackwell_and_rocm(monkeypatch, major, minor, garbage):
    capability(monkeypatch, major, minor)
    assert leaves_garbage(CUDA) == garbage
    assert not leaves_garbage(CPU)
    monkeypatch.setattr(experts, "IS_ROCM", True)
    assert leaves_garbage(CUDA)


def blackwells(monkeypatch):
    """Make grouped products return NaN for groups without rows, as on Blackwell."""
    real = F.grouped_mm

    def grouped_mm(a, b, offs):
        out = real(a, b, offs=offs)
        if a.ndim == b.ndim == 2:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)


@pytest.mark.parametrize("garbage", [True, False])
def test_expert_weight_gradient_is_zero_if_expert_has_no_tokens(monkeypatch, garbage):
    inputs = rows_and_ends(HALF)
    expected = expert_weight_grad(*inputs)
    blackwells(monkeypatch)
    monkeypatch.setattr(experts, "leaves_garbage", lambda device: garbage)
    out = expert_weight_grad(*inputs)
    empty = torch.tensor(COUNTS) == 0
    assert torch.equal(out[~empty], expected[~empty])
    assert bool(out[empty].isnan().all()) == (not garbage)
    assert not (out[empty].any() and garbage)


@pytest.mark.parametrize(
    ("device", "dtype", "n_experts", "widths", "value"),
    [
        ("cuda", torch.bfloat16, 128, (768, 2048), GROUPED),
        ("cuda", torch.float32, 128, (768, 2048), GROUPED),
        ("cpu", torch.bfloat16, 128, (768, 2048), GROUPED),
        ("cpu", torch.float64, 128, (768, 2048), LOOPED),
        ("cuda", torch.bfloat16, 1024, (768, 2048), LOOPED),
        ("cuda", torch.bfloat16, 128, (12, 2048), LOOPED),
        ("cuda", torch.float32, 128, (12, 2048), GROUPED),
        ("cuda", torch.bfloat16, 128, (768, 20), LOOPED),
        ("mps", torch.bfloat16, 128, (768, 2048), LOOPED),
    ],
)
def test_grouped_matmul_is_used_only_for_supported_inputs(device, dtype, n_experts, widths, value):
    assert grouped_product(torch.device(device), dtype, n_experts, widths).value == value


def side_by_side(layer):
    """Replace w1 and w3 of a layer by halves of one tensor."""
    first, second = layer.adjacent
    both = torch.cat((getattr(layer, first), getattr(layer, second)), 1).detach()
    for name, half in zip(layer.adjacent, both.chunk(2, 1), strict=True):
        setattr(layer, name, torch.nn.Parameter(half))
    return layer


def small_experts(dtype, adjacent=True):
    layer = Experts(E, DIM, WIDTH)
    for param in layer.parameters():
        torch.nn.init.normal_(param, 0, 0.2)
    layer = layer.to(dtype)
    return side_by_side(layer) if adjacent else layer


def test_adjacent_expert_weights_are_joined_without_copy():
    near, far = small_experts(HALF), small_experts(HALF)
    both = joined(near.w1, near.w3)
    assert both.data_ptr() == near.w1.data_ptr()
    assert torch.equal(both, torch.cat((near.w1, near.w3), 1))
    apart = small_experts(HALF, adjacent=False)
    for one, other in ((near.w3, near.w1), (near.w1, far.w3), (near.w1, near.w1)):
        assert torch.equal(joined(one, other), torch.cat((one, other), 1))
    assert torch.equal(joined(apart.w1, apart.w3), torch.cat((apart.w1, apart.w3), 1))


def as_on_cuda(monkeypatch):
    """Choose products as on CUDA, for tensors of any device and dtype."""
    real = experts.rows_to_join
    monkeypatch.setattr(experts, "rows_to_join", lambda _, __, *w: real(CUDA, HALF, *w))


def output_and_gradients(layer, x, weights):
    """Return the output and the gradients of x, of row weights and of all parameters."""
    out = layer(x, weights, torch.tensor(COUNTS, device=x.device))
    direction = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype)
    inputs = [x, weights, *layer.parameters()]
    return [out, *torch.autograd.grad((out * direction).sum(), inputs)]


def inputs(dtype):
    return torch.randn(ROWS, DIM).to(dtype).requires_grad_(), torch.rand(ROWS, requires_grad=True)


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joined_expert_matmul_matches_separate_matmuls(monkeypatch, dtype, adjacent):
    """Compare outputs and gradients; some experts have no rows."""
    layer, (x, weights) = small_experts(dtype, adjacent), inputs(dtype)
    expected = output_and_gradients(layer, x, weights)
    as_on_cuda(monkeypatch)
    monkeypatch.setattr(experts, "JOIN_FROM", 0)
    calls = watched(monkeypatch, experts, "joined")
    found = output_and_gradients(layer, x, weights)
    assert len(calls) == 2, "forward and backward"
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_joined_expert_matmul_does_not_copy_weights(monkeypatch, dynamic):
    """The graph does not copy the weights."""
    torch._dynamo.reset()
    as_on_cuda(monkeypatch)
    layer, (x, weights) = small_experts(HALF), inputs(HALF)
    expected = output_and_gradients(layer, x, weights)
    copies, real = [], experts.joined

    def counted(w1, w3):
        both = real(w1, w3)
        copies.append(both.data_ptr() != w1.data_ptr())
        return both

    monkeypatch.setattr(experts, "joined", counted)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for mine, other in zip(output_and_gradients(compiled, x, weights), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)
    assert copies == [False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("adjacent", [True, False])
def test_joined_expert_matmul_on_gpu_matches_cpu_reference(adjacent):
    """Some experts have no rows, and the freed GPU memory contains NaN."""
    layer, (x, weights) = small_experts(HALF, adjacent), inputs(HALF)
    expected = output_and_gradients(layer, x, weights)
    held = torch.full((64, 1 << 20), torch.nan, device="cuda")
    del held
    there = small_experts(HALF, adjacent).cuda()
    there.load_state_dict(layer.state_dict())
    if adjacent:
        there = side_by_side(there)
    x, weights = (value.detach().cuda().requires_grad_() for value in (x, weights))
    found = output_and_gradients(there, x, weights)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=2e-2, atol=2e-2)
    for grad in found[3:]:
        assert [bool(of.any()) for of in grad] == [count > 0 for count in COUNTS]
