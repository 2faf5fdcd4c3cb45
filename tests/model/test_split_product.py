"""The router's product on bf16 units against float64; tests without a GPU replace the product."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffllm.model.ffn import router
from diffllm.model.ffn.router import SplitProduct, router_logits, split

TOKENS, DIM, EXPERTS, TOP_K = 4096, 512, 64, 8


def float32_product(a, b):
    """Multiply in float32, where bf16 products are exact."""
    assert a.dtype == b.dtype == torch.bfloat16
    return a.float() @ b.float()


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(router, "float32_mm", float32_product)


def tokens_and_weight():
    return torch.randn(TOKENS, DIM).bfloat16(), torch.randn(EXPERTS, DIM) * 0.02


def worst(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


sizes = st.floats(2.0**-100, 2.0**100, width=32)
values = st.one_of(st.just(0.0), sizes, sizes.map(lambda size: -size))


@given(st.lists(values, min_size=1, max_size=20))
def test_sum_of_three_bf16_parts_equals_float32_value(numbers):
    x = torch.tensor(numbers)
    parts = split(x)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    assert torch.equal(sum(part.double() for part in parts), x.double())


def test_split_product_is_as_exact_as_float32_product(no_cuda):
    """With a weight rounded to bf16, 1% of tokens would choose other experts."""
    x, weight = tokens_and_weight()
    exact = x.double() @ weight.double().T
    ways = {
        "float32": x.float() @ weight.T,
        "split": SplitProduct.apply(x, weight),
        "rounded": x.float() @ weight.bfloat16().float().T,
    }
    errors = {name: worst(logits, exact) for name, logits in ways.items()}
    chosen = {name: chosen_of(logits) for name, logits in ways.items()}
    elsewhere = {name: (c != chosen_of(exact)).any(1).sum() for name, c in chosen.items()}
    assert ways["split"].dtype == torch.float32
    assert errors["split"] <= errors["float32"] < 1e-6
    assert errors["rounded"] > 1000 * errors["float32"]
    assert elsewhere["split"] <= elsewhere["float32"]
    assert elsewhere["rounded"] > TOKENS / 200


def chosen_of(logits):
    return logits.topk(TOP_K).indices.sort().values


def test_gradients_of_split_product_have_same_dtypes_as_inputs(no_cuda):
    """Compare with float32 for the weight, and with a bf16 product for x."""
    x, weight = tokens_and_weight()
    x.requires_grad_()
    weight.requires_grad_()
    grad = torch.randn(TOKENS, EXPERTS) * 1e-6
    logits = SplitProduct.apply(x, weight)
    grad_x, grad_weight = torch.autograd.grad(logits, [x, weight], grad)
    assert grad_x.dtype == torch.bfloat16
    assert grad_weight.dtype == torch.float32
    exact = grad.double().T @ x.double()
    assert worst(grad_weight, exact) <= worst(grad.T @ x.detach().float(), exact) < 1e-6
    assert worst(grad_x, grad.double() @ weight.double()) < 2**-7


@pytest.mark.slow
def test_compiled_router_product_is_as_exact_as_float32_product(no_cuda):
    """Compilers drop a conversion to bf16 and back, which would make later parts zero."""
    torch._dynamo.reset()
    x, weight = tokens_and_weight()
    x, weight = x[:64].requires_grad_(), weight.requires_grad_()
    logits = torch.compile(SplitProduct.apply, fullgraph=True)(x, weight)
    grad = torch.randn_like(logits)
    _, grad_weight = torch.autograd.grad(logits, [x, weight], grad)
    assert worst(logits, x.double() @ weight.double().T) < 1e-6
    assert worst(grad_weight, grad.double().T @ x.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_router_logits_equal_float32_product_if_bf16_split_is_unavailable(dtype, monkeypatch):
    monkeypatch.setattr(router, "float32_mm", None)
    x, weight = torch.randn(9, DIM).to(dtype), torch.randn(EXPERTS, DIM)
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.nn.functional.linear(x.to(wide), weight.to(wide))
    assert torch.equal(router_logits(x, weight), expected)


@pytest.mark.gpu
def test_router_on_gpu_is_as_exact_as_float32_product():
    x, weight = (value.cuda().requires_grad_() for value in tokens_and_weight())
    logits = router_logits(x, weight)
    grad = torch.randn_like(logits)
    grad_x, grad_weight = torch.autograd.grad(logits, [x, weight], grad)
    exact = x.double() @ weight.double().T
    assert worst(logits, exact) < 2e-6
    assert worst(grad_weight, grad.double().T @ x.double()) < 2e-6
    assert worst(grad_x, grad.double() @ weight.double()) < 2**-7
    assert ((chosen_of(logits) != chosen_of(exact)).any(1).sum()) <= 1
