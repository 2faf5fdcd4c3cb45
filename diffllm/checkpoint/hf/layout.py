"""A way to lay out a decoder's parameters for other libraries, and back.

A layout names the tensors of either side, and says for each which tensors of the other side it is
made of. Most are the same tensor under another name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diffllm.model.config import ModelConfig
from diffllm.model.rope import RopeConfig, RopeScaling, attention_factor


@dataclass(frozen=True)
class Mapped:
    """A tensor that is made of tensors of the other side."""

    name: str
    sources: tuple[str, ...]
    """The names of those tensors there."""
    make: Callable[..., Tensor]
    """Makes the tensor of them."""

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Make it of the other side's tensors, by their names."""
        return self.make(*(tensors[name] for name in self.sources))


@dataclass(frozen=True)
class Layout:
    """A decoder as another library has it."""

    architecture: str
    """The class that reads it, by its name in transformers."""
    config: Mapping[str, Any]
    """The content of config.json, but for what the tokenizer and the export say."""
    exported: Sequence[Mapped]
    """The tensors there, made of ours."""
    imported: Sequence[Mapped]
    """Our tensors, made of those there."""


NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "output.": "lm_head.",
    "norm.": "model.norm.",
    "layers.": "model.layers.",
}
"""Beginnings of names here, and in Llama and all that follow it."""
PARTS = {
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attention.wq.": ".self_attn.q_proj.",
    ".attention.wk.": ".self_attn.k_proj.",
    ".attention.wv.": ".self_attn.v_proj.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.q_norm.": ".self_attn.q_norm.",
    ".attention.k_norm.": ".self_attn.k_norm.",
    ".ffn.w1.": ".mlp.gate_proj.",
    ".ffn.w2.": ".mlp.down_proj.",
    ".ffn.w3.": ".mlp.up_proj.",
}
"""Parts of names here, and there."""


def name_there(name: str, parts: Mapping[str, str]) -> str:
    """Return the name that Llama's relatives have for a parameter of ours.

    Args:
        parts: parts of names beside those of Llama; the first that fits is used.
    """
    for own, other in NAMES.items():
        if name.startswith(own):
            name = other + name.removeprefix(own)
            break
    for own, other in {**PARTS, **parts}.items():
        if own in name:
            return name.replace(own, other)
    return name


def same(tensor: Tensor) -> Tensor:
    return tensor


def renamed(pairs: Sequence[tuple[str, str]]) -> tuple[list[Mapped], list[Mapped]]:
    """Map tensors that have other names alone: (ours, theirs) of each."""
    return (
        [Mapped(theirs, (ours,), same) for ours, theirs in pairs],
        [Mapped(ours, (theirs,), same) for ours, theirs in pairs],
    )


def shape_config(model: ModelConfig) -> dict[str, Any]:
    """Return what Llama's relatives call the shape of a decoder, but for its query heads."""
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
        "rope_parameters": rope_parameters(model.rope),
    }


def older_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the settings of RoPE as transformers 4 names them; it ignores rope_parameters."""
    scaling = rope_parameters(rope)
    theta = scaling.pop("rope_theta")
    plain = scaling["rope_type"] == "default"
    return {"rope_theta": theta, "rope_scaling": None if plain else scaling}


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """Return the settings of RoPE as transformers 5 names them."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is RopeScaling.none:
        return found
    found |= {"rope_type": rope.scaling.name, "factor": rope.factor}
    if rope.scaling is not RopeScaling.linear:
        found["original_max_position_embeddings"] = rope.original_seq_len
    if rope.scaling is RopeScaling.llama3:
        found |= {
            "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
        }  # fmt: skip
    if rope.scaling is RopeScaling.yarn:
        found |= {
            "beta_slow": rope.beta_slow, "beta_fast": rope.beta_fast,
            "attention_factor": attention_factor(rope),
        }  # fmt: skip
    return found
