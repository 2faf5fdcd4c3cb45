"""Decoders with experts: gradients, the objective, dense layers and initial values."""

from functools import cache

import pytest
import torch
from tiers import families, slow_but
from variants import LOSSES, MIXTURE, VARIANTS, small_config, small_model

from diffllm import build_model
from diffllm.model.ffn.moe import MoE, SwiGLU

shared_model = cache(small_model)


def mixture_model(variant, *extra):
    return shared_model(variant, extra=(*MIXTURE, *extra))


@pytest.mark.parametrize("variant", slow_but(families(VARIANTS), VARIANTS))
def test_every_parameter_of_moe_model_gets_finite_nonzero_gradient(variant):
    model = mixture_model(variant, *LOSSES)
    tokens = torch.randint(0, 64, (4, 17))
    out = model(tokens[:, :-1], tokens[:, 1:])
    assert out.routed.counts.sum(1).tolist() == [2 * 64] * 2
    grads = torch.autograd.grad(out.objective, list(model.parameters()))
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        assert torch.isfinite(grad).all(), name
        assert grad.any(), name
        if ".experts." in name:
            assert grad.flatten(1).any(1).all(), name


def test_moe_model_objective_includes_weighted_router_losses():
    model, tokens = mixture_model("standard", *LOSSES), torch.randint(0, 64, (2, 17))
    out = model(tokens[:, :-1], tokens[:, 1:])
    assert out.routed.balance > 0
    assert out.routed.z > 0
    expected = out.loss.nll + 0.1 * out.routed.balance + 0.01 * out.routed.z
    torch.testing.assert_close(out.objective.double(), expected.double(), rtol=1e-6, atol=0)


def test_n_dense_layers_setting_makes_first_layers_dense():
    extra = ("model.n_layers=4", "model.moe.n_dense_layers=3", *LOSSES)
    model = mixture_model("diff_v2", *extra)
    assert [type(layer.ffn) for layer in model.layers] == [SwiGLU] * 3 + [MoE]
    assert model.layers[0].ffn.w1.out_features == model.cfg.ffn_dim == 32
    assert model.layers[3].ffn.experts.w1.shape == (4, 16, 24)
    tokens = torch.randint(0, 64, (2, 17))
    out = model(tokens[:, :-1], tokens[:, 1:], diagnose=True)
    assert out.routed.counts.shape == (1, 4)
    assert out.stats["hidden_top1"].shape == (4,)
    assert out.stats["router_entropy"].shape == (1,)


def test_experts_do_not_change_initial_values_of_other_parameters():
    """The number of experts does not matter; experts of one layer have different values."""
    dense, four, six = (
        dict(build_model(small_config("diff_v2", extra=extra).model).named_parameters())
        for extra in ((), MIXTURE, (*MIXTURE, "model.moe.n_experts=6"))
    )
    names = {"tok_embeddings.weight", "output.weight", "layers.1.attention.wq.weight"}
    for name in names:
        assert torch.equal(dense[name], four[name])
        assert torch.equal(four[name], six[name])
    stacked = {name for name in four if ".experts." in name}
    assert {name.rpartition(".")[2] for name in stacked} == {"w1", "w2", "w3"}
    for name in stacked:
        assert not torch.equal(four[name][0], four[name][1])
