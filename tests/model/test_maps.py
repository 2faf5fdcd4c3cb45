"""Explicit maps: what they weight, layer by layer, and the figure drawn of them."""

import numpy as np
import pytest
import torch

from diffllm import build_model, load_config
from diffllm.config import config_directory
from diffllm.maps import layer_maps
from diffllm.model.attention.ops import weighted
from diffllm.tools.attention_map_figure import figure, visible_piece

VARIANTS = sorted(path.stem for path in (config_directory() / "attention").glob("*.yaml"))
HEADS = {"diff_v1": 2, "standard_1p5x_heads": 6}
T = 9


def model_of(variant):
    overrides = ["model=tiny", f"attention={variant}", "model.vocab_size=64", "data.vocab_size=64"]
    sizes = ["seq_len=16", "model.init_std=0.3", "model.dim=32", "model.ffn_dim=32"]
    return build_model(load_config([*overrides, *sizes]).model)


def heads_of(variant):
    return HEADS.get("diff_v1" if variant.startswith("diff_v1") else variant, 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_map_weights_the_values(variant):
    model = model_of(variant).double()
    model.reset_parameters()  # tables in float64
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(0.3 * torch.randn_like(param))
    attention = model.layers[1].attention
    x = torch.randn(2, T, 32, dtype=torch.float64)
    rope = model.rope(0, T)
    q, k, v = attention.project(x, rope)
    maps, show = attention.maps(x, q, k), {}
    attention(x, rope, show=show)
    if variant == "diff_v2_unshared_kv":  # the two maps of a pair weight different values
        lam = show["lambda"].transpose(1, 2).unsqueeze(-1)
        both = torch.cat((maps["map 1"], -lam * maps["map 2"]), dim=1)
        first, second = weighted(both, v).chunk(2, dim=2)
        context = first + second
    else:
        context = weighted(list(maps.values())[-1], v)
    context = context * show["gate"] if "gate" in show else context
    torch.testing.assert_close(context, show["context"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_maps_of_a_layer_are_causal_and_sum_to_what_their_softmax_leaves(variant):
    model, tokens = model_of(variant), torch.randint(0, 64, (T,))
    shown = layer_maps(model, tokens, 1)
    names = ["map 1", "map 2", "difference"] if variant.startswith("diff") else ["map"]
    assert list(shown.maps) == names
    assert shown.effective is shown.maps[names[-1]]
    for name, weights in shown.maps.items():
        assert weights.shape == (heads_of(variant), T, T)
        assert weights.dtype == torch.float32
        assert (weights.triu(1) == 0).all()
        sums = weights.sum(-1)
        if variant in ("standard_sink", "standard_off_by_one"):
            assert ((sums > 0) & (sums < 1)).all()
        elif name != "difference":
            torch.testing.assert_close(sums, torch.ones_like(sums))
        elif variant == "diff_v1_clamped":
            assert (((sums - 1).abs() < 1e-5) | (sums == 0)).all()
        else:
            assert shown.strength is not None
            torch.testing.assert_close(sums, 1 - shown.strength, rtol=1e-4, atol=1e-5)
    named = {"d": "lambda", "g": "gate"}.get(variant[0], "")
    assert shown.strength_name == named
    if named:
        assert shown.strength.shape == (heads_of(variant), T)
    else:
        assert shown.strength is None


@pytest.mark.parametrize("variant", ["standard", "diff_v1", "diff_v2"])
def test_maps_are_those_of_their_layer_in_the_whole_model(variant):
    """Recorded where the decoder itself calls the layer."""
    model, tokens = model_of(variant), torch.randint(0, 64, (T,))
    for layer in range(2):
        attention, recorded = model.layers[layer].attention, {}

        def record(module, args, recorded=recorded):
            x, rope = args[:2]
            q, k, _ = module.project(x, rope)
            recorded.update(module.maps(x, q, k))

        with attention.register_forward_pre_hook(record), torch.no_grad():
            model(tokens.unsqueeze(0))
        shown = layer_maps(model, tokens, layer)
        for name, weights in recorded.items():
            torch.testing.assert_close(shown.maps[name], weights[0])


def drawn(variant, heads, labels=None):
    shown = layer_maps(model_of(variant), torch.arange(T), 0)
    labels = labels or [f"t{i}" for i in range(T)]
    return shown, figure(shown, heads, labels, "a title")


def test_the_figure_has_a_row_a_head_and_the_maps_as_they_are():
    shown, fig = drawn("diff_v2", [0, 1, 2, 3])
    grid = [axes for axes in fig.axes if axes.images]
    strips = [axes for axes in fig.axes if axes.patches and not axes.images]
    assert len(grid) == 4 * 3
    assert len(strips) == 4
    for i, axes in enumerate(grid):
        image = axes.images[0].get_array()
        expected = list(shown.maps.values())[i % 3][i // 3].numpy()
        assert np.array_equal(image.mask, np.triu(np.ones((T, T), bool), 1))
        assert np.array_equal(image.data[~image.mask], expected[~image.mask])
    for head, axes in enumerate(strips):
        assert [bar.get_width() for bar in axes.patches] == shown.strength[head].tolist()
    assert [axes.get_title() for axes in grid[:3]] == ["map 1", "map 2", "difference"]
    assert grid[3].get_ylabel() == "head 1: query"
    assert [text.get_text() for text in fig.texts] == ["a title"]


def test_scales_are_shared_and_that_of_a_signed_map_is_symmetric():
    shown, fig = drawn("diff_v2", [0, 1])
    grid = [axes for axes in fig.axes if axes.images]
    limits = [axes.images[0].get_clim() for axes in grid]
    both = torch.cat((shown.maps["map 1"][:2], shown.maps["map 2"][:2]))
    most = shown.maps["difference"][:2].abs().max().item()
    assert (shown.maps["difference"] < 0).any()
    for i, (low, high) in enumerate(limits):
        if i % 3 == 2:
            assert (low, high) == (-most, most)
        else:
            assert (low, high) == (0.0, both.max().item())


def test_one_head_of_a_variant_without_lambda_is_one_map_with_every_token_named():
    labels = ["def", "·$x$", "⏎", "_y^", "\\u4e2d", "…", "#", "%", "&"]
    _, fig = drawn("standard", [2], labels)
    (axes,) = [axes for axes in fig.axes if axes.images]
    assert axes.get_ylabel() == "head 2: query"
    for axis in (axes.xaxis, axes.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == labels
    fig.canvas.draw()  # "$" is text, not mathematics


def test_pieces_are_shown_in_one_line_of_the_font():
    assert visible_piece("▁def") == "·def"
    assert visible_piece(":\n") == ":⏎"
    assert visible_piece("中") == "\\u4e2d"
    assert visible_piece("\x00") == "\\u0"
    assert visible_piece("é€") == "é€"
    assert len(visible_piece("x" * 50)) == 14
