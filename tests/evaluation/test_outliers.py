"""Statistics of outliers compared with an explicit computation in float64."""

import math

import numpy as np
import pytest
import torch
from runs.models import tiny_model
from scipy import stats
from tiers import slow_but

from diffllm.core.errors import CheckpointError
from diffllm.evaluation import outliers
from diffllm.evaluation.load import HeldoutSequence
from diffllm.evaluation.outliers import PERCENTILES, TOP, Spread, measure_outliers
from diffllm.model.attention.masks import Documents

T, EOS = 24, 3
VARIANTS = ["standard", "gated", "diff_v1", "diff_v2", "diff_v2_unshared_kv", "standard_sink"]


def spread_of(values):
    """Return the statistics of a Spread, computed from all values at once."""
    x = np.asarray(values, dtype=np.float64).ravel()
    down = np.sort(np.abs(x))[::-1]
    top = {f"top_{k}": down[k - 1] for k in TOP}
    percentiles = {
        name: np.percentile(down, q, method="inverted_cdf") for name, q in PERCENTILES.items()
    }
    moments = {"rms": np.sqrt((x**2).mean()), "kurtosis": stats.kurtosis(x, fisher=False)}
    return top | percentiles | moments


def assert_spread_near(found, expected, rel):
    """Compare statistics of a Spread, whose percentiles have the precision of histogram bins."""
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        within = max(rel, 1.1e-3) if name in PERCENTILES else rel
        assert found[name] == pytest.approx(value, rel=within), name


def test_outlier_statistics_match_reference_if_values_are_added_in_parts():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0.3, 2, 5000), [90.0, -400.0, 0.0, 1e-30]])
    values = values.astype(np.float32)
    whole = Spread()
    for piece in np.split(values, [1, 7, 2000]):
        whole.add(torch.from_numpy(piece).view(-1, 1))
    assert_spread_near(whole.numbers(), spread_of(values), 1e-9)
    assert whole.numbers()["top_1"] == 400.0


def test_undefined_outlier_statistics_of_five_equal_values_equal_none():
    few = Spread()
    few.add(torch.full((5,), -2.5))
    numbers = few.numbers()
    assert (numbers["top_1"], numbers["top_3"], numbers["top_10"]) == (2.5, 2.5, None)
    assert numbers["kurtosis"] is None
    assert numbers["median"] == pytest.approx(2.5, rel=1e-3)
    few = Spread()
    few.add(torch.zeros(7))
    assert few.numbers()["p99"] == few.numbers()["rms"] == 0


