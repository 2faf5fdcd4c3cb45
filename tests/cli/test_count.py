"""Counts of parameters and FLOPs compared with the equations, and output of `diffllm count`."""

import json
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
from diffllm.cli.count import count
from diffllm.config.compose import variant_config
from diffllm.core.errors import ConfigError
from diffllm.model.stats import PARAMETER_GROUPS, group_of

FAST = ["tiny", "base_350m", "moe_mini"]


def count_config(size, variant, *extra):
    return load_config([f"model={size}", f"attention={variant}", "data.vocab_size=512", *extra])


def expected_counts(m, variant, seq_len, keys=None):
    total = total_params(m, variant, width_of(m))
    return {
        "total_params": total,
        "active_params": active_params(m, variant),
        "non_embedding_params": total - m.vocab_size * m.dim,
        "attention_params": m.n_layers * sum(sizes(attention(m, variant)).values()),
        "ffn_dim": m.ffn_dim,
        "expert_dim": m.moe.expert_dim if m.moe.n_experts else None,
        "flops_per_token": pytest.approx(flops_per_token(m, variant, seq_len, keys), rel=1e-12),
        "kv_cache_bytes_per_token": m.n_layers * 2 * m.n_kv_heads * m.head_dim * 2,
        "by_component": components(m, variant),
        "matched": None,
    }


@cache
def of_size(size):
    return count_config(size, "standard", "seq_len=4096")


attention_of = cache(variant_config)


@pytest.mark.parametrize("size", slow_but(FAST, SIZES))
def test_parameter_and_flop_counts_of_variants_match_independent_calculation(size):
    standard = of_size(size)
    for variant in VARIANTS:
        model = replace(standard.model, attention=attention_of(variant))
        cfg = replace(standard, model=model)
        if not has_shape(model, variant):
            with pytest.raises(ConfigError, match="must be"):
                cfg.validate()
            continue
        counts = count(cfg)
        groups = counts.pop("by_group")
        assert counts == expected_counts(model, variant, 4096), variant
        assert sum(groups.values()) == counts["total_params"], variant
        assert set(groups) <= set(PARAMETER_GROUPS), variant


@pytest.mark.parametrize(
    ("size", "params"),
    [
        *(("small_125m", 125e6), ("base_350m", 350e6), ("dense_1p3b", 1.3e9)),
        *(("moe_mini", 30e6), ("moe_1b", 1e9)),
    ],
)
def test_parameter_count_matches_size_in_model_name_within_5_percent(size, params):
    assert count(of_size(size))["total_params"] == pytest.approx(params, rel=0.05)


@pytest.mark.parametrize(
    ("size", "billions"),
    [("830m", 0.834), ("1p4b", 1.413), ("2p8b", 2.773), ("6p8b", 6.853), ("13p1b", 13.096)],
)
def test_parameters_of_each_size_of_diff_v1_study_are_12_dim_squared_per_layer(size, billions):
    """The paper's widths and layers give 12 dim^2 per layer and one embedding of 100,288 rows."""
    cfg = count_config(f"dense_{size}", "standard")
    equation = 12 * cfg.model.dim**2 * cfg.model.n_layers + 100_288 * cfg.model.dim
    assert round(equation / 1e9, 3) == billions
    counts = count(cfg)
    assert round(counts["total_params"] / 1e9, 3) == billions
    paired = count(count_config(f"dense_{size}", "diff_v1"))["total_params"]
    assert paired - counts["total_params"] == 6 * cfg.model.head_dim * cfg.model.n_layers


def test_moe_30a3_has_published_total_and_active_parameter_counts():
    """Qwen3-30B-A3B has 30.53B total and 3.35B active parameters, including embeddings."""
    counts = count(count_config("moe_30a3", "standard"))
    assert counts["total_params"] == pytest.approx(30.53e9, abs=0.005e9)
    assert counts["active_params"] == pytest.approx(3.35e9, abs=0.005e9)


def test_moe_parameter_count_includes_shared_experts_and_dense_layers():
    extra = ("model.moe.n_shared=2", "model.moe.n_dense_layers=1", "model.tie_embeddings=true")
    cfg = count_config("moe_tiny", "diff_v2", *extra)
    counts = count(cfg)
    counts.pop("by_group")
    assert counts == expected_counts(cfg.model, "diff_v2", cfg.seq_len)
    expert, dense = 3 * 128 * 128, 3 * 128 * 384
    assert counts["by_component"]["ffn"] == dense + (8 + 2) * expert
    assert counts["by_component"]["router"] == 8 * 128
    assert counts["total_params"] - counts["active_params"] == (8 - 2) * expert


@pytest.mark.parametrize("size", slow_but(["base_350m"], SIZES))
def test_diff_v2_saves_expected_fraction_of_attention_parameters(size):
    """The share is H / (4H + 2K), because wo has H heads instead of 2H."""
    cfg = count_config(size, "diff_v2")
    h, k = cfg.model.n_heads, cfg.model.n_kv_heads
    diff_v2 = count(cfg)
    plain = count(count_config(size, "standard", "model.attention.query_heads=2.0"))
    lambdas = diff_v2["by_component"]["lambda/gate"]
    norms = diff_v2["by_component"]["head norms"]  # QK norms, in both models
    assert norms == plain["by_component"]["head norms"]
    saved = plain["attention_params"] - (diff_v2["attention_params"] - lambdas)
    assert Fraction(saved, plain["attention_params"] - norms) == Fraction(h, 4 * h + 2 * k)
    assert diff_v2["by_component"]["wq"] == plain["by_component"]["wq"]
    if has_shape(cfg.model, "standard_1p5x_heads"):
        wider = count(count_config(size, "standard_1p5x_heads"))
        assert wider["attention_params"] == diff_v2["attention_params"] - lambdas


