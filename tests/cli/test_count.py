"""The cost of a model against the equations, and what `diffllm count` prints of it."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from equations import (
    SIZES,
    VARIANTS,
    active_params,
    attention,
    components,
    flops_per_token,
    has_shape,
    sizes,
    total_params,
    width_of,
)
from tiers import families, slow_but

from diffllm import build_model, load_config
from diffllm import cli as tools
from diffllm.cli.count import count, short_difference
from diffllm.config.compose import variant_config
from diffllm.core.errors import ConfigError
from diffllm.model.stats import GROUPS, component_of, group_of

KEYS = {
    "total_params",
    "active_params",
    "non_embedding_params",
    "attention_params",
    "ffn_dim",
    "expert_dim",
    "flops_per_token",
    "kv_cache_bytes_per_token",
    "by_group",
    "by_component",
    "matched",
}


FAST = ["tiny", "base_350m", "moe_mini"]


def config(size, variant, *extra):
    return load_config([f"model={size}", f"attention={variant}", "data.vocab_size=512", *extra])


def expected_counts(m, variant, seq_len):
    total = total_params(m, variant, width_of(m))
    return {
        "total_params": total,
        "active_params": active_params(m, variant),
        "non_embedding_params": total - m.vocab_size * m.dim,
        "attention_params": m.n_layers * sum(sizes(attention(m, variant)).values()),
        "ffn_dim": m.ffn_dim,
        "expert_dim": m.moe.expert_dim if m.moe.n_experts else None,
        "flops_per_token": pytest.approx(flops_per_token(m, variant, seq_len), rel=1e-12),
        "kv_cache_bytes_per_token": m.n_layers * 2 * m.n_kv_heads * m.head_dim * 2,
        "by_component": components(m, variant),
        "matched": None,
    }


@cache
def of_size(size):
    return config(size, "standard", "seq_len=4096")


attention_of = cache(variant_config)


@pytest.mark.parametrize("size", slow_but(FAST, SIZES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_equal_those_from_the_equations(size, variant):
    cfg = of_size(size)
    cfg = replace(cfg, model=replace(cfg.model, attention=attention_of(variant)))
    if not has_shape(cfg.model, variant):
        with pytest.raises(ConfigError, match="must be"):
            cfg.validate()
        return
    counts = count(cfg)
    groups = counts.pop("by_group")
    assert counts == expected_counts(cfg.model, variant, 4096)
    assert sum(groups.values()) == counts["total_params"]
    assert set(groups) <= set(GROUPS)


@pytest.mark.parametrize("seq_len", slow_but([511], [1, 2, 511, 8192]))
def test_flops_follow_the_sequence_length(seq_len):
    for variant in ("standard", "gated", "diff_v1", "diff_v2"):
        cfg = config("tiny", variant, f"seq_len={seq_len}")
        expected = expected_counts(cfg.model, variant, seq_len)
        assert count(cfg)["flops_per_token"] == expected["flops_per_token"]


@pytest.mark.parametrize(
    ("size", "params"),
    slow_but(
        [("base_350m", 350e6), ("moe_1b", 1e9)],
        [
            ("small_125m", 125e6),
            ("base_350m", 350e6),
            ("dense_1p3b", 1.3e9),
            ("dense_3b", 3e9),
            ("moe_mini", 30e6),
            ("moe_1b", 1e9),
        ],
    ),
)
def test_sizes_are_near_their_names(size, params):
    assert count(config(size, "standard"))["total_params"] == pytest.approx(params, rel=0.05)


def test_the_writeups_mixture_has_its_published_parameters():
    """30.53B total and 3.35B active, embeddings counted: Qwen3-30B-A3B's."""
    counts = count(config("moe_30a3", "standard"))
    assert counts["total_params"] == pytest.approx(30.53e9, abs=0.005e9)
    assert counts["active_params"] == pytest.approx(3.35e9, abs=0.005e9)


def test_shared_experts_and_dense_layers_are_counted():
    extra = ("model.moe.n_shared=2", "model.moe.n_dense_layers=1", "model.tie_embeddings=true")
    cfg = config("moe_tiny", "diff_v2", *extra)
    counts = count(cfg)
    counts.pop("by_group")
    assert counts == expected_counts(cfg.model, "diff_v2", cfg.seq_len)
    expert, dense = 3 * 128 * 128, 3 * 128 * 384
    assert counts["by_component"]["ffn"] == dense + (8 + 2) * expert
    assert counts["by_component"]["router"] == 8 * 128
    assert counts["total_params"] - counts["active_params"] == (8 - 2) * expert


