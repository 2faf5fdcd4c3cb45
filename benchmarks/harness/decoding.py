"""Decoding over a growing context, with random weights.

Tokens are generated one after another, so each step has one key more than the previous step. Every
step has a new length, so the time includes a kernel's planning and compilation for new lengths. The
cache starts with random keys and values. The host reads every token.

If memory bandwidth limits decoding, the times of two variants have the ratio of the bytes that a
step must read: weights and cache.
"""

import statistics

import torch

from diffllm.config import load_config
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.model import ModelConfig, Transformer, without_storage
from harness.machine import seconds, the_device

TURN = 8  # tokens per measured time
WARMUP = 4  # untimed tokens before each range


def random_model(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Return a model with random weights in the dtypes of a training computation.

    The weights are drawn on the device. `build_model` draws equal values on every device, which is
    slow for a large model.
    """
    model = without_storage(cfg)
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


@torch.no_grad()
def growing(
    model: Transformer, context: int, tokens: int, batch: int, dtype: torch.dtype
) -> list[float]:
    """Return the mean seconds per token of each block of `TURN` tokens, from position `context`."""
    device = model.tok_embeddings.weight.device
    first = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    caches = model.new_caches(batch, context + tokens, dtype)
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
        cache.length = context - WARMUP

    def step() -> None:
        model(first, caches=caches)[:, -1].argmax(-1).tolist()  # the host reads the token

    for _ in range(WARMUP):
        step()
    starts = range(0, tokens, TURN)
    return [seconds(step, device, min(TURN, tokens - start)) for start in starts]


def decoding(words: list[str], lengths: list[int], tokens: int, batch: int) -> dict[str, float]:
    """Return milliseconds per token (median and slowest) and bf16 megabytes by context length.

    Stop before the first length that exceeds the memory.
    """
    device = the_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(load_config(words).model, device, dtype).eval()
    weights = model.active_parameters()
    # A step reads only one row of separate input embeddings.
    weights -= 0 if model.cfg.tie_embeddings else model.tok_embeddings.weight.numel()
    found = {}
    for length in lengths:
        try:
            times = growing(model, length, tokens, batch, dtype)
        except torch.OutOfMemoryError:
            break
        found[f"{length}: ms"] = 1e3 * statistics.median(times)
        found[f"{length}: slowest"] = 1e3 * max(times)
        cache = length * sum(each.attention.kv_cache_bytes_per_token(2) for each in model.layers)
        found[f"{length}: MB"] = (2 * weights + batch * cache) / 1e6
    return found