def reference_statistics(model, tokens, documents):
    """Return the statistics of every layer of a float64 model, from whole attention maps."""
    x = model.tok_embeddings(tokens)
    if documents is None:
        rope, seen = model.rope(0, T), torch.ones(T, T).tril().bool()[None, None]
    else:
        rope, seen = model.rope.at(documents.positions), documents.mask()
    found = []
    for block in model.layers:
        attention, normed, show = block.attention, block.attention_norm(x), {}
        q, k, _ = attention.project(normed, rope)
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores = torch.einsum("bthd,bshd->bhts", q, keys) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        if hasattr(attention, "sink_kind") and attention.sink_kind.name != "none":
            extra = attention.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            whole = torch.cat((extra, scores.masked_fill(~seen, -torch.inf)), -1)
            weights = torch.softmax(whole, -1)[..., 1:]
        logits, maps = {"map": scores}, {"map": weights}
        if hasattr(attention, "lambda_q1"):  # All heads of map 1 precede the heads of map 2.
            half = scores.shape[1] // 2
            pick = (slice(0, half), slice(half, None))
            lam = attention.lambda_value()
        elif hasattr(attention, "w_lambda"):
            half = scores.shape[1] // 2
            pick = (slice(0, None, 2), slice(1, None, 2))
            if attention.cfg.pairing.name == "halves":
                pick = (slice(0, half), slice(half, None))
            lam = torch.sigmoid(attention.w_lambda(normed)).transpose(1, 2).unsqueeze(-1)
        if hasattr(attention, "lambda_q1") or hasattr(attention, "w_lambda"):
            logits = {f"map {i + 1}": scores[:, heads] for i, heads in enumerate(pick)}
            maps = {f"map {i + 1}": weights[:, heads] for i, heads in enumerate(pick)}
            maps["difference"] = maps["map 1"] - lam * maps["map 2"]
        attention(normed, rope, seen, aux=show)
        v = attention.wv(normed)
        rms = show["context"].square().mean(-1).sqrt()
        ratio = rms / v.square().mean((1, 2)).sqrt()[:, None, None]
        x, *_ = block(x, rope, seen)
        first = seen.int().argmax(-1, keepdim=True)
        many = (seen.sum(-1) > 1).expand(len(tokens), 1, T)
        sinks = {}
        for name, each in maps.items():
            on_first = each.gather(-1, first.expand(*each.shape[:3], 1)).squeeze(-1)
            share = on_first.abs() / each.abs().sum(-1)
            kept = many.expand_as(on_first)
            sinks[name] = {"weight": on_first[kept].mean(), "share": share[kept].mean()}
        found.append(
            {
                "hidden": x,
                "logits": {n: each[seen.expand_as(each)] for n, each in logits.items()},
                "sinks": sinks,
                "context_rms": rms.mean(),
                "ratio": {"mean": ratio.mean(), "min": ratio.min(), "max": ratio.max()},
            }
        )
    return found


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("variant", slow_but(["standard", "diff_v2"], VARIANTS))
def test_outlier_statistics_of_layers_match_float64_reference(variant, masked, monkeypatch):
    monkeypatch.setattr(outliers, "WEIGHTS_AT_ONCE", 1000)  # Split queries into several pieces.
    model = tiny_model(f"attention={variant}", f"seq_len={T}")
    tokens = torch.randint(4, 64, (3, T))
    tokens[:, [7, 15]] = EOS
    documents = Documents.of(tokens, EOS) if masked else None
    rows = [tokens[i : i + 1] for i in range(3)]
    parts = [Documents.of(row, EOS) if masked else None for row in rows]
    found = measure_outliers(model, map(HeldoutSequence, rows, rows, parts))
    expected = reference_statistics(model.double(), tokens, documents)
    for layer, own in zip(found, expected, strict=True):
        assert_spread_near(layer["hidden"], spread_of(own["hidden"]), 1e-4)
        kurtosis = stats.kurtosis(own["hidden"].numpy(), axis=-1, fisher=False).mean()
        assert layer["hidden"]["kurtosis_over_channels"] == pytest.approx(kurtosis, rel=1e-4)
        assert layer["hidden"]["top_1_channel"] == own["hidden"].abs().amax((0, 1)).argmax()
        assert layer["logits"].keys() == own["logits"].keys()
        for name, logits in own["logits"].items():
            assert_spread_near(layer["logits"][name], spread_of(logits), 1e-4)
        assert layer["sinks"].keys() == own["sinks"].keys()
        for name, sink in own["sinks"].items():
            told = {what: value.item() for what, value in sink.items()}
            assert layer["sinks"][name] == pytest.approx(told, rel=1e-4, abs=1e-7)
        assert layer["context_rms"] == pytest.approx(own["context_rms"].item(), rel=1e-4)
        told = {what: value.item() for what, value in own["ratio"].items()}
        assert layer["context_over_value_rms"] == pytest.approx(told, rel=1e-4)


@torch.no_grad()
def test_outlier_statistics_contain_channel_of_largest_activation():
    model, tokens = tiny_model("attention=diff_v2", f"seq_len={T}"), torch.randint(4, 64, (2, T))
    before = measure_outliers(model, [HeldoutSequence(tokens, tokens, None)])
    model.tok_embeddings.weight[:, 17] = -300.0  # Blocks only add to this channel.
    after = measure_outliers(model, [HeldoutSequence(tokens, tokens, None)])
    for plain, planted in zip(before, after, strict=True):
        assert plain["hidden"]["top_1"] < 100
        assert planted["hidden"]["top_1_channel"] == 17
        assert planted["hidden"]["top_100"] is None or planted["hidden"]["top_10"] > 250
        assert planted["hidden"]["top_1"] == pytest.approx(300, rel=0.2)
        assert planted["hidden"]["median"] < 10, "one channel of many"
        assert planted["hidden"]["kurtosis"] > 10 * plain["hidden"]["kurtosis"]


def test_measure_outliers_raises_error_if_layer_output_is_not_finite():
    model = tiny_model("attention=standard", f"seq_len={T}")
    tokens = torch.randint(4, 64, (1, T))
    with torch.no_grad():
        model.layers[1].ffn.w2.weight[0, 0] = math.nan
    with pytest.raises(CheckpointError, match="layer 1 is not finite"):
        measure_outliers(model, [HeldoutSequence(tokens, tokens, None)])
