"""What a model costs: against totals from the shapes, for every size and variant."""

import json

import pytest

from diffllm import build_model, load_config, tools
from diffllm.config import config_directory
from diffllm.model.groups import GROUPS, group_of
from diffllm.tools.count import count

SIZES = sorted(path.stem for path in (config_directory() / "model").glob("*.yaml"))
VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
KEYS = {
    "total_params",
    "active_params",
    "non_embedding_params",
    "flops_per_token",
    "kv_cache_bytes_per_token",
    "by_group",
}


def config(size, variant, *extra):
    return load_config([f"model={size}", f"attention={variant}", "data.vocab_size=512", *extra])


def attention_shapes(m, variant):
    """(inputs, outputs) of every matrix of one attention layer, and its vectors' lengths."""
    width = m.n_heads * m.head_dim
    matrices = [(m.dim, width), (m.dim, m.n_kv_heads * m.head_dim), (width, m.dim)]
    matrices.append(matrices[1])
    vectors = []
    if variant == "gated":
        matrices.append((m.dim, width))
    elif variant == "diff_v1":
        vectors = [m.head_dim] * 4 + [2 * m.head_dim]
    elif variant == "diff_v2":
        matrices[0] = (m.dim, 2 * width)
        matrices.append((m.dim, m.n_heads))
    return matrices, vectors


def expected_counts(m, variant, seq_len):
    matrices, vectors = attention_shapes(m, variant)
    layer_matrices = sum(a * b for a, b in matrices) + 3 * m.dim * m.ffn_dim
    layer = layer_matrices + sum(vectors) + 2 * m.dim
    table = m.vocab_size * m.dim
    tables = table if m.tie_embeddings else 2 * table
    total = m.n_layers * layer + m.dim + tables
    # Every matrix is used in 1 forward and 2 backward products of 2 operations; the embedding is
    # looked up. A query sees as many keys as its position, (T + 1) / 2 on average, in q k and in
    # weights times v; diff_v1's values are twice as wide, diff_v2 has twice the query heads.
    keys = sum(range(1, seq_len + 1)) / seq_len
    qk = av = m.n_heads * m.head_dim
    if variant == "diff_v1":
        av *= 2
    elif variant == "diff_v2":
        qk, av = 2 * qk, 2 * av
    flops = 3 * 2 * (m.n_layers * (layer_matrices + keys * (qk + av)) + table)
    return {
        "total_params": total,
        "active_params": total,
        "non_embedding_params": total - table,
        "flops_per_token": pytest.approx(flops, rel=1e-12),
        "kv_cache_bytes_per_token": m.n_layers * 2 * m.n_kv_heads * m.head_dim * 2,
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_equal_those_from_the_shapes(size, variant):
    cfg = config(size, variant, "seq_len=4096")
    counts = count(cfg)
    groups = counts.pop("by_group")
    assert counts == expected_counts(cfg.model, variant, 4096)
    assert sum(groups.values()) == counts["total_params"]
    assert set(groups) <= set(GROUPS)


@pytest.mark.parametrize("seq_len", [1, 2, 511, 8192])
def test_flops_follow_the_sequence_length(seq_len):
    for variant in VARIANTS:
        cfg = config("tiny", variant, f"seq_len={seq_len}")
        expected = expected_counts(cfg.model, variant, seq_len)
        assert count(cfg)["flops_per_token"] == expected["flops_per_token"]


@pytest.mark.parametrize(
    ("size", "params"),
    [("small_125m", 125e6), ("base_350m", 350e6), ("dense_1p3b", 1.3e9), ("dense_3b", 3e9)],
)
def test_sizes_are_near_their_names(size, params):
    assert count(config(size, "standard"))["total_params"] == pytest.approx(params, rel=0.05)


@pytest.mark.parametrize("size", SIZES)
def test_kv_cache_is_the_baselines_to_the_byte(size):
    cost = {v: count(config(size, v))["kv_cache_bytes_per_token"] for v in VARIANTS}
    assert len(set(cost.values())) == 1


def test_what_variants_add_to_the_baseline_is_what_the_papers_say():
    totals = {v: count(config("dense_1p3b", v))["total_params"] for v in VARIANTS}
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_counting_builds_the_same_parameters_as_building(variant):
    cfg = config("tiny", variant)
    params = dict(build_model(cfg.model).named_parameters())
    counts = count(cfg)
    assert counts["total_params"] == sum(p.numel() for p in params.values())
    for group, total in counts["by_group"].items():
        assert total == sum(p.numel() for n, p in params.items() if group_of(n) == group)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("tok_embeddings.weight", "embedding"),
        ("output.weight", "output"),
        ("norm.weight", "norm"),
        ("layers.0.attention_norm.weight", "norm"),
        ("layers.11.ffn_norm.weight", "norm"),
        ("layers.0.attention.wq.weight", "attention"),
        ("layers.0.attention.wo.weight", "attention"),
        ("layers.0.attention.w_gate.weight", "attention"),
        ("layers.0.attention.q_norm.weight", "norm"),
        ("layers.0.attention.head_norm.weight", "norm"),
        ("layers.0.attention.lambda_q1", "lambda"),
        ("layers.0.attention.lambda_k2", "lambda"),
        ("layers.0.attention.w_lambda.weight", "lambda"),
        ("layers.0.ffn.w2.weight", "ffn"),
        ("layers.0.ffn.router.weight", "router"),
        ("layers.0.ffn.experts.w1", "ffn"),
        ("layers.0.ffn.shared.w3.weight", "ffn"),
    ],
)
def test_groups_of_the_stable_parameter_names(name, group):
    assert group_of(name) == group


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
    assert "standard / tiny" in out
    for key in ("total_params", "non_embedding_params", "kv_cache_bytes_per_token"):
        assert f"{counts[key]:,}" in out


def test_a_wrong_choice_is_one_line_and_exit_code_2(capsys):
    assert tools.main(["count", "model=huge"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: model=huge does not exist; choose from ")
    assert len(err.splitlines()) == 1
