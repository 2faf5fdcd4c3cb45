"""`model.match_params_to`: totals compared with the equations, width with an exhaustive search."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from equations import SIZES, VARIANTS, flops_per_token, has_shape, total_params, width_of
from tiers import slow_but

from diffllm import build_model, load_config
from diffllm.config.compose import variant_config
from diffllm.config.matching import MODULI, match, widened
from diffllm.core.errors import ConfigError
from diffllm.model.attention.masks import Documents

cached_variant = cache(variant_config)


@cache
def shape(size):
    return load_config([f"model={size}", "attention=standard", "data.vocab_size=512"]).model


def matched_ffn(model, own, target):
    model = replace(model, attention=cached_variant(own))
    return match(model, target, cached_variant(target))


def by_trying(model, own, target):
    """Return (modulus, smallest difference) for the largest modulus within 0.5% of the target.

    The modulus is None for an unchanged width, and 0 if no modulus is within 0.5%.
    """
    start = width_of(model)
    wanted = total_params(model, target, start)
    if total_params(model, own, start) == wanted:
        return None, 0
    for modulus in (64, 32, 16, 8):
        widths = range(modulus, 3 * start + 1000, modulus)
        closest = min(abs(total_params(model, own, width) - wanted) for width in widths)
        if closest * 200 <= wanted:
            return modulus, closest
    return 0, closest


@pytest.mark.parametrize("size", slow_but(["tiny", "moe_mini"], SIZES))
@pytest.mark.parametrize(
    "target", slow_but(["diff_v2"], ["diff_v2", "standard_1p5x_heads", "gated"])
)
def test_ffn_dim_for_equal_parameters_matches_exhaustive_search(size, target):
    model = shape(size)
    if not has_shape(model, target):
        with pytest.raises(ConfigError, match=rf"^model\.match_params_to={target}: model\.atten"):
            matched_ffn(model, "standard", target)
        return
    own_variants = [variant for variant in VARIANTS if has_shape(model, variant)]
    assert len(own_variants) >= 16
    for own in own_variants:
        modulus, closest = by_trying(model, own, target)
        if modulus == 0:  # a change of 8 in all experts exceeds 0.5%
            assert model.moe.n_experts
            assert size != "moe_30a3"
            with pytest.raises(ConfigError, match=r"no model\.\S+ gives"):
                matched_ffn(model, own, target)
            continue
        found = matched_ffn(model, own, target)
        wanted = total_params(model, target, width_of(model))
        assert (found.target, found.target_params) == (target, wanted)
        assert found.target_ffn_dim == width_of(model)
        assert found.params == total_params(model, own, found.ffn_dim)
        assert abs(found.params - wanted) <= 0.005 * wanted
        assert abs(found.params - wanted) == closest
        assert found.ffn_dim > 0
        if modulus is None:
            assert found.ffn_dim == width_of(model)
        else:
            assert found.ffn_dim % modulus == 0


@pytest.mark.parametrize("size", slow_but(["tiny", "moe_mini"], SIZES))
@pytest.mark.parametrize("target", ["diff_v2", "standard"])
def test_ffn_dim_for_equal_flops_matches_exhaustive_search(size, target):
    model, start = replace(shape(size), seq_len=256), width_of(shape(size))
    wanted = flops_per_token(model, target, 256)
    for own in ("standard", "gated", "diff_v2", "standard_2x_heads"):
        mine = replace(model, attention=cached_variant(own))

        def off(width, own=own, mine=mine):
            return abs(flops_per_token(widened(mine, width), own, 256) - wanted)

        widths = {n: range(n, 3 * start + 1000, n) for n in MODULI}
        closest = {n: min(map(off, tried)) for n, tried in widths.items()}
        reached = [n for n in MODULI if 200 * closest[n] <= wanted]
        if off(start) and not reached:
            with pytest.raises(
                ConfigError, match=r"gives .* FLOPs per token with an error of at most 0\.5%"
            ):
                match(mine, target, cached_variant(target), cost="flops")
            continue
        found = match(mine, target, cached_variant(target), cost="flops")
        assert (found.by, found.target_params) == ("flops", total_params(model, target, start))
        assert found.target_flops == pytest.approx(wanted, rel=1e-12)
        assert found.flops == pytest.approx(
            flops_per_token(widened(mine, found.ffn_dim), own, 256), rel=1e-12
        )
        assert found.params == total_params(model, own, found.ffn_dim)
        assert found.difference_percent == pytest.approx(100 * (found.flops / wanted - 1))
        assert off(found.ffn_dim) == (closest[reached[0]] if off(start) else 0)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_number_of_visible_keys_matches_direct_count(packing):
    lengths, seq_len = {5: 3, 16: 2, 3: 2, 43: 1}, 16  # 96 tokens fill 6 sequences
    documents = [n for n, number in lengths.items() for _ in range(number)]
    tokens = torch.cat([torch.tensor([1] * (n - 1) + [0]) for n in documents])
    if packing == "stream":
        rows = torch.cat([tokens.roll(i).view(-1, seq_len) for i in range(seq_len)])
        counted = Documents.of(rows, 0).visible_keys() / rows.numel()
    else:
        counted = sum(i % seq_len + 1 for n in documents for i in range(n)) / len(tokens)
    words = [f"seq_len={seq_len}", f"data.packing={packing}", "data.mask_documents=true"]
    cfg = load_config(["model=tiny", *words, f"data.document_lengths={lengths}"])
    assert cfg.visible_keys == pytest.approx(float(counted), rel=1e-6)


def test_flop_match_accepts_document_lengths_or_visible_keys():
    words = ["model=tiny", "attention=standard", "seq_len=512", "data.mask_documents=true"]
    words.append("model.match_flops_to=diff_v2")
    stated = load_config([*words, "data.document_lengths={40: 3, 300: 1}"])
    keys = stated.visible_keys
    assert stated.model == load_config([*words, f"data.visible_keys={keys}"]).model
    assert 20.5 < keys < 256.5


def test_ffn_dim_for_equal_flops_depends_on_number_of_visible_keys():
    words = ["model=base_350m", "attention=standard", "model.match_flops_to=diff_v2"]
    masked = [*words, "seq_len=4096", "data.mask_documents=true"]
    found = {}
    for keys in (100, 2048.5):
        cfg = load_config([*masked, f"data.visible_keys={keys}"])
        own, target = (
            flops_per_token(widened(cfg.model, width), variant, 4096, keys)
            for variant, width in (
                ("standard", cfg.model.ffn_dim),
                ("diff_v2", cfg.resolved.matched.target_ffn_dim),
            )
        )
        assert cfg.resolved.matched.flops == pytest.approx(own, rel=1e-12)
        assert cfg.resolved.matched.target_flops == pytest.approx(target, rel=1e-12)
        assert own == pytest.approx(target, rel=0.005)
        found[keys] = cfg.model.ffn_dim
    assert found[2048.5] == load_config([*words, "seq_len=4096"]).model.ffn_dim
    assert found[100] < 0.9 * found[2048.5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.mask_documents=true", "model.match_flops_to=diff_v2"],
            "model.match_flops_to=diff_v2 with data.mask_documents=true needs "
            "the mean number of tokens that a query sees; set data.document_lengths or "
            "data.visible_keys. A value for data.visible_keys is in summary.json of a run on this "
            "corpus. With data.visible_keys=32.5, FLOPs are counted without document masks",
        ),
        (["data.visible_keys=9"], "data.visible_keys=9.0 needs data.mask_documents=true"),
        (
            ["data.mask_documents=true", "data.visible_keys=33"],
            "data.visible_keys=33.0 must be at most 32.5, the mean number of visible keys "
            "without document masks",
        ),
        (
            ["data.mask_documents=true", "data.visible_keys=0.5"],
            "data.visible_keys=0.5 must be at least 1",
        ),
        (
            ["data.document_lengths={9: 1}"],
            "data.document_lengths={9: 1} needs data.mask_documents=true",
        ),
        (
            ["data.mask_documents=true", "data.visible_keys=2", "data.document_lengths={9: 1}"],
            "data.visible_keys=2.0 and data.document_lengths={9: 1} cannot be combined; remove one "
            "of them",
        ),
        (
            ["data.mask_documents=true", "data.document_lengths={9: 1, 0: 2}"],
            "data.document_lengths={0: 2} is invalid: the length in tokens and the number of "
            "documents must each be 1 to 1,000,000,000,000",
        ),
    ],
)
def test_error_for_invalid_visible_keys_mentions_the_config_key(words, message):
    with pytest.raises(ConfigError) as caught:
        load_config(["model=tiny", "attention=standard", "seq_len=64", *words])
    assert str(caught.value) == message


def test_config_with_both_parameter_match_and_flop_match_is_refused():
    both = ["model.match_params_to=diff_v2", "model.match_flops_to=diff_v2"]
    with pytest.raises(ConfigError, match="exclude each other"):
        load_config(["model=tiny", "attention=standard", *both])
    cfg = load_config(["model=tiny", "attention=standard", both[1]])
    assert "FLOPs per token, " in cfg.resolved.matched.text()
    assert cfg.model.ffn_dim == cfg.resolved.matched.ffn_dim > 384


def test_parameter_match_target_ignores_attention_overrides():
    words = ["model=mini", "attention=gated", "model.match_params_to=gated"]
    cfg = load_config([*words, "model.attention.gate=headwise"])
    yaml = load_config(["model=mini", "attention=gated"]).model
    assert cfg.resolved.matched.target_params == total_params(yaml, "gated", yaml.ffn_dim)
    assert cfg.resolved.matched.params == total_params(yaml, "gated_headwise", cfg.model.ffn_dim)
    assert cfg.model.ffn_dim > yaml.ffn_dim


def test_error_suggests_closest_ffn_dim_if_parameter_match_is_impossible():
    words = ["model=tiny", "attention=diff_v2", "model.match_params_to=standard"]
    with pytest.raises(ConfigError) as caught:
        load_config([*words, "model.ffn_dim=8"])
    model = load_config(["model=tiny"]).model
    closest = total_params(model, "diff_v2", 8)
    message = str(caught.value)
    assert message.startswith("model.match_params_to=standard: no model.ffn_dim gives")
    assert f"gives {total_params(model, 'standard', 8):,} parameters" in message
    assert f"The closest value, model.ffn_dim=8, gives {closest:,};" in message
    assert message.endswith("choose a config with a larger model.ffn_dim")
    load_config([*words, "model.ffn_dim=256"])


MIXTURE = ("model=moe_tiny", "model.moe.n_experts=2", "model.moe.expert_dim=256")


@pytest.mark.parametrize(
    ("words", "key", "before"),
    [(["model=tiny"], "ffn_dim", 384), ([*MIXTURE], "moe.expert_dim", 256)],
)
def test_parameter_match_changes_only_feed_forward_width_of_config(words, key, before):
    plain = load_config([*words, "attention=standard"])
    target = build_model(load_config([*words, "attention=diff_v2"]).model)
    wanted = sum(p.numel() for p in target.parameters())
    cfg = load_config([*words, "attention=standard", "model.match_params_to=diff_v2"])
    total = sum(p.numel() for p in build_model(cfg.model).parameters())
    assert total == pytest.approx(wanted, rel=0.005)
    found = cfg.resolved.matched
    assert key in found.text()
    assert (found.target, found.target_params, found.target_ffn_dim) == ("diff_v2", wanted, before)
    assert (found.key, found.params, found.ffn_dim) == (key, total, width_of(cfg.model))
    assert found.ffn_dim > before
    assert found.difference_percent == pytest.approx(100 * (total / wanted - 1))
    setattr(cfg.model.moe if "moe" in key else cfg.model, key.rpartition(".")[2], before)
    cfg.model.match_params_to, cfg.resolved.matched = None, None
    assert cfg == plain, "something else was changed"
