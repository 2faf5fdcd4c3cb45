"""The layouts of models that transformers and others know: Llama, Qwen3, Qwen3Moe, DiffLlama.

Shapes: H query heads, K kv heads, d head_dim, D model width, E experts, F their width.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffllm.checkpoint.hf.layout import (
    Layout,
    Mapped,
    name_there,
    older_rope,
    renamed,
    same,
    shape_config,
)
from diffllm.model import without_storage
from diffllm.model.attention.diff_v1 import DiffV1Config
from diffllm.model.attention.standard import Sink, StandardConfig
from diffllm.model.config import ModelConfig
from diffllm.model.ffn.config import Score


def llama_layout(model: ModelConfig) -> Layout | None:
    """Lay out a dense decoder of softmax attention as Llama, or as Qwen3 where queries and keys are
    normalised; None for any other."""
    if model.moe.n_experts or not is_plain_softmax(model):
        return None
    exported, imported = renamed([(name, name_there(name, {})) for name in names_of(model)])
    config = {**shape_config(model), **older_rope(model.rope), **softmax_config(model)}
    if model.qk_norm:
        return Layout("Qwen3ForCausalLM", {"model_type": "qwen3", **config}, exported, imported)
    llama = {"model_type": "llama", **config, "mlp_bias": False}
    return Layout("LlamaForCausalLM", llama, exported, imported)


def qwen3_moe_layout(model: ModelConfig) -> Layout | None:
    """Lay out a mixture of experts as Qwen3Moe; None where it does not fit its rules: softmax
    scores without a bias, no shared experts, queries and keys normalised."""
    moe = model.moe
    fits = (
        moe.n_experts and moe.score is Score.softmax and not moe.n_shared
        and moe.routed_scaling == 1 and moe.bias_update_rate == 0
        and model.qk_norm and is_plain_softmax(model)
    )  # fmt: skip
    if not fits:
        return None
    plain = [name for name in names_of(model) if ".ffn.experts." not in name]
    router = {".ffn.router.": ".mlp.gate."}
    exported, imported = renamed([(name, name_there(name, router)) for name in plain])
    for layer in range(moe.n_dense_layers, model.n_layers):
        there = f"model.layers.{layer}.mlp.experts"
        for own, other in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = f"layers.{layer}.ffn.experts.{own}"
            each = [f"{there}.{e}.{other}.weight" for e in range(moe.n_experts)]
            exported += [
                Mapped(theirs, (name,), partial(nth, number=e)) for e, theirs in enumerate(each)
            ]
            imported.append(Mapped(name, tuple(each), stacked))
    config = {
        "model_type": "qwen3_moe",
        **shape_config(model),
        **older_rope(model.rope),
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
    """Lay out DIFF V1 as DiffLlama, whose head norm has no weight: it becomes part of `wo`.

    None for ablations, mixtures, another eps in that norm, and normalised queries and keys. What
    comes back has a weight of ones, and the function is the same.
    """
    attention = model.attention
    fits = (
        type(attention) is DiffV1Config and attention.head_norm and not attention.clamp
        and attention.lambda_init is None and attention.head_norm_eps == model.norm_eps
        and attention.context_scale == 1 and not model.moe.n_experts and not model.qk_norm
    )  # fmt: skip
    if not fits:
        return None
    plain: list[tuple[str, str]] = []
    exported: list[Mapped] = []
    imported: list[Mapped] = []
    parts = {".attention.lambda_": ".self_attn.lambda_"}
    for name in names_of(model):
        there = name_there(name, parts)
        if any(f".attention.{matrix}." in name for matrix in ("wq", "wk", "wv")):
            reorder = partial(even_heads_first, head_dim=model.head_dim)
            back = partial(pairs_of_heads, head_dim=model.head_dim)
            exported.append(Mapped(there, (name,), reorder))
            imported.append(Mapped(name, (there,), back))
        elif ".attention.wo." in name:
            norm = name.replace(".wo.", ".head_norm.")
            exported.append(Mapped(there, (name, norm), folded))
            imported.append(Mapped(name, (there,), same))
            imported.append(Mapped(norm, (), partial(torch.ones, 2 * model.head_dim)))
        elif ".head_norm." not in name:
            plain.append((name, there))
    others = renamed(plain)
    config = {
        "model_type": "diffllama",
        **shape_config(model),
        **older_rope(model.rope),
        "num_attention_heads": model.n_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "lambda_std_dev": 0.1,
    }
    return Layout("DiffLlamaForCausalLM", config, [*exported, *others[0]], [*imported, *others[1]])


def is_plain_softmax(model: ModelConfig) -> bool:
    """Whether attention is softmax attention without a sink or a factor, in heads that Llama's
    config takes."""
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
    """Return what Llama and Qwen3 say of their layers besides the shape."""
    return {
        "num_attention_heads": query_heads(model),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def names_of(model: ModelConfig) -> list[str]:
    return [name for name, _ in without_storage(model).named_parameters()]


def nth(stack: Tensor, number: int) -> Tensor:
    return stack[number].contiguous()


def stacked(*matrices: Tensor) -> Tensor:
    return torch.stack(matrices)


def even_heads_first(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows (heads * d, D) of adjacent pairs of heads: all first members come first."""
    return weight.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).flatten(0, 2).contiguous()


def pairs_of_heads(weight: Tensor, head_dim: int) -> Tensor:
    """Undo `even_heads_first`."""
    return weight.unflatten(0, (2, -1, head_dim)).transpose(0, 1).flatten(0, 2).contiguous()


def folded(wo: Tensor, norm: Tensor) -> Tensor:
    """Multiply the columns of wo (D, H d) by the head norm's weight (2d,)."""
    return wo * norm.repeat(wo.shape[1] // len(norm))
