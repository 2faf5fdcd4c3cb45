"""Convert diffllm parameters to and from the names and shapes of Hugging Face model classes.

Supported classes: Llama, Qwen3, Qwen3Moe and DiffLlama of transformers, and the DiffLLM class in
modeling_diffllm.py. A `Layout` describes one class. Most parameters only need a new name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from diffllm.core.errors import ConfigError
from diffllm.core.keys import class_declarations
from diffllm.model import without_storage
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.attention.diff_v1 import DiffV1Config
from diffllm.model.attention.diff_v2 import DiffV2Config
from diffllm.model.attention.gated import GatedConfig
from diffllm.model.attention.standard import Sink, StandardConfig
from diffllm.model.config import ModelConfig
from diffllm.model.ffn.router import MoEConfig, Score
from diffllm.model.rope import (
    RopeConfig,
    RopeScaling,
    YarnRamp,
    attention_factor,
    with_rounded_ramp,
)


@dataclass(frozen=True)
class Mapped:
    """Rule for one tensor: `make` computes tensor `name` from the tensors named in `sources`."""

    name: str
    sources: tuple[str, ...]
    make: Callable[..., Tensor]

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        sources = [tensors[name] for name in self.sources]
        return self.make(*sources)


@dataclass(frozen=True)
class Layout:
    """Format in which a Hugging Face model class stores a decoder: config.json and tensors.

    Each `Mapped` in `exported` computes one tensor of the class from diffllm parameters. Each
    `Mapped` in `imported` computes one diffllm parameter from tensors of the class.
    """

    architecture: str
    """Name of the transformers class that reads the layout."""
    config: Mapping[str, Any]
    """The content of config.json, without keys of the tokenizer and of the export."""
    exported: Sequence[Mapped]
    imported: Sequence[Mapped]


LLAMA_NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "output.": "lm_head.",
    "norm.": "model.norm.",
    "layers.": "model.layers.",
}
"""Prefixes of parameter names here, and in the Llama family."""
LLAMA_PARTS = {
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".wq.": ".q_proj.",
    ".wk.": ".k_proj.",
    ".wv.": ".v_proj.",
    ".wo.": ".o_proj.",
    ".w_lambda.": ".lambda_proj.",
    ".w_gate.": ".gate_proj.",
    ".w1": ".gate_proj",
    ".w2": ".down_proj",
    ".w3": ".up_proj",
}


def llama_name(name: str, parts: Mapping[str, str] = MappingProxyType({})) -> str:
    """Convert the diffllm parameter name `name` to the name in the Llama class of transformers.

    `parts` contains additional replacements: in the name, each key is replaced by its value.
    """
    for prefix, llama_prefix in LLAMA_NAMES.items():
        if name.startswith(prefix):
            name = llama_prefix + name.removeprefix(prefix)
            break
    for part, llama_part in {**parts, **LLAMA_PARTS}.items():
        name = name.replace(part, llama_part)
    return name


def same(tensor: Tensor) -> Tensor:
    return tensor


def renamed(
    names: Sequence[str], parts: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Mapped], list[Mapped]]:
    """Return the rules for parameters that only need a new name.

    The first list is for `Layout.exported`, the second list is for `Layout.imported`. `names`
    contains diffllm parameter names. `parts` is passed to `llama_name`.
    """
    exported = []
    imported = []
    for name in names:
        hf_name = llama_name(name, parts)
        exported.append(Mapped(hf_name, (name,), same))
        imported.append(Mapped(name, (hf_name,), same))
    return exported, imported


def shape_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json entries that all model classes use, except num_attention_heads."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.n_layers,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.seq_len,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": rope_parameters(model.rope, model.head_dim),
    }


def older_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json entries rope_theta and rope_scaling, which transformers 4 reads."""
    scaling = rope_parameters(model.rope, model.head_dim)
    theta = scaling.pop("rope_theta")
    is_unscaled = scaling["rope_type"] == "default"
    return {"rope_theta": theta, "rope_scaling": None if is_unscaled else scaling}