def test_parameter_count_differences_between_variants_match_paper():
    variants = ("standard", "gated", "diff_v1", "diff_v2")
    totals = {v: count(count_config("dense_1p3b", v))["total_params"] for v in variants}
    layers, dim, heads, width = 24, 2048, 16, 128
    assert totals["diff_v1"] - totals["standard"] == layers * (4 * width + 2 * width)
    assert totals["diff_v2"] - totals["standard"] == layers * dim * (heads * width + heads)
    assert totals["gated"] - totals["standard"] == layers * dim * heads * width


@pytest.mark.parametrize("variant", slow_but(families(VARIANTS), VARIANTS))
def test_parameter_count_matches_built_model(variant):
    cfg = count_config("tiny", variant)
    params = dict(build_model(cfg.model).named_parameters())
    counts = count(cfg)
    assert counts["total_params"] == sum(p.numel() for p in params.values())
    for group, total in counts["by_group"].items():
        assert total == sum(p.numel() for n, p in params.items() if group_of(n) == group)


@pytest.mark.parametrize("variant", families(VARIANTS))
def test_flop_count_uses_visible_keys_from_config_if_documents_are_masked(variant):
    words = ("seq_len=4096", "data.mask_documents=true", "data.visible_keys=2.5")
    cfg = count_config("tiny", variant, *words)
    counts = count(cfg)
    del counts["by_group"]
    assert counts == expected_counts(cfg.model, variant, 4096, keys=2.5)
    whole = count(count_config("tiny", variant, *words[:2]))
    unmasked = count(count_config("tiny", variant, words[0]))
    assert whole["flops_per_token"] == unmasked["flops_per_token"]


@pytest.mark.parametrize(
    ("size", "variant", "flops"),
    [
        ("dense_1p3b", "standard", 8405680128),
        ("dense_7b", "standard", 38051512320),
        ("dense_7b", "diff_v2", 44519915520),
        ("moe_30a3", "diff_v1", 25499467776),
    ],
)
def test_flop_count_without_document_mask_matches_reference(size, variant, flops):
    assert count(count_config(size, variant, "seq_len=4096"))["flops_per_token"] == flops


def test_count_command_shows_visible_keys_if_documents_are_masked(output_of, snapshot):
    masked = ["count", "model=tiny", "data.mask_documents=true"]
    assert output_of(*masked) == snapshot(name="unknown keys")
    assert output_of(*masked, "data.visible_keys=100.5") == snapshot(name="100.5 keys")
    assert output_of(*masked[:2]) == snapshot(name="no masks")


def test_count_command_json_output_contains_all_counts(output_of):
    argv = ["count", "model=dense_7b", "attention=diff_v1", "seq_len=2048", "--json"]
    printed = json.loads(output_of(*argv))
    assert printed == count(count_config("dense_7b", "diff_v1", "seq_len=2048"))


def test_count_command_json_output_describes_parameter_matching(output_of):
    words = ["count", "model=tiny", "attention=standard", "model.match_params_to=diff_v2"]
    counts = json.loads(output_of(*words, "--json"))
    target = count(count_config("tiny", "diff_v2"))
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


# --compare


def test_count_command_compares_other_variants_with_first_variant(output_of, snapshot):
    words = ("--compare=standard_sink,diff_v2", "model=tiny", "model.match_params_to=diff_v2")
    assert output_of("count", *words, quiet=True) == snapshot


def test_count_command_json_output_contains_counts_of_compared_variants(output_of):
    overrides = ["model=tiny", "model.match_params_to=gated"]
    words = ["count", *overrides, "--compare", "standard,diff_v2", "--json"]
    counts_by_variant = json.loads(output_of(*words, quiet=True))
    assert list(counts_by_variant) == ["standard", "diff_v2"]
    for name, counts in counts_by_variant.items():
        assert counts == count(load_config([f"attention={name}", *overrides]))
        assert sum(counts["by_component"].values()) == counts["total_params"]
        assert counts["matched"]["target"] == "gated"


# Invalid arguments


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--compare", "standard"], ["--compare=standard", "at least two variants"]),
        (["--compare", "standard,", "gated"], ["--compare=standard,", "at least two variants"]),
        (["--compare", "standard,diff_v3"], ["diff_v3", "did you mean diff_v2?", "gated"]),
        (["--compare", "gated,gated"], ["gated,gated", "at least two variants"]),
        (["--compare", "a,b", "--compare=c,d"], ["--compare", "at least two variants"]),
        (["--compare", "standard,gated", "attention=gated"], ["attention=gated", "remove one"]),
        (
            ["--compare", "standard,diff_v1", "model.n_heads=3", "model.n_kv_heads=3"],
            ["model.n_heads=3 must be even"],
        ),
    ],
)
def test_count_command_prints_error_for_invalid_compare_argument(error_of, words, named):
    error = error_of("count", "model=tiny", *words)
    assert all(part in error for part in named), error
