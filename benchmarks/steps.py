"""Training steps of ours and of peers, which are timed in turns."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from measuring import Step, fastest, in_turns, markdown, ratios
from plain_llama import PlainLlama
from shapes import Flops, mfus

from diffllm.config import TrainConfig
from diffllm.model import ModelConfig
from diffllm.training.build import Training, build
from diffllm.training.choices import chosen_precision
from diffllm.training.step import train_step

PRECISIONS = ("float32", "bf16 autocast", "bf16 weights")
TRIES = 3
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
    return step_of(build(cfg, device, DOCUMENT_END if document_length else None), document_length)


def step_of(t: Training, document_length: int | None = None) -> Step:
    """A step of what the trainer has built."""
    # Where documents begin is found out on the host.
    where = torch.device("cpu") if document_length else t.device

    def step() -> None:
        train_step(t, iter(micro_batches(t.cfg, where, document_length)), 0)

    return step


def theirs(
    name: str, cfg: TrainConfig, precision: str, device: torch.device, compiled: bool = False
) -> Step:
    """A step of a transformers model of `cfg`'s shape, written as its users write it.

    Args:
        name: e.g. "Llama".
        precision: one of PRECISIONS.
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
    """A step of `plain_llama.PlainLlama`, which is about as fast as torch without a framework."""
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


def best_precision(
    name: str, cfg: TrainConfig, device: torch.device, precisions: Sequence[str] = PRECISIONS
) -> str:
    """The precision in which a peer is fastest as it comes; printed with the others' times."""
    if len(precisions) == 1:
        return precisions[0]
    tried = in_turns({p: theirs(name, cfg, p, device) for p in precisions}, TRIES, device)
    text = ", ".join(f"{p} {1e3 * statistics.median(times):.0f} ms" for p, times in tried.items())
    print(f"\n{name} as it comes: {text}", flush=True)
    return fastest(tried, precisions)


def against(
    best: str,
    times: dict[str, list[float]],
    tokens: int,
    flops: Flops,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Every step's speed over that of `best`, paired by round; printed as a Markdown table.

    Args:
        tokens: of a step.
        flops: of one token, the same for all: peers have the shape of ours.
    """
    results, rows = {}, []
    for name, values in times.items():
        median, ratio = statistics.median(values), ratios(times[best], values)
        result = {"ms": 1e3 * median, "tokens_per_s": tokens / median}
        result |= mfus(flops, tokens / median, device)
        results[name] = result | {
            "ratio": ratio["median"],
            "ratio_min": ratio["min"],
            "ratio_max": ratio["max"],
        }
        shares = [f"{100 * result[key]:.1f}%" for key in result if key.startswith("mfu")]
        paired = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        rows.append([name, f"{1e3 * median:,.0f}", f"{tokens / median:,.0f}", *shares, paired])
    known = ["MFU, causal", "MFU, full attention"] if mfus(flops, 1, device) else []
    columns = ["", "ms a step", "tokens a second", *known, f"speed against {best} (min to max)"]
    print(f"\n{markdown(columns, rows)}", flush=True)
    return results
