"""diffllm attention-map: the figure shows the maps it is given, and every mistake is one line."""

import functools
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from omegaconf import OmegaConf
from runs.one_rank import loop_of, sign
from tiers import slow_but

from diffllm import build_model, load_config
from diffllm import cli as tools
from diffllm.checkpoint.manifest import FORMAT
from diffllm.data import Tokenizer
from diffllm.data.preparation.prepare import train_tokenizer, training_sample
from diffllm.data.text.corpus import Corpus, TextsPart
from diffllm.evaluation.load import load_model
from diffllm.evaluation.maps import LONGEST, LayerMaps, draw, layer_maps, visible

pytestmark = pytest.mark.filterwarnings("ignore:(torch.distributed is|Detected an existing)")

# The figure


def made_maps(length=6, heads=2, differential=True):
    """Maps of random numbers; the first key has most of the weight, as it often does."""
    logits = torch.randn(3, 1, heads, length, length).masked_fill(
        torch.ones(length, length).triu(1).bool(), float("-inf")
    )
    logits[..., 0] += 3
    one, two, _ = torch.softmax(logits, -1)
    if not differential:
        return LayerMaps({"map": one}, {})
    lam = torch.rand(1, heads, length)
    difference = one - lam.unsqueeze(-1) * two
    return LayerMaps({"map 1": one, "map 2": two, "difference": difference}, {"lambda": lam})


def names(length):
    return [f"t{i}" for i in range(length)]


def rendered(fig):
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    return canvas


def test_figure_has_a_row_of_axes_per_head():
    layer = made_maps()
    fig = draw(layer, [0, 1], names(6), "diff_v2, layer 3")
    strips = [f"λ, mean {mean:.2f}" for mean in layer.by_query["lambda"][0].mean(-1).tolist()]
    assert [axes.get_title(loc="left") for axes in fig.axes] == [
        *("head 0: map 1", "map 2", "difference", strips[0]),
        *("head 1: map 1", "map 2", "difference", strips[1]),
        "",  # the colour bar
    ]
    assert fig.texts[0].get_text() == "diff_v2, layer 3"


def test_images_are_the_maps_and_the_future_is_blank():
    layer = made_maps()
    fig = draw(layer, [1], names(6), "")
    drawn = [axes.images[0].get_array() for axes in fig.axes[:3]]
    future = np.triu(np.ones((6, 6), dtype=bool), 1)
    for image, weights in zip(drawn, layer.maps.values(), strict=True):
        assert np.array_equal(image.mask, future)
        assert np.array_equal(image.data[~future], weights[0, 1].double().numpy()[~future])


def test_colours_are_comparable_and_signed_ones_symmetric():
    layer = made_maps(length=40)
    fig = draw(layer, [0, 1], names(40), "")
    images = [axes.images[0] for axes in fig.axes if axes.images][:6]
    limit = images[0].norm.vmax
    for image in images:
        assert (image.norm.vmin, image.norm.vmax) == (-limit, limit)
    colour = {w: images[2].to_rgba(np.array([[w * limit]]))[0, 0] for w in (-1, -0.25, 0, 0.25, 1)}
    assert np.allclose(colour[0][:3], colour[0][0], atol=0.02)  # no hue at zero
    assert colour[1][0] > colour[1][2] + 0.2  # red above
    assert colour[-1][2] > colour[-1][0] + 0.2  # blue below
    for w in (0, 0.25, 1):  # a weight looks alike in all columns
        assert np.allclose(images[0].to_rgba(np.array([[w * limit]]))[0, 0], colour[w], atol=0.02)
    assert images[2].norm(0.25 * limit) == pytest.approx(0.75)  # a square root
    assert images[2].norm(-0.25 * limit) == pytest.approx(0.25)


def test_weights_that_are_nowhere_negative_have_the_same_colours_on_a_scale_from_zero():
    signed = draw(made_maps(length=40), [0], names(40), "").axes[0].images[0]
    image = draw(made_maps(40, differential=False), [0], names(40), "").axes[0].images[0]
    assert image.norm.vmin == 0
    assert image.norm(0.25 * image.norm.vmax) == pytest.approx(0.5)  # a square root
    for share in (0, 0.25, 1):
        colours = [i.to_rgba(np.array([[share * i.norm.vmax]]))[0, 0] for i in (image, signed)]
        assert np.allclose(*colours, atol=0.02)


