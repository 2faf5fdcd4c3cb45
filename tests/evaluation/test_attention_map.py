"""diffllm attention-map: figures show the given maps, and every error is a single line."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs.written import small_tokenizer, write_weights
from tiers import slow_but

from diffllm.checkpoint.writer import write_parameters
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.load import load_model
from diffllm.evaluation.maps import LayerMaps, draw, layer_maps

# The figure


def made_maps(length=6, heads=2, differential=True):
    """Return random maps in which the first key has most of the weight, as in trained models."""
    future = torch.ones(length, length).triu(1).bool()
    logits = torch.randn(3, 1, heads, length, length).masked_fill(future, float("-inf"))
    logits[..., 0] += 3
    one, two, _ = torch.softmax(logits, -1)
    if not differential:
        return LayerMaps({"map": one}, {})
    lam = torch.rand(1, heads, length)
    difference = one - lam.unsqueeze(-1) * two
    return LayerMaps({"map 1": one, "map 2": two, "difference": difference}, {"lambda": lam})


def token_names(length):
    return [f"t{i}" for i in range(length)]


def test_attention_map_figure_shows_all_weights_except_future_keys():
    layer = made_maps()
    fig = draw(layer, [1], token_names(6), "")
    drawn = [axes.images[0].get_array() for axes in fig.axes[:3]]
    future = np.triu(np.ones((6, 6), dtype=bool), 1)
    for image, weights in zip(drawn, layer.maps.values(), strict=True):
        assert np.array_equal(image.mask, future)
        assert np.array_equal(image.data[~future], weights[0, 1].double().numpy()[~future])


def test_attention_map_figure_uses_one_symmetric_colour_scale():
    layer = made_maps(length=40)
    fig = draw(layer, [0, 1], token_names(40), "")
    images = [axes.images[0] for axes in fig.axes if axes.images][:6]
    limit = images[0].norm.vmax
    for image in images:
        assert (image.norm.vmin, image.norm.vmax) == (-limit, limit)
    assert images[2].norm(0.25 * limit) == pytest.approx(0.75)  # Colours use a square root scale.
    assert images[2].norm(-0.25 * limit) == pytest.approx(0.25)


# The command


@pytest.fixture
def make_short_run(tmp_path):
    """Return a function that creates a run with untrained weights."""

    def make(variant="diff_v2"):
        words = (f"attention={variant}", "seq_len=32")
        return write_weights(tmp_path / "run", small_tokenizer(), *words)

    return make


def png_size(path: Path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.mark.parametrize(
    "variant", slow_but(["diff_v1"], ["gated", "diff_v1", "diff_v2_unshared_kv"])
)
def test_attention_map_command_writes_figure_and_prints_table(make_short_run, output_of, variant):
    run = make_short_run(variant)
    out = output_of("attention-map", f"run={run}", "prompt=def f(x):\n", "layer=1", quiet=True)
    *_, path_line = out.splitlines()
    (figure,) = run.glob("attention-map-layer01-def-f-x-*.png")
    assert path_line == f"figure: {figure}"
    assert min(png_size(figure)) > 300
    assert out.startswith(f"{variant}, layer 1, {2 if variant == 'diff_v1' else 4} heads, mean ")
    assert ("so their difference weights no values" in out) == (variant == "diff_v2_unshared_kv")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == [str(h) for h in range(2 if variant == "diff_v1" else 4)]


def test_attention_map_table_equals_statistics_of_attention_maps(make_short_run, output_of):
    run = make_short_run()
    out = output_of("attention-map", f"run={run}", "prompt=return x[3]", "layer=0")
    ids = Tokenizer.from_file(run / "tokenizer.model").encode("return x[3]")
    layer = layer_maps(load_model(run)[0], torch.tensor([ids]), 0)
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    lam, weights = layer.by_query["lambda"][0], layer.maps["difference"][0]
    entropy = torch.special.entr(layer.maps["map 1"][0]).sum(-1).mean(-1)
    for head, row in enumerate(rows):
        shares = [-row[row < 0].sum() / row.abs().sum() for row in weights[head]]
        negative = sum(shares) / len(shares)  # mean over queries
        expected = [
            *(lam[head].mean(), lam[head].min(), lam[head].max()),
            *(weights[head, 1:, 0].mean(), negative, entropy[head]),
        ]
        expected = [float(value) for value in expected]
        assert [float(cell) for cell in row[1:]] == pytest.approx(expected, abs=6e-4)
    assert len(rows) == 4


@pytest.mark.slow
def test_attention_map_command_writes_figure_of_single_head(make_short_run, output_of, tmp_path):
    run = make_short_run()
    words = ("attention-map", f"run={run}", "prompt=x")
    assert "head 2" in output_of(*words, "head=2")
    (figure,) = run.glob("attention-map-layer01-head02-x-*.png")  # The default layer is the last.
    assert png_size(figure)
    output_of(*words, "head=2", "step=0")
    (of_step,) = run.glob("attention-map-layer01-head02-step0-x-*.png")
    assert of_step.read_bytes() == figure.read_bytes()
    places = [tmp_path / "a.pdf", tmp_path / "b.SVG"]
    for place, start in zip(places, (b"%PDF", b"<?xml"), strict=True):
        output_of(*words, "head=0", f"out={place}")
        assert place.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["prompt="], ["prompt has 0 tokens", "1 to 32"]),
        (["prompt=\udcff"], ["prompt", "UTF-8"]),
        (["prompt=" + "(" * 40], ["prompt has 40 tokens", "32"]),
        (["prompt=x", "layer=2"], ["layer=2", "0 to 1"]),
        (["prompt=x", "head=4"], ["head=4", "0 to 3"]),
        (["prompt=x", "step=9"], ["step 9", "[0]"]),
        (["prompt=x", "out=a.gif"], ["out=a.gif", ".png"]),
        (["prompt=x", "out=/dev/null/a.png"], ["out=/dev/null/a.png"]),
    ],
)
def test_attention_map_command_refuses_invalid_argument(make_short_run, error_of, words, named):
    run = make_short_run()
    before = sorted(run.rglob("*"))
    error = error_of("attention-map", f"run={run}", *words)
    for part in named:
        assert part in error
    assert sorted(run.rglob("*")) == before


def test_attention_map_command_fails_if_attention_is_not_finite(make_short_run, error_of):
    run = make_short_run()
    model, _ = load_model(run)
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    tensors["layers.1.attention.wq.weight"].fill_(float("nan"))
    shutil.rmtree(run / "checkpoints")
    write_parameters(run / "checkpoints", tensors, list(tensors))
    error = error_of("attention-map", f"run={run}", "prompt=def f(x):")
    assert "contain nan or infinity" in error
    assert not list(run.glob("*.png"))
