"""All attention YAMLs at small shapes."""

from copy import deepcopy
from functools import cache

from diffllm import build_model, load_config
from diffllm.config import TrainConfig
from diffllm.config.plugins import config_directory
from diffllm.core.errors import ConfigError
from diffllm.model import Transformer

VARIANTS = sorted(path.stem for path in (config_directory() / "attention").glob("*.yaml"))
SHAPES = [(4, 4, 8), (4, 2, 16), (8, 2, 8), (4, 1, 8)]  # MHA, GQA, GQA, MQA

MIXTURE = (
    "model.moe.n_experts=4",
    "model.moe.top_k=2",
    "model.moe.expert_dim=16",
    "model.moe.n_shared=1",
    "model.moe.score=sigmoid",
    "model.moe.routed_scaling=1.5",
)
LOSSES = (
    "model.moe.balance_loss=0.1",
    "model.moe.balance_over=sequence",
    "model.moe.router_z_loss=0.01",
)
"""Overrides for a mixture of experts with router losses."""


@cache
def cached_config(variant, extra) -> TrainConfig:
    """Cache composed configs, because composing takes longer than most tests."""
    return load_config(
        [
            "model=tiny",
            f"attention={variant}",
            "model.head_dim=8",
            "model.dim=24",
            "model.ffn_dim=32",
            "model.vocab_size=64",
            "model.init_std=0.3",
            "seq_len=32",
            *extra,
        ]
    )


def small_config(variant, heads=4, kv_heads=2, head_dim=8, extra=()) -> TrainConfig:
    cfg = deepcopy(cached_config(variant, extra))
    cfg.model.n_heads, cfg.model.n_kv_heads, cfg.model.head_dim = heads, kv_heads, head_dim
    cfg.validate()
    return cfg


def small_model(variant, heads=4, kv_heads=2, head_dim=8, extra=()) -> Transformer:
    """Build a model in float64, including RoPE tables and constants."""
    model = build_model(small_config(variant, heads, kv_heads, head_dim, extra).model).double()
    model.reset_parameters()
    return model


def is_refused(variant, heads, kv_heads):
    """Return whether the variant refuses these head counts."""
    cached_config(variant, ())  # must not raise
    try:
        small_config(variant, heads, kv_heads)
    except ConfigError:
        return True
    return False


def allowed(variants, shapes):
    """List (variant, shape) of all supported combinations."""
    return [(v, shape) for v in variants for shape in shapes if not is_refused(v, *shape[:2])]