def test_a_few_heavy_keys_do_not_leave_the_others_pale():
    layer = made_maps(length=100, heads=1, differential=False)
    layer.maps["map"] *= 0.1
    layer.maps["map"][0, 0, 10:40, 10] = 0.9
    fig = draw(layer, [0], names(100), "")
    assert fig.axes[0].images[0].norm.vmax < 0.5
    assert fig.axes[-1].get_xlabel() == "weight, square-root scale, cut at the 99th percentile"


def test_strips_are_bars_a_query_on_one_scale():
    layer = made_maps()
    fig = draw(layer, [0, 1], names(6), "")
    for head, axes in enumerate((fig.axes[3], fig.axes[7])):
        widths = [bar.get_width() for bar in axes.patches]
        assert widths == pytest.approx(layer.by_query["lambda"][0, head].tolist())
        assert axes.get_xlim() == (0, 1)
        assert axes.get_ylim() == fig.axes[0].get_ylim()  # the queries of the maps
    layer.by_query["lambda"][0, 0, 2] = -1.5
    layer.by_query["lambda"][0, 1, 2] = 2.5
    fig = draw(layer, [0, 1], names(6), "")
    assert fig.axes[3].get_xlim() == fig.axes[7].get_xlim() == (-1.5, 2.5)


def test_tokens_are_the_labels_of_both_axes():
    labels = ["def", "·f", "(", "$x$", ")", "↵"]
    fig = draw(made_maps(), [0], labels, "")
    axes = fig.axes[0]
    for axis in (axes.xaxis, axes.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == labels
        assert list(axis.get_ticklocs()) == list(range(6))
        assert not any(label.get_parse_math() for label in axis.get_ticklabels())
    assert axes.get_xlabel() == "key"
    assert axes.get_ylabel() == "query"
    assert [label.get_text() for label in fig.axes[1].get_yticklabels()] == []


@pytest.mark.parametrize(
    ("length", "heads"),
    slow_but(
        [(1, 1), (40, 4)],
        [
            *itertools.product([1, 40, 256], [1, 2, 4]),
            *((40, 5), (40, 7), (40, 8), (256, 16), (40, 32)),
        ],
    ),
)
@pytest.mark.parametrize("kind", ["standard", "gated", "differential"])
def test_nothing_overlaps_and_sizes_stay_sane(length, heads, kind):
    layer = made_maps(length, heads, kind == "differential")
    if kind == "gated":
        layer.by_query["gate"] = torch.rand(1, heads, length)
    fig = draw(layer, list(range(heads)), ["w" * LONGEST] * length, "diff_v2, layer 3")
    width, height = fig.get_size_inches()
    least = 0.15 if heads in (5, 7) else 0.3  # a prime number of heads is one row or one column
    assert least < height / width < 2.3
    assert max(width, height) < 32
    fig.draw_without_rendering()
    boxes = [axes.get_window_extent() for axes in fig.axes]
    for one, other in itertools.combinations(boxes, 2):
        assert one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
    maps = [box for axes, box in zip(fig.axes, boxes, strict=True) if axes.images]
    assert len(maps) == heads * len(layer.maps)
    for box in boxes[:-1]:
        assert box.height == pytest.approx(maps[0].width)
    assert maps[0].width > fig.dpi


@pytest.mark.parametrize(
    ("length", "heads"),
    slow_but([(7, 4)], [(1, 1), (7, 4), (60, 1), (60, 5), (200, 1)]),
)
def test_labels_as_drawn_neither_overlap_nor_leave_the_figure(length, heads):
    labels = [f"{'w' * (LONGEST - 3)}{i:03d}" for i in range(length)]
    fig = draw(made_maps(length, heads), list(range(heads)), labels, "diff_v2, layer 3")
    renderer = rendered(fig).get_renderer()
    page = fig.bbox
    for axes in fig.axes:
        for axis, low, high in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
            texts = [t for t in axis.get_ticklabels() if t.get_text()]
            boxes = sorted(
                (t.get_window_extent(renderer) for t in texts), key=lambda b: getattr(b, low)
            )
            for box, after in itertools.pairwise(boxes):
                assert getattr(box, high) <= getattr(after, low) + 1
        tight = axes.get_tightbbox(renderer)
        assert tight.x0 >= page.x0
        assert tight.y0 >= page.y0
        assert tight.x1 <= page.x1
        assert tight.y1 <= page.y1


# Labels


@pytest.mark.parametrize(
    ("piece", "label"),
    [
        ("def", "def"),
        ("\u2581return", "·return"),
        (")\n", ")↵"),
        ("<0x0A>", "↵"),
        ("<0xF0>", "\\xf0"),
        ("\t", "⇥"),
        ("\r", "\\r"),
        ("中", "\\u4e2d"),
        ("😀", "\\U0001f600"),
        ("\u0301", "\\u0301"),  # would sit on whatever is before it
        ("\u200d", "\\u200d"),
        ("abcdefghijklmnop", "abcdefghijk…"),
    ],
)
def test_labels_show_white_space_and_what_no_font_has(piece, label):
    assert visible(piece) == label


# The command


@pytest.fixture(scope="module")
def tokenizer_model():
    texts = [f"def f{i}(x):\n    return x[{i % 9}] + {i}\n" for i in range(200)]
    corpus = Corpus("", "", lambda: [TextsPart("", texts)])
    return train_tokenizer(training_sample(corpus, 1 << 20), 300, 1)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, tokenizer_model):
    """A run directory with a checkpoint of an untrained model; not to be written to."""

    @functools.cache
    def make(variant, seq_len):
        cfg = load_config(
            [
                *("model=tiny", f"attention={variant}", f"seq_len={seq_len}", "model.dim=32"),
                *("model.ffn_dim=32", "model.vocab_size=300", "model.init_std=0.2"),
            ]
        )
        run = tmp_path_factory.mktemp("run")
        save_weights(run, build_model(cfg.model))
        (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
        (run / "tokenizer.model").write_bytes(tokenizer_model)
        return run

    return make


def save_weights(run, model):
    path = run / "checkpoints" / "step-00000007"
    params = {name: param.detach() for name, param in model.named_parameters()}
    dcp.save({f"model.{n}": p for n, p in params.items()}, checkpoint_id=path, no_dist=True)
    shapes = {name: list(param.shape) for name, param in params.items()}
    state = {"format": FORMAT, "step": 7, "parameters": shapes, "ranks": 1, "loop": loop_of(7)}
    (path / "state.json").write_text(json.dumps(state))
    sign(path)


@pytest.fixture
def make_run(tmp_path, saved_run):
    """A copy of such a run."""

    def make(variant="diff_v2", seq_len=32):
        return shutil.copytree(saved_run(variant, seq_len), tmp_path / "run")

    return make


@pytest.fixture
def command(capsys):
    def call(*words):
        code = tools.main(["attention-map", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def png_size(path: Path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.mark.parametrize(
    "variant",
    slow_but(["gated", "diff_v1"], ["standard_sink", "gated", "diff_v1", "diff_v2_unshared_kv"]),
)
def test_figure_and_table_of_a_run(make_run, command, variant):
    run = make_run(variant)
    code, out, err = command(f"run={run}", "prompt=def f(x):\n", "layer=1")
    assert (code, err) == (0, "")
    *_, path_line = out.splitlines()
    (figure,) = run.glob("attention-map-layer01-def-f-x-*.png")
    assert path_line == f"figure: {figure}"
    assert min(png_size(figure)) > 300
    assert out.startswith(f"{variant}, layer 1, {2 if variant == 'diff_v1' else 4} heads, mean ")
    assert ("their difference weights none" in out) == (variant == "diff_v2_unshared_kv")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == [str(h) for h in range(2 if variant == "diff_v1" else 4)]


def test_the_table_has_the_numbers_of_the_maps(make_run, command):
    run = make_run()
    _, out, _ = command(f"run={run}", "prompt=return x[3]", "layer=0")
    ids = Tokenizer.from_file(run / "tokenizer.model").encode("return x[3]")
    layer = layer_maps(load_model(run)[0], torch.tensor([ids]), 0)
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    lam, weights = layer.by_query["lambda"][0], layer.maps["difference"][0]
    entropy = torch.special.entr(layer.maps["map 1"][0]).sum(-1).mean(-1)
    for head, row in enumerate(rows):
        shares = [-row[row < 0].sum() / row.abs().sum() for row in weights[head]]
        negative = sum(shares) / len(shares)  # of each query alike
        expected = [
            *(lam[head].mean(), lam[head].min(), lam[head].max()),
            *(weights[head, 1:, 0].mean(), negative, entropy[head]),
        ]
        assert [float(cell) for cell in row[1:]] == pytest.approx(
            [float(e) for e in expected], abs=6e-4
        )
    assert len(rows) == 4


def test_a_single_token_has_no_weight_on_another(make_run, command):
    run = make_run()
    assert len(Tokenizer.from_file(run / "tokenizer.model").encode("x")) == 1
    _, out, _ = command(f"run={run}", "prompt=x", "head=0")
    (row,) = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert row[4:] == ["-", "0.000", "0.000"]


def test_one_head_a_checkpoint_by_its_step_and_another_place(make_run, command, tmp_path):
    run = make_run()
    code, out, _ = command(f"run={run}", "prompt=x", "head=2", "step=7")
    assert code == 0
    assert "head 2" in out
    (figure,) = run.glob("attention-map-layer01-head02-step7-x-*.png")  # the last layer
    assert png_size(figure)
    places = [tmp_path / "a.pdf", tmp_path / "b.SVG"]
    for place, start in zip(places, (b"%PDF", b"<?xml"), strict=True):
        assert command(f"run={run}", "prompt=x", "head=0", f"out={place}")[0] == 0
        assert place.read_bytes().startswith(start)


@pytest.mark.slow
def test_every_layer_has_a_figure_and_every_prompt_its_own(make_run, command, tmp_path):
    run = make_run()
    for prompt in ("x y", "x(y", "("):
        code, out, _ = command(f"run={run}", f"prompt={prompt}", "layer=all", "head=0")
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("diff_v2, layer")] == [
            line
            for line in out.splitlines()
            if re.match(r"diff_v2, layer [01], head 0, mean", line)
        ]
        assert out.count("figure: ") == 2
    figures = sorted(path.name for path in run.glob("*.png"))
    assert len(figures) == 6
    assert sum(name.startswith("attention-map-layer00-head00-x-y-") for name in figures) == 2
    before = {path.name: path.read_bytes() for path in run.glob("*.png")}
    assert command(f"run={run}", "prompt=x y", "head=0")[0] == 0
    assert {path.name: path.read_bytes() for path in run.glob("*.png")} == before
    place = tmp_path / "maps.svg"
    assert command(f"run={run}", "prompt=x", "layer=all", "head=0", f"out={place}")[0] == 0
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        *("maps-layer00.svg", "maps-layer01.svg"),
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["prompt="], ["prompt has 0 tokens", "1 to 32"]),
        (["prompt=\udcff"], ["prompt", "UTF-8"]),
        (["prompt=" + "(" * 40], ["prompt has 40 tokens", "32"]),
        (["prompt=x", "layer=2"], ["layer=2", "0 to 1"]),
        (["prompt=x", "layer=one"], ["layer=one", "0 to 1", "all"]),
        (["prompt=x", "head=4"], ["head=4", "0 to 3"]),
        (["prompt=x", "head=first"], ["head=first", "all"]),
        (["prompt=x", "step=9"], ["step 9", "[7]"]),
        (["prompt=x", "out=a.gif"], ["out=a.gif", ".png"]),
        (["prompt=x", "out=/dev/null/a.png"], ["out=/dev/null/a.png"]),
    ],
)
def test_a_mistake_is_one_line(make_run, command, words, named):
    run = make_run()
    before = sorted(run.rglob("*"))
    code, out, err = command(f"run={run}", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in named:
        assert part in err
    assert sorted(run.rglob("*")) == before


def test_more_tokens_than_a_figure_holds_are_refused(make_run, command):
    run = make_run("diff_v2", 512)
    code, _, err = command(f"run={run}", "prompt=" + "(" * 300)
    assert code == 2
    assert "256" in err


def test_weights_that_are_not_finite_are_refused(make_run, command):
    run = make_run()
    model, _ = load_model(run)
    with torch.no_grad():
        model.layers[1].attention.wq.weight.fill_(float("nan"))
    save_weights(run, model)
    code, _, err = command(f"run={run}", "prompt=def f(x):")
    assert code == 2
    assert "not finite" in err
    assert not list(run.glob("*.png"))
