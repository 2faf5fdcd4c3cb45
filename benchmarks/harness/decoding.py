"""Decoding over a growing context, each variant against standard attention.

Tokens are made one after another, as generation does, each with one key more than the one before:
no length comes twice, so what a kernel has to plan or compile for a new length is in the times. The
context of each range begins with random keys and values. Variants alternate after every few tokens
in one process, and every token is read by the host. A ratio is the median over these turns.

Beside the time stand the bytes that a token has to read (weights and the cache) and its FLOPs, and
how many FLOPs there are to a byte. Time over standard's below the ratio of FLOPs, near that of
bytes, is what decoding that memory bounds looks like.
Weights are random.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from diffllm.config import load_config
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.model import ModelConfig, Transformer
from diffllm.model.attention.base import KVCache
from harness.measuring import cells, markdown, ratios, seconds, with_quartiles
from harness.steps import flops_per_token
from harness.worker import State

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
"""The compared variants; ratios are taken to the first."""
TURN = 8
"""Tokens that a variant makes before the next one's turn."""
WARMUP = 4
"""Tokens before a range, which do not count."""
COLUMNS = (
    "context", "attention", "ms a token", "time (quartiles)", "slowest turn, ms", "MB read",
    "bytes", "MFLOPs", "FLOPs", "FLOPs a byte",
)  # fmt: skip


class Cost(NamedTuple):
    """The least that one decoding step reads and computes."""

    bytes: int
    """Weights and keys and values that are read."""
    flops: float


def cost(model: Transformer, context: int, batch: int, dtype: torch.dtype) -> Cost:
    """Cost of a step of `batch` sequences with `context` positions each.

    Input embeddings do not count: a step reads one row a sequence of them.
    """
    cfg, size = model.cfg, dtype.itemsize
    assert batch == 1 or not cfg.moe.n_experts, "which experts several tokens share is not known"
    weights = model.active_parameters()
    weights -= 0 if cfg.tie_embeddings else model.tok_embeddings.weight.numel()
    cache = sum(layer.attention.kv_cache_bytes_per_token(size) for layer in model.layers)
    # Training is three times the forward pass; full attention there is every key, as here.
    flops = flops_of(cfg, context) / 3
    return Cost(weights * size + batch * context * cache, batch * flops)


def flops_of(cfg: ModelConfig, context: int) -> float:
    """Training FLOPs a token with attention over `context` keys."""
    return flops_per_token(replace(cfg, seq_len=context)).full


def random_model(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A model of random weights, drawn on the device, in the dtypes that training computes in.

    `build_model` draws values that are the same on all devices, which takes a large model long.
    """
    with torch.device("meta"):
        model = Transformer(cfg)
    kept = fp32_parameters(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter in kept else dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, cfg.init_std)
        for buffer in model.buffers():
            buffer.zero_()
    model.rope.reset_parameters()
    return model


def filled_caches(
    model: Transformer, context: int, room: int, batch: int, dtype: torch.dtype
) -> list[KVCache]:
    """Caches that hold `context` random positions, with room for `room` more."""
    caches = model.new_caches(batch, context + room, dtype)
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
        cache.length = context
    return caches


@torch.no_grad()
def growing(
    models: dict[str, Transformer], context: int, tokens: int, batch: int, dtype: torch.dtype
) -> dict[str, list[float]]:
    """Seconds a token in each turn, by variant, from `context` positions on."""
    device = next(iter(models.values())).tok_embeddings.weight.device
    first = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    caches = {
        name: filled_caches(model, context - WARMUP, tokens + WARMUP, batch, dtype)
        for name, model in models.items()
    }

    def step(name: str) -> None:
        models[name](first, caches=caches[name])[:, -1].argmax(-1).tolist()  # read by the host

    times: dict[str, list[float]] = {name: [] for name in models}
    for name in models:
        for _ in range(WARMUP):
            step(name)
    for start in range(0, tokens, TURN):
        for name in models:
            count = min(TURN, tokens - start)
            times[name].append(seconds(lambda name=name: step(name), device, count))
    return times


def decoding(
    state: State, words: list[str], lengths: list[int], tokens: int, batch: int
) -> list[dict[str, Any]]:
    """Measure every variant at every length; the reply of a worker."""
    device = torch.device(state["device"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = {}
    for variant in VARIANTS:
        cfg = load_config([f"attention={variant}", *words])
        models[variant] = random_model(cfg.model, device, dtype).eval()
    results: list[dict[str, Any]] = []
    for length in lengths:
        times = growing(models, length, tokens, batch, dtype)
        middle = length + tokens // 2
        for name, model in models.items():
            own = cost(model, middle, batch, dtype)
            results.append(
                {
                    "context": length,
                    "attention": name,
                    "ms": 1e3 * statistics.median(times[name]),
                    "ratio": ratios(times[name], times["standard"]),
                    "slowest_ms": 1e3 * max(times[name]),
                    **own._asdict(),
                    "flops_per_byte": own.flops / own.bytes,
                }
            )
        for line in rows(results[-len(models) :]):
            print(cells(line), flush=True)
    return results


def rows(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """The cells of every result; bytes and FLOPs over those of `standard` at the same length."""
    standard = {one["context"]: one for one in results if one["attention"] == "standard"}
    for one in results:
        base = standard[one["context"]]
        yield [
            f"{one['context']:,}",
            f"`{one['attention']}`",
            f"{one['ms']:.2f}",
            with_quartiles(one["ratio"]),
            f"{one['slowest_ms']:.2f}",
            f"{one['bytes'] / 1e6:,.1f}",
            f"{one['bytes'] / base['bytes']:.2f}",
            f"{one['flops'] / 1e6:,.0f}",
            f"{one['flops'] / base['flops']:.2f}",
            f"{one['flops_per_byte']:.2f}",
        ]


def table(results: list[dict[str, Any]]) -> str:
    """All results, as Markdown."""
    return markdown(COLUMNS, rows(results))
