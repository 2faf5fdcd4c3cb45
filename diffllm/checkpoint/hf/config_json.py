"""Read config.json of a Hugging Face model directory as a model config of diffllm.

The functions raise ValueError for unsupported settings. The error message does not contain the file
name; the caller of the function adds it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffllm.checkpoint.hf.layout import ARCHITECTURE, VARIANTS, kernel_settings
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.attention.diff_v1 import DiffV1Config
from diffllm.model.attention.diff_v2 import DiffV2Config
from diffllm.model.attention.standard import StandardConfig
from diffllm.model.config import ModelConfig
from diffllm.model.ffn.router import MoEConfig, Score
from diffllm.model.rope import RopeConfig, RopeScaling, YarnRamp, attention_factor

T = TypeVar("T")
COMPUTED_SETTINGS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "decoder_sparse_step": 1,
}
"""Settings that our decoders support with a single value."""
ROPES = {"default": RopeScaling.none, **{s.name: s for s in RopeScaling if s.name != "none"}}
ROPE_KEYS = (
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast", "attention_factor",
    "partial_rotary_factor", "truncate", "mscale", "mscale_all_dim",
)  # fmt: skip


# `type`, not `isinstance`: JSON's true is an int in Python.
def is_integer(value: Any) -> bool:
    return type(value) is int


def is_positive_integer(value: Any) -> bool:
    return type(value) is int and value > 0


def is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_positive_number(value: Any) -> bool:
    return is_finite_number(value) and value > 0


def is_list_of(item_type: type, value: Any) -> bool:
    return type(value) is list and all(type(item) is item_type for item in value)


VALUE_TYPES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "a whole number above 0": (
        is_positive_integer,
        (
            "head_dim",
            "hidden_size",
            "intermediate_size",
            "max_position_embeddings",
            "moe_intermediate_size",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "original_max_position_embeddings",
            "vocab_size",
        ),
    ),
    "a whole number": (is_integer, ("num_experts", "num_experts_per_tok", "num_local_experts")),
    "a finite number": (
        is_finite_number,
        (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "high_freq_factor",
            "initializer_range",
            "low_freq_factor",
            "rms_norm_eps",
            "rope_theta",
        ),
    ),
    "a number above 0": (is_positive_number, ("mscale", "mscale_all_dim")),
    "true or false": (
        lambda value: type(value) is bool,
        ("norm_topk_prob", "qk_norm", "tie_word_embeddings", "truncate"),
    ),
    "text": (lambda value: type(value) is str, ("rope_type", "type", "variant")),
    "an object": (
        lambda value: type(value) is dict,
        ("attention", "moe", "rope_parameters", "rope_scaling"),
    ),
    "a list of text": (partial(is_list_of, str), ("architectures", "layer_types")),
    "a list of whole numbers": (partial(is_list_of, int), ("mlp_only_layers",)),
}
"""Types of all settings that are read: name of the type to its test and its keys."""


class Config(dict[str, Any]):
    """Settings of a config.json file, except settings with the value null.

    The constructor raises ValueError if a value has the wrong type. `config[key]` raises ValueError
    if `key` is missing.
    """

    def __init__(self, content: dict[str, Any]):
        super().__init__({key: value for key, value in content.items() if value is not None})
        for kind, (is_kind, keys) in VALUE_TYPES.items():
            for key in self.keys() & keys:
                if not is_kind(self[key]):
                    raise ValueError(f"has {key}={self[key]!r}, which must be {kind}")
                # A JSON file can contain 1 in place of 1.0.
                if kind == "a finite number":
                    self[key] = float(self[key])

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"has no {key}")


def model_of(content: dict[str, Any]) -> tuple[str, ModelConfig]:
    """Return the name of the model class and the diffllm config for a parsed config.json.

    Raises ValueError or ConfigError for an unsupported class or setting.
    """
    config = Config(content)
    architectures = config["architectures"]
    name = architectures[0] if architectures else None
    if name not in READERS:
        raise ValueError(f"names the architecture {name}, which is not one of {', '.join(READERS)}")
    for key, computed in COMPUTED_SETTINGS.items():
        if config.get(key, computed) != computed:
            raise ValueError(f"has {key}={config[key]}, but only {computed} is supported")
    unsupported = set(config.get("layer_types", ())) - {"full_attention"}
    if unsupported:
        names = ", ".join(unsupported)
        raise ValueError(f"has layer_types {names}; only full_attention is supported")
    model = READERS[name](config)
    model.validate()
    return name, model


def shape_of(config: Config, attention: AttentionConfig, n_heads: int = 0) -> ModelConfig:
    """Build a diffllm model config from the config.json settings that all supported classes share.

    `n_heads` is the `n_heads` of the new config. If it is 0, use `num_attention_heads` of
    config.json.
    """
    dim = config["hidden_size"]
    heads = config["num_attention_heads"]
    # Defaults for missing settings are those of LlamaConfig.
    return ModelConfig(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads or heads,
        n_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", dim // heads),
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_len=config.get("max_position_embeddings", 2048),
        attention=attention,
        rope=rope_of(config),
        tie_embeddings=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        init_std=config.get("initializer_range", 0.02),
        init_seed=0,
    )


def llama(config: Config) -> ModelConfig:
    return shape_of(config, StandardConfig())


def qwen3(config: Config) -> ModelConfig:
    return replace(llama(Config({"head_dim": 128, **config})), qk_norm=True)


def qwen3_moe(config: Config) -> ModelConfig:
    dense = config.get("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise ValueError(f"has mlp_only_layers={dense}, but only the first layers may be dense")
    if "num_local_experts" in config:  # The key of transformers 5.
        config = Config({"num_experts": config["num_local_experts"], **config})
    moe = MoEConfig(
        n_experts=config["num_experts"],
        top_k=config.get("num_experts_per_tok", 8),
        expert_dim=config["moe_intermediate_size"],
        n_dense_layers=len(dense),
        score=Score.softmax,
        renormalise=config.get("norm_topk_prob", False),
        bias_update_rate=0.0,
    )
    return replace(qwen3(config), moe=moe)


def diffllama(config: Config) -> ModelConfig:
    config = Config({"rms_norm_eps": 1e-5, **config})  # The head norm has the same eps.
    return shape_of(config, DiffV1Config(head_norm_eps=config["rms_norm_eps"]))


def own(config: Config) -> ModelConfig:
    settings = dict(config["attention"])
    variant = Config(settings)["variant"]
    if variant not in VARIANTS:
        raise ValueError(f"has attention {variant}, which is not one of {', '.join(VARIANTS)}")
    # Older exports contain kernel settings.
    for key in ("variant", *kernel_settings(VARIANTS[variant])):
        settings.pop(key, None)
    attention = config_from_values(VARIANTS[variant], settings, "attention")
    heads = config["num_attention_heads"]
    n_heads: float = heads
    if isinstance(attention, DiffV1Config):
        # The class counts key and value heads in pairs of twice the width, see `own_layout`.
        single_heads = {
            "num_key_value_heads": 2 * config["num_key_value_heads"],
            "head_dim": config["head_dim"] // 2,
        }
        config = Config({**config, **single_heads})
    elif isinstance(attention, StandardConfig):
        n_heads = heads / attention.query_heads
    elif isinstance(attention, DiffV2Config):
        n_heads = heads / 2
    if n_heads != round(n_heads):
        raise ValueError(f"has num_attention_heads={heads}, which {variant} cannot have")
    moe = config_from_values(MoEConfig, config.get("moe", {}), "moe")
    shape = shape_of(config, attention, round(n_heads))
    return replace(shape, moe=moe, qk_norm=config.get("qk_norm", False))


READERS: dict[str, Callable[[Config], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "DiffLlamaForCausalLM": diffllama,
    ARCHITECTURE: own,
}


def rope_of(config: Config) -> RopeConfig:
    """Return the RoPE config of diffllm for a config.json of transformers 4 or 5."""
    settings = Config(config.get("rope_parameters") or config.get("rope_scaling", {}))
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError("has RoPE settings that differ by layer, which is not supported")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPES:
        raise ValueError(f"has RoPE of type {kind}, which is not one of {', '.join(ROPES)}")
    unknown = [key for key in settings if key not in ROPE_KEYS]
    if unknown:
        raise ValueError(f"has unknown RoPE settings: {', '.join(unknown)}")
    # transformers 4 reads the older keys, transformers 5 the newer: both must agree.
    older_scaling = Config(config.get("rope_scaling", {}))
    older_settings = {"rope_theta": config.get("rope_theta"), **older_scaling}
    newer_settings = {"type": kind, "rope_type": kind, **settings}
    for key, value in older_settings.items():
        if value is not None and newer_settings.get(key, value) != value:
            raise ValueError(f"has two values of {key}: {value} and {settings.get(key, kind)}")
    theta = config.get("rope_theta", 10_000.0)
    rope = RopeConfig(theta=settings.get("rope_theta", theta), scaling=ROPES[kind])
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        factor = settings["partial_rotary_factor"]
        raise ValueError(f"has partial_rotary_factor={factor}, but only 1 is supported")
    if kind != "default":
        rope.factor = settings["factor"]
    if kind in ("llama3", "yarn"):
        seq_len = config.get("max_position_embeddings", 2048)
        rope.original_seq_len = settings.get("original_max_position_embeddings", seq_len)
    if kind == "llama3":
        rope.low_freq_factor = settings["low_freq_factor"]
        rope.high_freq_factor = settings["high_freq_factor"]
    if kind == "yarn":
        rope.beta_slow = settings.get("beta_slow", 1.0)
        rope.beta_fast = settings.get("beta_fast", 32.0)
        if not settings.get("truncate", True):
            rope.yarn_ramp = YarnRamp.exact
        factor = yarn_attention_factor(settings, rope.factor)
        # A factor that equals the default stays null, as in the config of a run.
        if factor != attention_factor(rope):
            rope.attention_factor = factor
    return rope


def yarn_attention_factor(settings: Config, factor: float) -> Any:
    """Return the factor on cosines and sines that the RoPE settings contain or imply, or None."""
    if "attention_factor" in settings:
        return settings["attention_factor"]
    has_scales = "mscale" in settings and "mscale_all_dim" in settings
    if not has_scales or factor <= 1:
        return None
    # As in transformers: the quotient of both scales.
    numerator = 0.1 * settings["mscale"] * math.log(factor) + 1
    denominator = 0.1 * settings["mscale_all_dim"] * math.log(factor) + 1
    return numerator / denominator


def config_from_values(cls: type[T], values: Any, section: str) -> T:
    # OmegaConf would resolve ${oc.env:...} and read the environment.
    if "${" in str(values):
        raise ValueError(f"has an interpolation in its {section} settings")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), values)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"has invalid {section} settings: {error}") from error
    assert isinstance(config, cls)
    return config
