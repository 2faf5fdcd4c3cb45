"""Rotary embedding: frequencies of all scalings against transformers."""

import math

import pytest
import torch
from tiers import pairs
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffllm.model.rope import (
    RopeConfig,
    RopeScaling,
    RotaryEmbedding,
    YarnRamp,
    apply_rope,
    frequencies,
    with_rounded_ramp,
)

SCALINGS = {
    "linear": [{"factor": 4.0}, {"factor": 1.0}],
    "llama3": [
        {"factor": 8.0, "original_seq_len": 8192},
        {"factor": 32.0, "original_seq_len": 1024, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
        {"factor": 2.0, "original_seq_len": 16},
    ],
    "yarn": [
        {"factor": 16.0, "original_seq_len": 4096},
        {"factor": 4.0, "original_seq_len": 64, "beta_fast": 8.0, "beta_slow": 2.0},
        {"factor": 2.0, "original_seq_len": 2048, "attention_factor": 1.3},
        {"factor": 2.0, "original_seq_len": 7},  # less than one turn for every channel pair
        {"factor": 4.0, "original_seq_len": 4096, "yarn_ramp": YarnRamp.exact},
        {"factor": 4.0, "original_seq_len": 7, "yarn_ramp": YarnRamp.exact},
        {"factor": 8.0, "original_seq_len": 10**8},  # more than one turn for every channel pair
    ],
}
CASES = [(name, fields) for name, cases in SCALINGS.items() for fields in cases]


def theirs(scaling, fields, theta, head_dim):
    """Return frequencies and the factor on cos and sin of transformers, float32."""
    names = {"original_seq_len": "original_max_position_embeddings"}
    parameters = {"rope_type": scaling, "rope_theta": theta, "low_freq_factor": 1.0}
    parameters |= {"high_freq_factor": 4.0} if scaling == "llama3" else {}
    parameters |= {names.get(name, name): value for name, value in fields.items()}
    if parameters.pop("yarn_ramp", None):
        parameters["truncate"] = False
    if scaling != "llama3":
        del parameters["low_freq_factor"]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=1 << 17,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("case", "theta", "head_dim"), pairs(CASES, [10_000.0, 500_000.0], [16, 64, 128])
)
def test_rope_frequencies_and_tables_match_transformers_library(case, theta, head_dim):
    scaling, fields = case
    cfg = RopeConfig(theta=theta, scaling=RopeScaling[scaling], **fields)
    expected, factor = theirs(scaling, fields, theta, head_dim)
    ours = frequencies(cfg, head_dim)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.float(), expected, rtol=2e-6, atol=0)
    tables = RotaryEmbedding(head_dim, 8, cfg)
    tables.reset_parameters()
    angles = torch.outer(torch.arange(8.0), expected).repeat(1, 2).unsqueeze(1)
    torch.testing.assert_close(tables.cos, angles.cos() * factor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tables.sin, angles.sin() * factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("theta", "length"), [(5e5, 8192), (1e3, 8192), (100.0, 8192), (1e4, 10**6)]
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_yarn_of_olmo_core_ends_at_last_pair_and_exports_equal_config(theta, length, head_dim):
    def last(turns):
        return head_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(last(32)), 0), min(math.ceil(last(1)), head_dim // 2 - 1)
    expected = []
    for index in range(head_dim // 2):
        share = min(max((index - low) / max(high - low, 1e-3), 0), 1)
        expected.append(theta ** (-2 * index / head_dim) * (share / 8 + 1 - share))
    fields = {"theta": theta, "scaling": RopeScaling.yarn, "factor": 8, "original_seq_len": length}
    cfg = RopeConfig(**fields, yarn_ramp=YarnRamp.olmo_core)
    found = frequencies(cfg, head_dim)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    other = with_rounded_ramp(cfg, head_dim)
    assert other.yarn_ramp is YarnRamp.transformers
    assert torch.equal(frequencies(other, head_dim), found)
    plain = torch.equal(frequencies(RopeConfig(**fields), head_dim), found)
    assert plain is (math.ceil(last(1)) < head_dim // 2 or low == high)


def test_interleaved_rope_equals_rotate_half_rope_after_channel_reordering():
    """docs/interop.md converts query and key weights of the papers by this reordering."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 3, 16, generator=generator, dtype=torch.float64)
    angles = torch.outer(torch.arange(8.0, dtype=torch.float64), frequencies(RopeConfig(), 16))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * angles)[:, None]
    expected = torch.view_as_real(turned).flatten(
        -2
    )  # interleaved layout: rotates channels 2c and 2c + 1
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    both = angles.repeat(1, 2).unsqueeze(1)
    found = apply_rope(x[..., order], (both.cos(), both.sin()))
    torch.testing.assert_close(found, expected[..., order], rtol=0, atol=1e-14)
