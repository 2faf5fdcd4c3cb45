"""The chunked loss against torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from diffllm.model.loss import chunked_cross_entropy


def torch_objective(hidden, weight, targets, z_weight):
    logits = hidden @ weight.T
    nll = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-1)
    lse = torch.logsumexp(logits, -1)[targets >= 0]
    return nll + z_weight * lse.square().sum(), nll, lse.square().sum()


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("z_weight", [0.0, 1e-2])
def test_loss_and_gradients_equal_torch(chunk, z_weight):
    hidden = torch.randn(11, 8, requires_grad=True)
    weight = torch.randn(23, 8, requires_grad=True)
    targets = torch.randint(0, 23, (11,))
    targets[3] = -1
    total, parts = chunked_cross_entropy(hidden, weight, targets, z_weight, chunk)
    expected, nll, z = torch_objective(hidden, weight, targets, z_weight)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(parts.nll, nll)
    torch.testing.assert_close(parts.z, z)
    ours = torch.autograd.grad(total * 0.3, (hidden, weight))
    theirs = torch.autograd.grad(expected * 0.3, (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_bf16_gradients_accumulate_over_chunks_in_float32():
    hidden = torch.randn(512, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 16, (512,))
    total, _ = chunked_cross_entropy(hidden, weight, targets, chunk=4)
    (grad,) = torch.autograd.grad(total, weight)
    exact, _, _ = torch_objective(
        hidden.double(), (w := weight.detach().double().requires_grad_()), targets, 0.0
    )
    (expected,) = torch.autograd.grad(exact, w)
    error = (grad.double() - expected).norm() / expected.norm()
    assert error < 0.01
