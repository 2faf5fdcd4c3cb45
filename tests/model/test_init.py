"""Initial values depend on (seed, name) only."""

import pytest
import torch

from diffllm import build_model, load_config
from diffllm.model.init import Initializer

BASE = ["model=tiny"]


def parameters(overrides):
    return dict(build_model(load_config([*BASE, *overrides]).model).named_parameters())


def test_variants_share_every_parameter_of_the_same_name_and_shape():
    standard = parameters(["attention=standard"])
    for variant in ("gated", "diff_v1", "diff_v2"):
        other = parameters([f"attention={variant}"])
        same = [n for n in standard if n in other and standard[n].shape == other[n].shape]
        assert len(same) >= len(standard) - 2  # diff_v2 has wider wq
        for name in same:
            assert torch.equal(standard[name], other[name]), name


def test_seed_and_name_decide():
    once, again, other = parameters([]), parameters([]), parameters(["seed=1"])
    for name, value in once.items():
        assert torch.equal(value, again[name])
        if "norm" not in name:
            assert not torch.equal(value, other[name]), name
    first, second = (once[f"layers.{i}.ffn.w1.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("rows", [(0, 10), (3, 700), (699, 1000), (1000, 1000)])
def test_a_rank_that_holds_some_rows_draws_what_one_process_draws(rows):
    full = torch.empty(1000, 300)
    Initializer(0, {full: "w"}).normal_(full, 0.02, truncate=3)
    part = torch.empty(rows[1] - rows[0], 300)
    init = Initializer(0, {part: "w"}, lambda p: (p, (rows[0], 0), full.shape))
    init.normal_(part, 0.02, truncate=3)
    assert torch.equal(part, full[rows[0] : rows[1]])


@pytest.mark.parametrize(
    "block",
    [
        (slice(2, 4), slice(0, 90), slice(0, 500)),
        (slice(0, 5), slice(30, 61), slice(0, 500)),
        (slice(1, 2), slice(0, 90), slice(125, 250)),
        (slice(4, 5), slice(89, 90), slice(499, 500)),
        (slice(5, 5), slice(0, 90), slice(0, 500)),
    ],
)
def test_so_does_one_that_holds_a_block_of_stacked_matrices(block):
    full = torch.empty(5, 90, 500)  # four blocks of generators
    Initializer(0, {full: "w"}).normal_(full, 0.02, truncate=3)
    part = torch.empty_like(full[block], memory_format=torch.contiguous_format)
    first = tuple(part.start for part in block)
    init = Initializer(0, {part: "w"}, lambda p: (p, first, full.shape))
    init.normal_(part, 0.02, truncate=3)
    assert torch.equal(part, full[block])
    assert full.unique().numel() > 0.9 * full.numel(), "blocks repeat each other"


def test_truncated_normal_with_depth_scaled_outputs():
    params = parameters(["model.n_layers=8", "model.init_std=0.05"])
    w1 = params["layers.0.ffn.w1.weight"]
    assert w1.abs().max() <= 3 * 0.05
    assert w1.std().item() == pytest.approx(0.05 * 0.9866, rel=0.02)  # truncation at 3 sigma
    for name in ("layers.0.ffn.w2.weight", "layers.7.attention.wo.weight"):
        assert params[name].std().item() == pytest.approx(0.05 * 0.9866 / 4, rel=0.03)
    assert (params["norm.weight"] == 1).all()