@pytest.mark.parametrize("size", slow_but(["base_350m"], SIZES))
def test_diff_v2_costs_the_baselines_kv_cache_to_the_byte(size):
    standard, diff_v2 = (count(config(size, v)) for v in ("standard", "diff_v2"))
    assert diff_v2["kv_cache_bytes_per_token"] == standard["kv_cache_bytes_per_token"] > 0


@pytest.mark.parametrize("size", slow_but(["base_350m"], SIZES))
def test_diff_v2_saves_its_share_of_a_decoder_with_twice_the_heads(size):
    """H / (4H + 2K): wo has H heads where the plain decoder's has 2H."""
    cfg = config(size, "diff_v2")
    h, k = cfg.model.n_heads, cfg.model.n_kv_heads
    diff_v2 = count(cfg)
    plain = count(config(size, "standard", "model.attention.query_heads=2.0"))
    lambdas = diff_v2["by_component"]["lambda/gate"]
    assert lambdas == cfg.model.n_layers * cfg.model.dim * h
    norms = diff_v2["by_component"]["head norms"]  # of queries and keys, in both
    assert norms == plain["by_component"]["head norms"]
    saved = plain["attention_params"] - (diff_v2["attention_params"] - lambdas)
    assert Fraction(saved, plain["attention_params"] - norms) == Fraction(h, 4 * h + 2 * k)
    assert diff_v2["by_component"]["wq"] == plain["by_component"]["wq"]


@pytest.mark.parametrize("size", slow_but(["base_350m"], SIZES))
def test_one_and_a_half_times_the_heads_have_diff_v2s_attention_parameters(size):
    cfg = config(size, "diff_v2")
    if not has_shape(cfg.model, "standard_1p5x_heads"):
        pytest.skip("K does not divide 1.5 H")
    diff_v2, wider = count(cfg), count(config(size, "standard_1p5x_heads"))
    lambdas = diff_v2["by_component"]["lambda/gate"]
    assert wider["attention_params"] == diff_v2["attention_params"] - lambdas


def test_what_variants_add_to_the_baseline_is_what_the_papers_say():
    variants = ("standard", "gated", "diff_v1", "diff_v2")
    totals = {v: count(config("dense_1p3b", v))["total_params"] for v in variants}
    layers, dim, heads, width = 24, 2048, 16, 128
    assert totals["diff_v1"] - totals["standard"] == layers * (4 * width + 2 * width)
    assert totals["diff_v2"] - totals["standard"] == layers * dim * (heads * width + heads)
    assert totals["gated"] - totals["standard"] == layers * dim * heads * width


def test_optional_parts_are_counted():
    for extra in ("model.tie_embeddings=true", "model.n_layers=1"):
        cfg = config("tiny", "diff_v2", extra)
        counts = count(cfg)
        counts.pop("by_group")
        assert counts == expected_counts(cfg.model, "diff_v2", cfg.seq_len)
    plain, normed = (
        count(config("tiny", "diff_v2", f"model.qk_norm={on}"))["total_params"] for on in (0, 1)
    )
    assert normed - plain == 2 * 2 * 32  # q_norm and k_norm in each of 2 layers
    elementwise, headwise = (
        count(config("tiny", "gated", f"model.attention.gate={g}"))["by_group"]["attention"]
        for g in ("elementwise", "headwise")
    )
    assert elementwise - headwise == 2 * 128 * (4 * 32 - 4)


@pytest.mark.parametrize("variant", slow_but(families(VARIANTS), VARIANTS))
def test_counting_builds_the_same_parameters_as_building(variant):
    cfg = config("tiny", variant)
    params = dict(build_model(cfg.model).named_parameters())
    counts = count(cfg)
    assert counts["total_params"] == sum(p.numel() for p in params.values())
    for group, total in counts["by_group"].items():
        assert total == sum(p.numel() for n, p in params.items() if group_of(n) == group)


@pytest.mark.parametrize(
    ("name", "group", "component"),
    [
        ("tok_embeddings.weight", "embedding", "embeddings/output"),
        ("output.weight", "output", "embeddings/output"),
        ("norm.weight", "norm", "norms"),
        ("layers.11.ffn_norm.weight", "norm", "norms"),
        ("layers.0.attention.wq.weight", "attention", "wq"),
        ("layers.0.attention.w_gate.weight", "attention", "lambda/gate"),
        ("layers.0.attention.q_norm.weight", "norm", "head norms"),
        ("layers.0.attention.head_norm.weight", "norm", "head norms"),
        ("layers.0.attention.lambda_q1", "lambda", "lambda/gate"),
        ("layers.0.attention.w_lambda.weight", "lambda", "lambda/gate"),
        ("layers.0.attention.lambda_logit", "lambda", "lambda/gate"),
        ("layers.0.attention.sink", "attention", "sink"),
        ("layers.0.ffn.w2.weight", "ffn", "ffn"),
        ("layers.0.ffn.router.weight", "router", "router"),
        ("layers.0.ffn.experts.w1", "ffn", "ffn"),
        ("layers.0.ffn.shared.w3.weight", "ffn", "ffn"),
    ],
)
def test_group_and_component_of_a_parameter_name(name, group, component):
    assert (group_of(name), component_of(name)) == (group, component)