def rope_parameters(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """Return the config.json entry rope_parameters, which transformers 5 reads."""
    # transformers does not have the ramp of OLMo-core.
    rope = with_rounded_ramp(rope, head_dim)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is RopeScaling.none:
        return parameters
    parameters |= {"rope_type": rope.scaling.name, "factor": rope.factor}
    if rope.scaling is not RopeScaling.linear:
        parameters["original_max_position_embeddings"] = rope.original_seq_len
    if rope.scaling is RopeScaling.llama3:
        parameters["low_freq_factor"] = rope.low_freq_factor
        parameters["high_freq_factor"] = rope.high_freq_factor
    if rope.scaling is RopeScaling.yarn:
        parameters["beta_slow"] = rope.beta_slow
        parameters["beta_fast"] = rope.beta_fast
        parameters["attention_factor"] = attention_factor(rope)
        if rope.yarn_ramp is YarnRamp.exact:
            parameters["truncate"] = False
    return parameters


ARCHITECTURE = "DiffLLMForCausalLM"
VARIANTS: dict[str, type[AttentionConfig]] = {
    "standard": StandardConfig,
    "gated": GatedConfig,
    "diff_v1": DiffV1Config,
    "diff_v2": DiffV2Config,
}


def kernel_settings(config_class: type) -> set[str]:
    """Return the settings that select a kernel and do not change the computed function."""
    declared = class_declarations(config_class)
    return {name for name, declaration in declared.items() if declaration.effect == "speed"}


def own_layout(model: ModelConfig) -> Layout | None:
    """Return the `Layout` of the DiffLLM class; None if the class does not support `model`."""
    variants = {config_class: name for name, config_class in VARIANTS.items()}
    variant = variants.get(type(model.attention))
    if variant is None:
        return None
    decoder = without_storage(model)
    n_query_heads = decoder.layers[0].attention.n_query_heads
    # The buffers of routers, too: `bias` changes the selected experts, and training reads `load`.
    names = [*dict(decoder.named_parameters()), *decoder.router_state()]
    exported, imported = renamed(names)
    # In DIFF V1, the class counts key and value heads in pairs of twice the width, but query heads
    # one by one.
    members = 2 if variant == "diff_v1" else 1
    attention = model.attention
    if isinstance(attention, StandardConfig) and attention.sink is Sink.one:
        # The class has only learned logits: exp(0) is the constant 1 of this sink.
        zeros = partial(torch.zeros, n_query_heads)
        for layer in range(model.n_layers):
            exported.append(Mapped(f"model.layers.{layer}.self_attn.sink", (), zeros))
    config = {
        "model_type": "diffllm",
        **shape_config(model),
        "num_key_value_heads": model.n_kv_heads // members,
        "head_dim": model.head_dim * members,
        "num_attention_heads": n_query_heads,
        "qk_norm": model.qk_norm,
        "attention": {"variant": variant, **json_settings(model.attention)},
        "moe": json_settings(model.moe) if model.moe.n_experts else None,
    }
    return Layout(ARCHITECTURE, config, exported, imported)


def json_settings(config: AttentionConfig | MoEConfig) -> dict[str, Any]:
    """Return a config as a dict, with names of enum members, and without kernel settings."""
    omitted = kernel_settings(type(config))
    settings = {}
    for key, value in asdict(config).items():
        if key not in omitted:
            settings[key] = value.name if isinstance(value, Enum) else value
    return settings


def llama_layout(model: ModelConfig) -> Layout | None:
    """Return the `Layout` of LlamaForCausalLM, or of Qwen3ForCausalLM for a decoder with QK norm.

    Return None for a mixture of experts, and for attention other than plain softmax.
    """
    if model.moe.n_experts or not is_plain_softmax(model):
        return None
    exported, imported = renamed(parameter_names(model))
    config = {**shape_config(model), **older_rope(model), **softmax_config(model)}
    if model.qk_norm:
        return Layout("Qwen3ForCausalLM", {"model_type": "qwen3", **config}, exported, imported)
    llama = {"model_type": "llama", **config, "mlp_bias": False}
    return Layout("LlamaForCausalLM", llama, exported, imported)


def qwen3_moe_layout(model: ModelConfig) -> Layout | None:
    """Return the `Layout` of Qwen3MoeForCausalLM; None if the class does not support the decoder.

    The decoder must have experts, plain softmax attention, QK norm and softmax router scores. The
    class does not support a router bias, shared experts or a `routed_scaling` other than 1.
    """
    moe = model.moe
    # The class has one value for each of these settings.
    is_supported = (
        moe.n_experts
        and moe.score is Score.softmax
        and not moe.n_shared
        and moe.routed_scaling == 1
        and moe.bias_update_rate == 0
        and model.qk_norm
        and is_plain_softmax(model)
    )
    if not is_supported:
        return None
    names = []
    names_of_experts = []
    for name in parameter_names(model):
        if ".experts." in name:
            names_of_experts.append(name)
        else:
            names.append(name)
    exported, imported = renamed(names, {".router.": ".gate."})
    for name in names_of_experts:
        # One tensor (E, ...) here, one tensor per expert in transformers.
        stem, _, matrix = llama_name(name).rpartition(".")
        hf_names = [f"{stem}.{e}.{matrix}.weight" for e in range(moe.n_experts)]
        for e, hf_name in enumerate(hf_names):
            # `e=e` binds the value now; the lambda runs after the loop.
            exported.append(Mapped(hf_name, (name,), lambda stack, e=e: stack[e].contiguous()))
        imported.append(Mapped(name, tuple(hf_names), lambda *matrices: torch.stack(matrices)))
    config = {
        "model_type": "qwen3_moe",
        **shape_config(model),
        **older_rope(model),
        **softmax_config(model),
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.n_dense_layers)),
        "moe_intermediate_size": moe.expert_dim,
        "num_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.renormalise,
    }
    return Layout("Qwen3MoeForCausalLM", config, exported, imported)


