"""Block statistics: theoretical values, dtypes, and NaN on one of two ranks."""

import math

import pytest
import torch
from runs.models import tiny_model
from runs.ranks import run_ranks
from tiers import families, slow_but

from diffllm.config.compose import variants
from diffllm.metrics.diagnostics import reduce_stats
from diffllm.model.stats import block_stats

pytestmark = pytest.mark.usefixtures("gloo")


def inputs_and_targets(size=4):
    tokens = torch.randint(0, 64, (size, 17))
    return tokens[:, :-1], tokens[:, 1:]


def test_block_statistics_of_bf16_tensors_are_float32_without_gradients():
    x = torch.randn(1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    shown = {"context": x.view(1, 4, 2, 4) * 1, "lambda": x.mean(-1)}
    for name, value in block_stats(x, shown).items():
        assert not value.requires_grad, name
        assert value.dtype == torch.float32


def kurtosis_of(x):
    return block_stats(x, {"context": torch.zeros(1, 1, 1, 1)})["hidden_kurtosis"].item()


def test_kurtosis_equals_closed_form_for_known_distributions():
    assert kurtosis_of(torch.randn(4, 16, 8192) * 7 + 3) == pytest.approx(3, rel=0.02)
    assert kurtosis_of(torch.rand(4, 16, 8192)) == pytest.approx(1.8, rel=0.02)
    outlier = torch.zeros(2, 3, 1000)
    outlier[..., 17] = 50.0
    assert kurtosis_of(outlier) == pytest.approx(1000, rel=0.01)
    assert math.isfinite(kurtosis_of(torch.zeros(2, 3, 8)))


@pytest.mark.parametrize("variant", slow_but(families(variants()), variants()))
def test_diagnose_option_does_not_change_objective_or_gradients(variant):
    model, (inputs, targets) = (
        tiny_model(f"attention={variant}", "seq_len=16"),
        inputs_and_targets(),
    )
    plain, diagnosed = (model.loss(inputs, targets, diagnose=d) for d in (False, True))
    assert plain.stats == {}
    assert torch.equal(plain.objective, diagnosed.objective)
    params = list(model.parameters())
    grads = [torch.autograd.grad(out.objective, params) for out in (plain, diagnosed)]
    for mine, other in zip(*grads, strict=True):
        assert torch.equal(mine, other)


def reduced_with_nan(values):
    """Reduce a statistic of each kind over two ranks, with NaN on one rank."""
    own = torch.tensor(values[torch.distributed.get_rank()])
    stats = {
        name: own.clone()
        for name in ("lambda_min", "lambda_max", "hidden_top1", "attn_entropy", "residual_rms")
    }
    return {name: value.tolist() for name, value in reduce_stats(stats, 1).items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_reduced_statistic_is_nan_on_all_ranks_if_one_rank_has_nan(rank, tmp_path):
    values = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    values[rank][0] = values[rank][2] = math.nan
    for reduced in run_ranks(reduced_with_nan, 2, tmp_path, values):
        for name, row in reduced.items():
            assert [math.isfinite(value) for value in row] == [False, True, False], name
        assert reduced["lambda_max"][1] == reduced["attn_entropy"][1] == 2.0
