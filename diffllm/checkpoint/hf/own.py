"""The layout of our own modelling file: every variant and mixture, parameter by parameter."""

from dataclasses import asdict
from enum import Enum
from functools import partial
from typing import Any

import torch

from diffllm.checkpoint.hf.layout import Layout, Mapped, name_there, renamed, shape_config
from diffllm.model import without_storage
from diffllm.model.attention.standard import Sink, StandardConfig
from diffllm.model.config import ModelConfig

ARCHITECTURE = "DiffLLMForCausalLM"
"""The class of our modelling file."""
PARTS = {
    ".attention.w_lambda.": ".self_attn.lambda_proj.",
    ".attention.w_gate.": ".self_attn.gate_proj.",
    ".ffn.router.": ".mlp.router.",
    ".ffn.experts.w1": ".mlp.experts.gate_proj",
    ".ffn.experts.w2": ".mlp.experts.down_proj",
    ".ffn.experts.w3": ".mlp.experts.up_proj",
    ".ffn.shared.w1.": ".mlp.shared.gate_proj.",
    ".ffn.shared.w2.": ".mlp.shared.down_proj.",
    ".ffn.shared.w3.": ".mlp.shared.up_proj.",
    ".attention.": ".self_attn.",
}
"""Parts of names here, and in the modelling file, beside those of Llama."""
VARIANTS = {
    "StandardConfig": "standard",
    "GatedConfig": "gated",
    "DiffV1Config": "diff_v1",
    "DiffV2Config": "diff_v2",
}
"""The variants of the modelling file, by the classes of their configs here."""
OF_MACHINE = ("backend", "values")
"""Settings of attention that choose a kernel and do not change the function."""


def own_layout(model: ModelConfig) -> Layout | None:
    """Lay out a decoder for our modelling file; None for a variant that it does not have."""
    variant = VARIANTS.get(type(model.attention).__name__)
    if variant is None:
        return None
    decoder = without_storage(model)
    names = [*dict(decoder.named_parameters()), *decoder.router_state()]
    exported, imported = renamed([(name, name_there(name, PARTS)) for name in names])
    members = 2 if variant == "diff_v1" else 1  # of a key of the kernel's
    attention = model.attention
    if isinstance(attention, StandardConfig) and attention.sink is Sink.one:
        zeros = partial(torch.zeros, decoder.layers[0].attention.n_query_heads)
        for layer in range(model.n_layers):
            exported.append(Mapped(f"model.layers.{layer}.self_attn.sink", (), zeros))
    config = {
        "model_type": "diffllm",
        **shape_config(model),
        "num_key_value_heads": model.n_kv_heads // members,
        "head_dim": model.head_dim * members,
        "num_attention_heads": decoder.layers[0].attention.n_query_heads,
        "qk_norm": model.qk_norm,
        "attention": {"variant": variant, **plain(asdict(model.attention))},
        "moe": plain(asdict(model.moe)) if model.moe.n_experts else None,
    }
    return Layout(ARCHITECTURE, config, exported, imported)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values, enums by name, without those that depend on the machine."""
    return {
        key: value.name if isinstance(value, Enum) else value
        for key, value in values.items()
        if key not in OF_MACHINE
    }
