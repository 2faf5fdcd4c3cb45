"""The shape of a decoder from the config.json of transformers: Llama, Qwen3, Qwen3Moe, DiffLlama,
and our own modelling file's.

Where a file leaves a setting out, transformers' default stands; a setting that our decoders do not
have is refused. Raised errors are ValueErrors, phrases about the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffllm.layouts.own import VARIANTS
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.attention.diff_v1 import DiffV1Config
from diffllm.model.attention.diff_v2 import DiffV2Config
from diffllm.model.attention.gated import GatedConfig
from diffllm.model.attention.standard import StandardConfig
from diffllm.model.config import ModelConfig
from diffllm.model.ffn.config import MoEConfig, Score
from diffllm.model.rope import RopeConfig, RopeScaling, attention_factor

T = TypeVar("T")
Config = Mapping[str, Any]
COMPUTED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "partial_rotary_factor": 1.0, "quantization_config": None, "decoder_sparse_step": 1,
}  # fmt: skip
"""Settings with the one value that our decoders compute."""
ROPES = {"default": RopeScaling.none, **{s.name: s for s in RopeScaling if s.name != "none"}}
ROPE_KEYS = (
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast", "attention_factor",
    "partial_rotary_factor",
)  # fmt: skip
CLASSES: dict[str, type[AttentionConfig]] = {
    VARIANTS[cls.__name__]: cls for cls in (StandardConfig, GatedConfig, DiffV1Config, DiffV2Config)
}


def model_of(config: Config) -> ModelConfig:
    """Return the decoder that a config.json describes."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if not isinstance(name, str) or name not in READERS:
        raise ValueError(f"names the architecture {name}, which is none of {', '.join(READERS)}")
    for key, computed in COMPUTED.items():
        if config.get(key) not in (None, computed):
            raise ValueError(f"says {key}={config[key]}, and only {computed} is computed here")
    if others := set(config.get("layer_types") or []) - {"full_attention"}:
        raise ValueError(f"has layers of {', '.join(map(str, others))}, which are not known here")
    model = READERS[name](config)
    model.validate()
    return model


