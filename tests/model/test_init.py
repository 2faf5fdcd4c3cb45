"""Initial values depend only on the seed, the parameter's name and the position in it."""

import hashlib

import pytest
import torch

from diffllm import build_model, load_config
from diffllm.core.errors import ConfigError
from diffllm.model.init import TILE, Initializer

BASE = ["model=tiny"]


def initial_parameters(overrides):
    return dict(build_model(load_config([*BASE, *overrides]).model).named_parameters())


def test_all_variants_use_same_initial_values_for_common_parameters():
    standard = initial_parameters(["attention=standard"])
    for variant in ("gated", "diff_v1", "diff_v2"):
        other = initial_parameters([f"attention={variant}"])
        same = [n for n in standard if n in other and standard[n].shape == other[n].shape]
        assert len(same) >= len(standard) - 2  # wq of diff_v2 has another shape
        for name in same:
            assert torch.equal(standard[name], other[name]), name


def common(one, other):
    """Return the common rows and columns of two parameters (and experts, if there are any)."""
    sizes = tuple(slice(min(pair)) for pair in zip(one.shape, other.shape, strict=True))
    return one[sizes], other[sizes]


@pytest.mark.parametrize("variant", ["standard", "diff_v1", "standard_2x_heads"])
@pytest.mark.parametrize(
    "words",
    [
        ["model=micro", "model.match_params_to=diff_v2"],
        ["model=micro", "model.match_flops_to=diff_v2"],
        ["model=moe_tiny", "model.moe.expert_dim=136"],
    ],
)
def test_variants_of_unequal_widths_share_initial_values_in_common_rows_and_columns(words, variant):
    """The feed-forward widths differ; wq and wo have other numbers of heads."""
    target = initial_parameters([*words[:-1], "attention=diff_v2"])
    matched = initial_parameters([*words, f"attention={variant}"])
    common_names = target.keys() & matched.keys()
    assert any("w2" in n and target[n].shape != matched[n].shape for n in common_names)
    for name in common_names:
        if target[name].ndim > 1:
            assert torch.equal(*common(target[name], matched[name])), name


@pytest.mark.parametrize(
    "block",
    [
        (slice(2, 4), slice(0, 290), slice(0, 500)),
        (slice(0, 5), slice(130, 261), slice(0, 500)),
        (slice(1, 2), slice(0, 290), slice(125, 250)),
        (slice(4, 5), slice(289, 290), slice(499, 500)),
        (slice(5, 5), slice(0, 290), slice(0, 500)),
    ],
)
def test_sharded_and_unsharded_parameters_get_same_initial_values(block):
    full = torch.empty(5, 290, 500)  # four tiles per matrix, each with a generator
    Initializer(0, {full: "w"}).normal_(full, 0.02, truncate=3)
    part = torch.empty_like(full[block], memory_format=torch.contiguous_format)
    first = tuple(part.start for part in block)
    init = Initializer(0, {part: "w"}, lambda p: (p, first, full.shape))
    init.normal_(part, 0.02, truncate=3)
    assert torch.equal(part, full[block])
    assert full.unique().numel() > 0.9 * full.numel(), "blocks must have different values"


def test_output_projections_have_smaller_initial_std_than_input_projections():
    params = initial_parameters(["model.n_layers=8", "model.init_std=0.05"])
    w1 = params["layers.0.ffn.w1.weight"]
    assert w1.abs().max() <= 3 * 0.05
    assert w1.std().item() == pytest.approx(0.05 * 0.9866, rel=0.02)  # truncation at 3 sigma
    for name in ("layers.0.ffn.w2.weight", "layers.7.attention.wo.weight"):
        assert params[name].std().item() == pytest.approx(0.05 * 0.9866 / 4, rel=0.03)
    assert (params["norm.weight"] == 1).all()


def drawn_parameter(shape, dtype=torch.float32, truncate=3):
    param = torch.empty(shape, dtype=dtype)
    Initializer(0, {param: "w"}).normal_(param, 0.02, truncate)
    return param


def tiles_by_definition(shape, truncate):
    """Draw tile by tile; redraw whole tiles to replace values beyond the bound."""
    full = torch.empty(shape)
    matrices = full.view(-1, *shape[-2:]) if len(shape) > 1 else full.view(1, 1, -1)
    for index, matrix in enumerate(matrices):
        for top in range(0, matrix.shape[0], TILE):
            for left in range(0, matrix.shape[1], TILE):
                text = f"0:w:{index}:{top // TILE}:{left // TILE}"
                seed = hashlib.blake2b(text.encode(), digest_size=8).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
                tile = torch.empty(TILE if len(shape) > 1 else 1, TILE)
                tile.normal_(0.0, 0.02, generator=generator)
                while truncate and (missing := tile.abs() > truncate * 0.02).any():
                    further = torch.empty_like(tile).normal_(0.0, 0.02, generator=generator)
                    tile = torch.where(missing, further, tile)
                part = matrix[top : top + TILE, left : left + TILE]
                part.copy_(tile[: part.shape[0], : part.shape[1]])
    return full


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("truncate", [None, 3, 1])
@pytest.mark.parametrize(
    "shape", [(300, 300), (5, 90, 500), (2, 3, 3, 260), (2, 100_003), (3, 4), (700,)]
)
def test_initial_values_do_not_depend_on_number_of_threads(shape, truncate):
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(
            drawn_parameter(shape, truncate=truncate), tiles_by_definition(shape, truncate)
        )
        assert torch.get_num_threads() == threads


def test_embed_init_std_changes_only_embeddings():
    words = ["model=micro", "attention=diff_v2"]
    plain = build_model(load_config(words).model).state_dict()
    own = build_model(load_config([*words, "model.embed_init_std=1"]).model).state_dict()
    changed = [name for name in plain if not torch.equal(plain[name], own[name])]
    assert changed == ["tok_embeddings.weight"]
    assert own[changed[0]].std() == pytest.approx(0.987, abs=0.01)  # truncated at 3


def test_build_model_leaves_global_random_generator_unchanged():
    before = torch.get_rng_state()
    build_model(load_config(["model=micro", "attention=diff_v2"]).model)
    assert torch.equal(torch.get_rng_state(), before)


def test_missing_initial_value_raises_config_error_with_parameter_name():
    one, other = torch.nn.Parameter(torch.empty(2, 2)), torch.nn.Parameter(torch.empty(3))
    init = Initializer(0, {one: "wq.weight", other: "layers.0.attention.scale"})
    init.matrices_(0.02, 0.02)
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.scale has no initial value"):
        init.check_all_filled()
    init.constant_(other, 1.0)
    init.check_all_filled()
