"""`model.init_match=write`: initial attention of any variant writes the RMS of `standard`."""

import pytest
import torch
from tiers import slow_but
from variants import MIXTURE, VARIANTS

from diffllm import load_config
from diffllm.config.compose import variant_config
from diffllm.core.errors import ConfigError
from diffllm.model import build_model
from diffllm.model.attention.masks import Documents
from diffllm.model.init_match import write_factors

WORDS = ["model=tiny", "model.dim=32", "model.head_dim=8", "model.ffn_dim=48", "seq_len=24"]
WORDS += ["model.vocab_size=64", "data.vocab_size=64", "model.n_layers=3"]


def writes(model, tokens, documents=None):
    """Return the RMS that attention adds to the residual stream in each layer."""
    return model(tokens, tokens, diagnose=True, documents=documents).stats["attn_write_rms"]


def model_config(variant, *words):
    return load_config([*WORDS, f"attention={variant}", *words]).model


def scaled_outputs(cfg, factors):
    model = build_model(cfg)
    with torch.no_grad():
        for layer, factor in zip(model.layers, factors, strict=True):
            layer.attention.wo.weight.mul_(factor)
    return model


CASES = [(variant, more) for variant in VARIANTS for more in ((), MIXTURE)]
FEW = [("diff_v1", ()), ("standard_half_context", ()), ("diff_v2", MIXTURE)]


@pytest.mark.parametrize(("variant", "more"), slow_but(FEW, CASES))
def test_init_match_sets_attention_output_rms_to_standard_attention_rms(variant, more):
    cfg, tokens = model_config(variant, *more), torch.randint(64, (8, 24))
    factors = write_factors(cfg, variant_config("standard"), tokens)
    expected = writes(build_model(model_config("standard", *more)), tokens)
    torch.testing.assert_close(
        writes(scaled_outputs(cfg, factors), tokens), expected, rtol=1e-5, atol=0
    )
    if variant == "standard":
        assert factors == [1.0, 1.0, 1.0]
    if variant == "standard_half_context":
        assert factors == pytest.approx([2.0, 2.0, 2.0], rel=1e-6)


def test_init_match_supports_masked_documents():
    cfg, tokens = model_config("diff_v2"), torch.randint(12, (8, 24))
    documents = Documents.of(tokens, 7)
    factors = write_factors(cfg, variant_config("standard"), tokens, documents)
    assert factors != write_factors(cfg, variant_config("standard"), tokens)
    expected = writes(build_model(model_config("standard")), tokens, documents)
    torch.testing.assert_close(
        writes(scaled_outputs(cfg, factors), tokens, documents), expected, rtol=1e-5, atol=0
    )


def test_init_match_raises_config_error_if_attention_output_is_zero(monkeypatch):
    cfg = model_config("standard")
    cfg.attention.context_scale = 1e-30
    with pytest.raises(
        ConfigError, match=r"layer 0: the RMS of the initial attention output is .* in the baseline"
    ):
        write_factors(cfg, variant_config("standard"), torch.randint(64, (8, 24)))