def diffllama_layout(model: ModelConfig) -> Layout | None:
    """Return the `Layout` of DiffLlamaForCausalLM; None if the class does not support the decoder.

    The decoder must have DIFF V1 attention with default settings, no experts and no QK norm.
    `head_norm_eps` must equal `model.norm_eps`, because DiffLlama uses one eps for all norms. The
    head norm of DiffLlama has no weight. The export therefore multiplies the output projection by
    the weight of the head norm in diffllm.
    """
    attention = model.attention
    is_supported = (
        type(attention) is DiffV1Config
        and attention.head_norm
        and not attention.clamp
        and attention.lambda_init is None
        and attention.head_norm_eps == model.norm_eps
        and attention.context_scale == 1
        and not model.moe.n_experts
        and not model.qk_norm
    )
    if not is_supported:
        return None
    exported: list[Mapped] = []
    imported: list[Mapped] = []
    for name in parameter_names(model):
        hf_name = llama_name(name)
        if any(f".attention.{matrix}." in name for matrix in ("wq", "wk", "wv")):
            # Adjacent heads are a pair in diffllm; DiffLlama has all first heads of pairs first.
            to_halves = partial(with_swapped_axes, shape=(-1, 2, model.head_dim))
            to_adjacent = partial(with_swapped_axes, shape=(2, -1, model.head_dim))
            exported.append(Mapped(hf_name, (name,), to_halves))
            imported.append(Mapped(name, (hf_name,), to_adjacent))
        elif ".attention.wo." in name:
            norm = name.replace(".wo.", ".head_norm.")
            exported.append(Mapped(hf_name, (name, norm), times_head_norm))
            imported.append(Mapped(name, (hf_name,), same))
            # The imported `wo` contains the weight of the head norm, so that weight is 1.
            imported.append(Mapped(norm, (), partial(torch.ones, 2 * model.head_dim)))
        elif ".head_norm." not in name:
            exported.append(Mapped(hf_name, (name,), same))
            imported.append(Mapped(name, (hf_name,), same))
    config = {
        "model_type": "diffllama",
        **shape_config(model),
        **older_rope(model),
        "num_attention_heads": model.n_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "lambda_std_dev": 0.1,
    }
    return Layout("DiffLlamaForCausalLM", config, exported, imported)


def is_plain_softmax(model: ModelConfig) -> bool:
    """Return whether the Llama class of transformers supports the attention of `model`.

    The attention must be softmax attention with the settings `sink=none` and `context_scale=1`.
    `model.dim` must be a multiple of the number of query heads, because LlamaConfig requires this.
    """
    attention = model.attention
    return (
        type(attention) is StandardConfig
        and attention.sink is Sink.none
        and attention.context_scale == 1
        and model.dim % query_heads(model) == 0
    )


def query_heads(model: ModelConfig) -> int:
    assert isinstance(model.attention, StandardConfig)
    return round(model.attention.query_heads * model.n_heads)


def softmax_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json entries of softmax attention for Llama and Qwen3."""
    return {
        "num_attention_heads": query_heads(model),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def parameter_names(model: ModelConfig) -> list[str]:
    return [name for name, _ in without_storage(model).named_parameters()]


def with_swapped_axes(weight: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return weight.unflatten(0, shape).transpose(0, 1).flatten(0, 2).contiguous()


def times_head_norm(wo: Tensor, norm: Tensor) -> Tensor:
    return wo * norm.repeat(wo.shape[1] // len(norm))


def layout_of(model: ModelConfig, only_own: bool = False) -> Layout:
    """Return the `Layout` of a Hugging Face model class that supports `model`.

    Prefer a transformers class to the DiffLLM class in modeling_diffllm.py. If `only_own` is
    True, use only the DiffLLM class. Raises ConfigError if no class supports `model`.
    """
    candidates = [own_layout]
    if not only_own:
        candidates = [llama_layout, qwen3_moe_layout, diffllama_layout, own_layout]
    for candidate in candidates:
        layout = candidate(model)
        if layout:
            return layout
    raise ConfigError(
        f"{type(model.attention).__name__} cannot be exported: neither transformers nor "
        f"modeling_diffllm.py supports this attention; supported are {', '.join(VARIANTS)}"
    )
