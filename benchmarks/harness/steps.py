"""Training steps of ours and of peers, their shape and their FLOPs."""

from typing import Any, NamedTuple

import torch

from diffllm.config import TrainConfig
from diffllm.metrics.profiling import mfu, peak_flops
from diffllm.model import ModelConfig, Transformer
from diffllm.training.build import build, chosen_precision
from diffllm.training.step import train_step
from harness.measuring import Step
from harness.plain_llama import PlainLlama

DOCUMENT_END = 0
"""The token that ends a document in steps that mask documents."""


def random_tokens(cfg: TrainConfig, device: torch.device) -> torch.Tensor:
    """The tokens of one micro-batch, (b, T + 1) int64."""
    shape = (cfg.micro_batches(1)[0], cfg.seq_len + 1)
    return torch.randint(1, cfg.model.vocab_size, shape, device=device)


def with_documents(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Tokens among which documents end, after `length` tokens on average."""
    ends = torch.rand(tokens.shape, device=tokens.device) < 1 / length
    return tokens.masked_fill(ends, DOCUMENT_END)


def micro_batches(
    cfg: TrainConfig, device: torch.device, document_length: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random inputs and targets, (b, T) int64 each, of every micro-batch of one step.

    Args:
        document_length: of documents on average, which end among the tokens; None ends none.
    """
    batches = []
    for _ in range(cfg.micro_batches(1)[1]):
        tokens = random_tokens(cfg, device)
        tokens = with_documents(tokens, document_length) if document_length else tokens
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return batches


def ours(cfg: TrainConfig, device: torch.device, document_length: int | None = None) -> Step:
    """A step of the trainer: float32 master weights and loss, clipping, the guard, fused AdamW.

    Args:
        document_length: of the documents on average, which are masked; None masks nothing.

    Raises:
        ConfigError: the attention backend cannot run on the device.
    """
    dtype = chosen_precision(cfg.precision, device).value
    cfg.model.attention.prepare(cfg.model, device, dtype, document_length is not None)
    t = build(cfg, device, DOCUMENT_END if document_length else None)
    # Where documents begin is found out on the host.
    where = torch.device("cpu") if document_length else device

    def step() -> None:
        train_step(t, iter(micro_batches(cfg, where, document_length)), 0)

    return step


def theirs(
    name: str, cfg: TrainConfig, precision: str, device: torch.device, compiled: bool = False
) -> Step:
    """A step of a transformers model of `cfg`'s shape, written as its users write it.

    Args:
        name: e.g. "Llama".
        precision: "float32", "bf16 autocast" or "bf16 weights".
    """
    with device:
        model = their_model(name, cfg)

    def loss(forward: Any, tokens: torch.Tensor) -> torch.Tensor:
        return forward(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss

    return peer_step(model, loss, cfg, precision, device, compiled)


def their_model(name: str, cfg: TrainConfig) -> Any:
    """Build a transformers model, such as "Llama", in the shape of `cfg`."""
    import transformers  # takes seconds, and ours alone does without

    m = cfg.model
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=m.n_layers,
        hidden_size=m.dim,
        intermediate_size=m.ffn_dim,
        num_attention_heads=m.n_heads,
        num_key_value_heads=m.n_kv_heads,
        head_dim=m.head_dim,
        vocab_size=m.vocab_size,
        max_position_embeddings=cfg.seq_len,
        rms_norm_eps=m.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope.theta},
        tie_word_embeddings=m.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
        **their_experts(m),
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def their_experts(m: ModelConfig) -> dict[str, Any]:
    """The arguments of Qwen3Moe's config that Llama's lacks; none for a dense model."""
    if not m.moe.n_experts:
        return {}
    assert not m.moe.n_shared, "Qwen3Moe has no shared experts"
    return {
        "num_experts": m.moe.n_experts,
        "num_experts_per_tok": m.moe.top_k,
        "moe_intermediate_size": m.moe.expert_dim,
        "norm_topk_prob": m.moe.renormalise,
        "mlp_only_layers": list(range(m.moe.n_dense_layers)),
        "output_router_logits": False,
    }


def plain(cfg: TrainConfig, precision: str, device: torch.device, compiled: bool = False) -> Step:
    """A step of `PlainLlama`, which is about as fast as torch without a framework."""
    with device:
        model = PlainLlama(cfg.model)

    def loss(forward: Any, tokens: torch.Tensor) -> torch.Tensor:
        return forward(tokens[:, :-1], tokens[:, 1:])

    return peer_step(model, loss, cfg, precision, device, compiled)


def peer_step(
    model: Any,
    loss: Any,
    cfg: TrainConfig,
    precision: str,
    device: torch.device,
    compiled: bool,
) -> Step:
    """Forward, backward, clipping and fused AdamW, with the sequences and batches of `cfg`."""
    if precision == "bf16 weights":
        model = model.to(torch.bfloat16)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16 autocast")
    count = cfg.micro_batches(1)[1]

    def step() -> None:
        for _ in range(count):
            tokens = random_tokens(cfg, device)
            with autocast:
                value = loss(forward, tokens)
            (value / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def described(cfg: TrainConfig) -> str:
    """The shape in one line."""
    m, (batch, count) = cfg.model, cfg.micro_batches(1)
    experts = f"{m.moe.n_experts} experts of {m.moe.expert_dim}, top {m.moe.top_k}"
    return (
        f"{m.n_layers} layers, {m.dim} wide, {m.n_heads}/{m.n_kv_heads} heads of {m.head_dim}, "
        f"{experts if m.moe.n_experts else f'SwiGLU of {m.ffn_dim}'}, vocabulary {m.vocab_size}, "
        f"{count} x {batch} x {cfg.seq_len} tokens a step"
    )


class Flops(NamedTuple):
    """Training FLOPs a token by the two conventions."""

    causal: float
    """Attention over the (S + 1) / 2 keys that a query sees on average, as for perf/mfu."""
    full: float
    """Attention over all S keys, as torchtitan and others count."""


def flops_per_token(model: ModelConfig) -> Flops:
    """Training FLOPs a token of a model at its seq_len, by both conventions."""
    with torch.device("meta"):
        built = Transformer(model)
    causal, keys = built.flops_per_token(), model.seq_len
    # Maps take time in proportion to (S + 1) / 2 keys, which at 2 S - 1 is S.
    extra = (
        layer.attention.flops_per_token(2 * keys - 1) - layer.attention.flops_per_token(keys)
        for layer in built.layers
    )
    return Flops(causal, causal + sum(extra))


def mfus(flops: Flops, tokens_per_s: float, device: torch.device) -> dict[str, float]:
    """Shares of the device's peak; empty where the peak is not known."""
    if not (peak := peak_flops(device)):
        return {}
    return {
        "mfu_causal": mfu(flops.causal, tokens_per_s, peak),
        "mfu_full": mfu(flops.full, tokens_per_s, peak),
    }