def shape_of(config: Config, attention: AttentionConfig, n_heads: int) -> ModelConfig:
    """Return what all architectures have in common."""
    dim = whole(config, "hidden_size")
    heads = whole(config, "num_attention_heads")
    return ModelConfig(
        dim=dim,
        n_layers=whole(config, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=whole(config, "num_key_value_heads", heads),
        head_dim=whole(config, "head_dim", dim // heads),
        ffn_dim=whole(config, "intermediate_size"),
        vocab_size=whole(config, "vocab_size"),
        seq_len=whole(config, "max_position_embeddings", 2048),
        attention=attention,
        rope=rope_of(config),
        tie_embeddings=setting(config, "tie_word_embeddings", bool, False),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        init_std=number(config, "initializer_range", 0.02),
        init_seed=0,
    )


def llama(config: Config) -> ModelConfig:
    """Read Llama's."""
    return shape_of(config, StandardConfig(), whole(config, "num_attention_heads"))


def qwen3(config: Config) -> ModelConfig:
    """Read Qwen3's, which normalises queries and keys."""
    return replace(llama({"head_dim": 128, **config}), qk_norm=True)


def qwen3_moe(config: Config) -> ModelConfig:
    """Read Qwen3Moe's; its first layers may be dense, and no others."""
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise ValueError(f"says mlp_only_layers={dense}; only the first layers may be dense")
    if "num_local_experts" in config:  # as transformers 5 saves it
        config = {"num_experts": config["num_local_experts"], **config}
    moe = MoEConfig(
        n_experts=whole(config, "num_experts"),
        top_k=whole(config, "num_experts_per_tok", 8),
        expert_dim=whole(config, "moe_intermediate_size"),
        n_dense_layers=len(dense),
        score=Score.softmax,
        renormalise=setting(config, "norm_topk_prob", bool, False),
        bias_update_rate=0.0,
    )
    return replace(qwen3(config), moe=moe)


def diffllama(config: Config) -> ModelConfig:
    """Read DiffLlama's, whose eps is that of the head norm too."""
    attention = DiffV1Config(head_norm_eps=number(config, "rms_norm_eps", 1e-5))
    heads = whole(config, "num_attention_heads")
    return shape_of({"rms_norm_eps": 1e-5, **config}, attention, heads)


def own(config: Config) -> ModelConfig:
    """Read that of our own modelling file."""
    settings = dict(setting(config, "attention", dict, {}))
    variant = settings.pop("variant", None)
    if variant not in CLASSES:
        raise ValueError(f"has attention {variant}, which is none of {', '.join(CLASSES)}")
    settings.pop("backend", None)  # of the machine that wrote it
    attention = typed(CLASSES[variant], settings, "attention")
    heads = whole(config, "num_attention_heads")
    n_heads: float = heads
    if isinstance(attention, DiffV1Config):  # of whose heads the kernel gets two as one
        pairs, width = whole(config, "num_key_value_heads"), whole(config, "head_dim")
        config = {**config, "num_key_value_heads": 2 * pairs, "head_dim": width // 2}
    elif isinstance(attention, StandardConfig):
        n_heads = heads / attention.query_heads
    elif isinstance(attention, DiffV2Config):
        n_heads = heads / 2
    if n_heads != round(n_heads):
        raise ValueError(f"has num_attention_heads={heads}, which {variant} cannot have")
    moe = typed(MoEConfig, config.get("moe") or {}, "moe")
    qk_norm = setting(config, "qk_norm", bool, False)
    return replace(shape_of(config, attention, round(n_heads)), moe=moe, qk_norm=qk_norm)


READERS: dict[str, Callable[[Config], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "DiffLlamaForCausalLM": diffllama,
    "DiffLLMForCausalLM": own,
}
"""Architectures that can be read."""


def rope_of(config: Config) -> RopeConfig:
    """Read the frequencies, as transformers 5 or an older one writes them."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict) or any(isinstance(value, dict) for value in said.values()):
        raise ValueError("has settings of RoPE that differ by layer, or are no mapping")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ROPES:
        raise ValueError(f"has RoPE of type {kind}, which is none of {', '.join(ROPES)}")
    if others := [key for key in said if key not in ROPE_KEYS and said[key] is not None]:
        raise ValueError(f"has settings of RoPE that are not known here: {', '.join(others)}")
    theta = number(config, "rope_theta", 10_000.0)
    rope = RopeConfig(theta=number(said, "rope_theta", theta), scaling=ROPES[kind])
    if said.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("rotates a part of each head's channels, which is not computed here")
    if kind == "default":
        return rope
    rope.factor = number(said, "factor")
    if kind == "linear":
        return rope
    longest = whole(config, "max_position_embeddings", 2048)
    rope.original_seq_len = whole(said, "original_max_position_embeddings", longest)
    if kind == "llama3":
        rope.low_freq_factor = number(said, "low_freq_factor")
        rope.high_freq_factor = number(said, "high_freq_factor")
        return rope
    rope.beta_slow = number(said, "beta_slow", 1.0)
    rope.beta_fast = number(said, "beta_fast", 32.0)
    usual = attention_factor(rope)
    factor = number(said, "attention_factor", usual)
    rope.attention_factor = None if factor == usual else factor
    return rope


def typed(cls: type[T], values: Any, where: str) -> T:
    """Make a config of ours from the plain values of its fields."""
    try:
        made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
    except (OmegaConfBaseException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"has settings of {where} that cannot be: {reason}") from error
    assert isinstance(made, cls)
    return made


def setting(config: Config, key: str, kind: type[T], default: T | None = None) -> T:
    """Return a setting of a type, or its default where it is missing or null."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"has no {key}")
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"says {key}={value!r}, which is no {kind.__name__}")
    return value


def whole(config: Config, key: str, default: int | None = None) -> int:
    """Return a whole number above 0."""
    value = setting(config, key, int, default)
    if value < 1:
        raise ValueError(f"says {key}={value}, which has to be at least 1")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """Return a number."""
    value = config.get(key)
    return float(value) if type(value) is int else setting(config, key, float, default)
