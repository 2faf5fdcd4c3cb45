"""Models of transformers, independent implementations, with the same weights."""

import pytest
import torch
from tiers import slow_but

from diffllm import build_model, load_config
from diffllm.checkpoint.hf.layout import llama_name

transformers = pytest.importorskip("transformers")

VOCAB, DIM, FFN, LAYERS, HEAD_DIM = 96, 48, 80, 3, 16
THETA = 500.0
HEADS = [(4, 4), (4, 2), (8, 2), (8, 4)]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def ours(variant, heads, kv_heads, *extra):
    cfg = load_config(
        [
            *("model=tiny", f"attention={variant}", "seq_len=24", f"model.dim={DIM}"),
            *(f"model.ffn_dim={FFN}", f"model.n_layers={LAYERS}", f"model.vocab_size={VOCAB}"),
            *(f"model.n_heads={heads}", f"model.n_kv_heads={kv_heads}"),
            *(f"model.head_dim={HEAD_DIM}", f"model.rope.theta={THETA}", "model.init_std=0.25"),
            *extra,
        ]
    )
    model = build_model(cfg.model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight") and "head_norm" not in name:
                param.copy_(torch.rand_like(param) + 0.5)  # a missing norm must change the output
            if "lambda_" in name:
                param.normal_(0, 0.3)
    return model


def peer_config(kind, heads, kv_heads, tied=False, **settings):
    return kind(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=tied,
        attention_bias=False,
        hidden_act="silu",
        attn_implementation="eager",
        **settings,
    )


PARTS = {".attention.lambda_": ".self_attn.lambda_", ".ffn.router.": ".mlp.gate."}
"""Parts of parameter names in diffllm and in transformers, in addition to those of Llama."""


def even_heads_first(weight):
    """Reorder rows of adjacent head pairs (0, 1), (2, 3), ...: first members, then second."""
    pairs = weight.unflatten(0, (-1, 2, HEAD_DIM))
    return pairs.transpose(0, 1).flatten(0, 2)


def copy_into(peer, model, permute):
    weights = {}
    for name, value in model.state_dict().items():
        if "head_norm" in name:
            assert (value == 1).all()  # the norm in transformers has no weight
            continue
        if permute and any(f".{w}." in name for w in ("wq", "wk", "wv")):
            value = even_heads_first(value)
        weights[llama_name(name, PARTS)] = value
    if peer.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    peer.load_state_dict(weights, strict=True)


@torch.no_grad()
def assert_same_logits(model, peer, permute):
    copy_into(peer.eval(), model, permute)
    tokens = torch.randint(0, VOCAB, (3, 24))
    mine, theirs = model(tokens), peer(tokens).logits
    assert theirs.std() > 0.5  # logits must not be trivial
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), slow_but([HEADS[0], (3, 1)], [*HEADS, (4, 1), (3, 1)])
)
@pytest.mark.parametrize("tied", [False, True])
def test_standard_model_equals_transformers_llama_with_same_parameters(heads, kv_heads, tied):
    model = ours("standard", heads, kv_heads, f"model.tie_embeddings={tied}")
    config = peer_config(transformers.LlamaConfig, heads, kv_heads, tied)
    assert_same_logits(model, transformers.LlamaForCausalLM(config), permute=False)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_diff_v1_model_equals_transformers_diffllama_after_head_reordering(heads, kv_heads):
    model = ours("diff_v1", heads, kv_heads)
    config = peer_config(transformers.DiffLlamaConfig, heads, kv_heads)
    assert_same_logits(model, transformers.DiffLlamaForCausalLM(config), permute=True)


EXPERTS, TOP_K, EXPERT_DIM = 6, 3, 24


def our_mixture(renormalise, *extra):
    model = ours(
        "standard",
        4,
        2,
        "model.qk_norm=true",
        "model.moe.score=softmax",
        f"model.moe.n_experts={EXPERTS}",
        f"model.moe.top_k={TOP_K}",
        f"model.moe.expert_dim={EXPERT_DIM}",
        f"model.moe.renormalise={renormalise}",
        *extra,
    )
    with torch.no_grad():
        for layer in model.layers:
            if layer.routes:
                layer.ffn.router.weight.normal_()  # different weights per expert
    return model


def qwen(renormalise, dense_layers=()):
    config = peer_config(
        transformers.Qwen3MoeConfig,
        4,
        2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=EXPERT_DIM,
        norm_topk_prob=renormalise,
        mlp_only_layers=list(dense_layers),
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def as_qwens(tensors):
    """Rename tensors from the names of diffllm to the names of Qwen3MoE."""
    given = {}
    for name, value in tensors.items():
        head, _, last = name.partition(".ffn.experts.")
        if not last:
            given[llama_name(name, PARTS)] = value
        elif last == "w1":
            both = torch.cat((value, tensors[f"{head}.ffn.experts.w3"]), 1)
            given[f"model.{head}.mlp.experts.gate_up_proj"] = both
        elif last == "w2":
            given[f"model.{head}.mlp.experts.down_proj"] = value
    return given


@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("renormalise", [True, False])
def test_moe_model_equals_transformers_qwen3moe_with_same_parameters(renormalise, dense_layers):
    """Compare logits, loss and all gradients."""
    model = our_mixture(renormalise, f"model.moe.n_dense_layers={dense_layers}")
    peer = qwen(renormalise, range(dense_layers))
    peer.load_state_dict(as_qwens(dict(model.named_parameters())), strict=True)
    tokens = torch.randint(0, VOCAB, (3, 24))
    mine, theirs = model(tokens), peer(tokens).logits
    assert theirs.std() > 0.5
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    loss = model(tokens[:, :-1], tokens[:, 1:]).objective / tokens[:, 1:].numel()
    peers_loss = peer(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, peers_loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    peers_loss.backward()
    grads = as_qwens({name: param.grad for name, param in model.named_parameters()})
    for name, param in peer.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-4, atol=1e-5, msg=name)
