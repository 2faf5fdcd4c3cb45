"""The shape of the model that a benchmark measures, from its command line.

Every flag is an override of the config, and peers are built from the loaded config, so that both
have the same shape. Without flags it is 6 layers, 256 wide, 8 heads over 4, a SwiGLU of 768, a
vocabulary of 8,192 and 8 sequences of 512 tokens. `--model NAME` takes a model of conf/model/.
"""

from argparse import ArgumentParser, Namespace
from typing import NamedTuple

import torch

from diffllm.config import TrainConfig
from diffllm.metrics.mfu import mfu, peak_flops
from diffllm.model import ModelConfig, Transformer

KEYS = {
    "layers": "model.n_layers",
    "dim": "model.dim",
    "heads": "model.n_heads",
    "kv_heads": "model.n_kv_heads",
    "head_dim": "model.head_dim",
    "ffn": "model.ffn_dim",
    "vocab": "model.vocab_size",
    "experts": "model.moe.n_experts",
    "top_k": "model.moe.top_k",
    "expert_dim": "model.moe.expert_dim",
    "seq": "seq_len",
}
SMALL = {
    "layers": 6, "dim": 256, "heads": 8, "kv_heads": 4, "ffn": 768, "vocab": 8192,
}  # fmt: skip
SEQ, BATCH = 512, 8
VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
"""The variants that are compared with each other, the one that ratios are taken to first."""


def positive(text: str) -> int:
    """Read an integer of at least 1 from a command line."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def add_shape(parser: ArgumentParser) -> None:
    """Add the flags of a shape."""
    group = parser.add_argument_group("shape")
    group.add_argument("--model", help="a model of conf/model/, which the other flags change")
    for name in KEYS:
        group.add_argument(f"--{name.replace('_', '-')}", type=positive)
    group.add_argument("--batch", type=positive, help="sequences a forward pass")
    group.add_argument("--micro-batches", type=positive, default=1, help="forward passes a step")


def shape_words(
    args: Namespace, model: str = "mini", defaults: dict[str, int] = SMALL
) -> list[str]:
    """Overrides for the shape that was asked for.

    Args:
        model: what gives the rest, such as the scale of initial values, where --model is absent.
        defaults: the shape where --model is absent.
    """
    given = {name: getattr(args, name) for name in KEYS if getattr(args, name) is not None}
    sizes = {"seq": SEQ, **({} if args.model else defaults), **given}
    if not args.model and "head_dim" not in sizes:
        sizes["head_dim"] = sizes["dim"] // sizes["heads"]
    batch = args.batch or BATCH
    return [
        f"model={args.model or model}",
        *(f"{KEYS[name]}={size}" for name, size in sizes.items()),
        f"micro_batch_size={batch}",
        f"global_batch_size={batch * args.micro_batches}",
    ]


def shape_given(args: Namespace) -> bool:
    """Whether any flag of a shape was used."""
    return args.micro_batches > 1 or any(
        getattr(args, name) is not None for name in ("model", "batch", *KEYS)
    )


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
    """Attention over the (S + 1) / 2 keys that a query sees on average: `diffllm.metrics.mfu`'s."""
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