def test_the_command_prints_json(capsys):
    argv = ["count", "model=dense_7b", "attention=diff_v1", "seq_len=2048", "--json"]
    assert tools.main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == KEYS
    assert printed == count(config("dense_7b", "diff_v1", "seq_len=2048"))


def test_the_command_prints_a_table(capsys):
    assert tools.main(["count", "model=tiny", "attention=standard"]) == 0
    out = capsys.readouterr().out
    counts = count(config("tiny", "standard"))
    assert "tiny, seq_len 512" in out
    assert "standard\n" in out
    for key in ("total_params", "non_embedding_params", "kv_cache_bytes_per_token"):
        assert f"{counts[key]:,}\n" in out
    for name, params in counts["by_component"].items():
        assert not params or re.search(rf"^{name} +{params:,}$", out, re.M), name


def test_the_command_says_what_was_matched(capsys):
    words = ["count", "model=tiny", "attention=standard", "model.match_params_to=diff_v2"]
    assert tools.main([*words, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    target = count(config("tiny", "diff_v2"))
    assert counts["ffn_dim"] > target["ffn_dim"]
    difference = 100 * (counts["total_params"] / target["total_params"] - 1)
    assert counts["matched"] == {
        "target": "diff_v2",
        "target_params": target["total_params"],
        "target_ffn_dim": 384,
        "params": counts["total_params"],
        "ffn_dim": counts["ffn_dim"],
        "key": "ffn_dim",
        "by": "params",
        "flops": counts["flops_per_token"],
        "target_flops": target["flops_per_token"],
        "difference_percent": pytest.approx(difference),
    }
    assert tools.main(words) == 0
    out = capsys.readouterr().out
    assert f"matched to diff_v2: {target['total_params']:,} parameters at ffn_dim 384\n" in out
    assert re.search(rf"^total +{counts['total_params']:,}$", out, re.M)
    assert re.search(rf"^over target +{re.escape(f'{difference:+.3f}%')}$", out, re.M)
    assert re.search(rf"^ffn_dim +{counts['ffn_dim']:,}$", out, re.M)


# --compare


FIVE = ("standard", "gated", "diff_v1", "diff_v2", "standard_1p5x_heads")
PARTS = ("wq", "wk", "wv", "wo", "lambda/gate", "head norms", "sink")
REST = ("ffn", "norms", "embeddings/output")
LABELS = (*PARTS, "attention", *REST, "total", "active", "without embedding", "over target")
LABELS = (*LABELS, "ffn_dim", "MFLOPs a token", "KV bytes a token")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def counts_of(variant, *overrides):
    return count(load_config([f"attention={variant}", *overrides]))


def printed(capsys, *words):
    assert tools.main(["count", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def parse(text):
    """The names above the columns, and label -> [(value, change)]."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(r" +standard", line))
    rows = {}
    for line in filter(None, lines[at + 1 :]):
        (label,) = [name for name in LABELS if line.startswith(f"{name} ")]
        cells, words = [], line.removeprefix(label).split()
        while words:
            value = words.pop(0)
            change = words.pop(0) if words and words[0][0] in "+-" and value[0] not in "+-" else ""
            cells.append((value, change))
        rows[label] = cells
    return lines[at].split(), rows


def amount(change):
    """+537M -> 537000000."""
    sign, number, unit = re.fullmatch(r"([+-])([\d.,]+)([KMB]?)", change).groups()
    return float(sign + number.replace(",", "")) * UNITS[unit]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([], id="plain"),
        pytest.param(["model.match_params_to=diff_v2"], id="matched", marks=pytest.mark.slow),
    ],
)
def test_every_cell_is_a_value_and_its_change_or_an_equals_sign(capsys, extra):
    overrides = ["model=dense_7b", "seq_len=4096", *extra]
    names, rows = parse(printed(capsys, f"--compare={','.join(FIVE)}", *overrides))
    assert names == list(FIVE)
    counts = [counts_of(name, *overrides) for name in FIVE]
    expected = {
        name: [c["by_component"][name] for c in counts]
        for name in (*PARTS, *REST)
        if name != "sink"
    }
    expected |= {
        "attention": [c["attention_params"] for c in counts],
        "total": [c["total_params"] for c in counts],
        "active": [c["active_params"] for c in counts],
        "without embedding": [c["non_embedding_params"] for c in counts],
        "ffn_dim": [c["ffn_dim"] for c in counts],
        "KV bytes a token": [c["kv_cache_bytes_per_token"] for c in counts],
    }
    flops = rows.pop("MFLOPs a token")
    over = rows.pop("over target", None)
    assert list(rows) == [label for label in LABELS if label in expected]
    for label, numbers in expected.items():
        first = numbers[0]
        assert rows[label][0] == (f"{first:,}", "")
        for number, (value, change) in zip(numbers[1:], rows[label][1:], strict=True):
            if number == first:
                assert (value, change) == ("=", ""), label
            else:
                assert value == f"{number:,}", label
                assert amount(change) == pytest.approx(number - first, rel=0.005), label
    for each, (value, change) in zip(counts, flops, strict=True):
        assert value == f"{each['flops_per_token'] / 1e6:,.1f}"
        if each is not counts[0]:
            more = 100 * (each["flops_per_token"] / counts[0]["flops_per_token"] - 1)
            assert change == f"{more:+.1f}%"
    if extra:
        target = counts_of("diff_v2", "model=dense_7b")["total_params"]
        assert over == [(f"{100 * (c['total_params'] / target - 1):+.3f}%", "") for c in counts]
    else:
        assert over is None


def test_the_parts_sum_to_the_totals(capsys):
    _, rows = parse(printed(capsys, "--compare", "standard_sink,diff_v1,diff_v2", "model=tiny"))

    def number(label, column):
        value, _ = rows[label][column]
        return number(label, 0) if value == "=" else int(value.replace(",", ""))

    for column in range(3):
        inside = sum(number(label, column) for label in PARTS if label in rows)
        assert inside == number("attention", column)
        assert inside + sum(number(label, column) for label in REST) == number("total", column)
    assert [value for value, _ in rows["sink"]] == ["8", "0", "0"]


def test_what_no_variant_has_is_no_row(capsys):
    _, rows = parse(printed(capsys, "--compare", "standard,gated", "model=tiny"))
    assert "head norms" not in rows
    assert "sink" not in rows
    assert rows["lambda/gate"] == [("0", ""), ("32,768", "+32.8K")]


@pytest.mark.parametrize(
    "words", [["--compare", "standard,diff_v2"], ["--compare=standard,diff_v2"]]
)
def test_json_maps_variants_to_their_counts(capsys, words):
    overrides = ["model=tiny", "model.match_params_to=gated"]
    given = json.loads(printed(capsys, *overrides, *words, "--json"))
    assert list(given) == ["standard", "diff_v2"]
    for name, counts in given.items():
        assert counts == counts_of(name, *overrides)
        assert sum(counts["by_component"].values()) == counts["total_params"]
        assert counts["matched"]["target"] == "gated"


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (5, "+5"),
        (-1408, "-1,408"),
        (9999, "+9,999"),
        (-10_000, "-10K"),
        (24_576, "+24.6K"),
        (999_499, "+999K"),
        (999_500, "+1M"),
        (-536_870_912, "-537M"),
        (999_600_000, "+1B"),
        (1_073_741_824, "+1.07B"),
    ],
)
def test_differences_are_short(difference, text):
    assert short_difference(difference) == text
    assert len(text) <= 6


# What is refused


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--compare"], ["--compare", "two or more"]),
        (["--compare", "standard"], ["--compare=standard", "two or more"]),
        (["--compare", "standard,", "gated"], ["--compare=standard,", "no space"]),
        (["--compare", "standard,diff_v3"], ["diff_v3", "did you mean diff_v2?", "gated"]),
        (["--compare", "gated,gated"], ["gated,gated", "two or more different"]),
        (["--compare", "a,b", "--compare=c,d"], ["--compare", "two or more different"]),
        (["--compare", "standard,gated", "attention=gated"], ["attention=gated", "drop one"]),
        (
            ["--compare", "standard,diff_v1", "model.n_heads=3", "model.n_kv_heads=3"],
            ["diff_v1: model.n_heads=3 must be even"],
        ),
        (["--compare", "standard,gated", "model.match_params_to=gatd"], ["did you mean gated?"]),
        (["--comapre", "standard,gated"], ["--comapre"]),
    ],
)
def test_a_wrong_comparison_is_one_line_and_exit_code_2(capsys, words, named):
    assert tools.main(["count", "model=tiny", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert all(part in err for part in named), err
