"""Sampling from a decoder with its KV cache.

Shapes: B sequences, V vocabulary size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diffllm.model import Transformer
from diffllm.model.attention.base import KVCache


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
    stop_token: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """Return each prompt followed by a continuation, which does not depend on other prompts.

    Raises ValueError if a prompt is empty or longer than `model.cfg.seq_len`, or if an argument is
    outside its range.

    Args:
        prompts: token sequences. The first of several equal prompts uses the seed `seed`, the
            second `seed` + 1, and so on.
        max_new_tokens: limit per continuation; `model.cfg.seq_len` limits prompt plus continuation.
        temperature: divisor of the logits; below 1e-6, choose the most likely token.
        top_p: in (0, 1]; sample among the fewest tokens whose probabilities sum to at least top_p
            (Holtzman et al., arXiv 1904.09751).
        seed: random seed; must be equal on all ranks of a sharded model.
        vocab_size: size of the tokenizer's vocabulary; never draw tokens >= vocab_size.
        stop_token: token that ends a continuation; the continuation contains this token.
        dtype: dtype of the KV caches; by default the dtype of the parameters.
    """
    check_sampling(temperature, top_p, max_new_tokens)
    texts = [list(prompt) for prompt in prompts]
    for text in texts:
        if not 1 <= len(text) <= model.cfg.seq_len:
            raise ValueError(f"prompt of {len(text)} tokens: must have 1 to {model.cfg.seq_len}")
    limits = []
    generators = []
    rows = []
    for row, text in enumerate(texts):
        limit = min(len(text) + max_new_tokens, model.cfg.seq_len)
        limits.append(limit)
        # Equal prompts need different seeds, or their continuations would be equal.
        repeats = texts[:row].count(text)
        generators.append(torch.Generator().manual_seed(seed + repeats))
        if len(text) < limit:
            rows.append(row)
    if not rows:
        return texts
    model.eval()
    device = model.tok_embeddings.weight.device
    caches = model.new_caches(len(rows), max(limits), dtype)
    unfinished_prompts = [texts[row] for row in rows]
    logits = read_prompts(model, unfinished_prompts, caches, device)
    # `rows` are the unfinished texts, in the order of the rows of `logits` and of the caches.
    # With several ranks, the caller passes stop_token=None. Then only the lengths end the loop, and
    # all ranks make equally many forward passes, even if rounding makes them draw other tokens.
    while True:
        logits = logits[:, :vocab_size].float()
        unfinished = []
        for i, row in enumerate(rows):
            row_logits = logits[i : i + 1]
            token = int(draw_tokens(row_logits, temperature, top_p, generators[row]))
            texts[row].append(token)
            if len(texts[row]) < limits[row] and token != stop_token:
                unfinished.append(i)
        if not unfinished:
            return texts
        if len(unfinished) < len(rows):
            rows = [rows[i] for i in unfinished]
            for cache in caches:
                cache.keep(unfinished)
        last_tokens = [texts[row][-1:] for row in rows]
        logits = model(torch.tensor(last_tokens, device=device), caches=caches)
        logits = logits[:, -1]


def check_sampling(temperature: float, top_p: float, max_new_tokens: int) -> None:
    is_valid_temperature = 0 <= temperature < math.inf
    is_valid_top_p = 0 < top_p <= 1
    if not is_valid_temperature or not is_valid_top_p or max_new_tokens < 0:
        raise ValueError(
            f"temperature={temperature}, top_p={top_p}, max_new_tokens={max_new_tokens}: "
            "temperature must be finite and at least 0, top_p in (0, 1], max_new_tokens at least 0"
        )


def read_prompts(
    model: Transformer,
    prompts: list[list[int]],
    caches: list[KVCache],
    device: torch.device,
) -> Tensor:
    """Run the prompts through the model and fill the empty caches; return logits (B, V).

    The logits are for the first new token after each prompt. Shorter prompts are padded, and the
    padding is removed from the caches.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    # Padding follows the prompt, so the causal mask hides it from the prompt's tokens.
    padded = []
    for prompt in prompts:
        padding = [0] * (longest - len(prompt))
        padded.append(prompt + padding)
    tokens = torch.tensor(padded, device=device)
    last = torch.tensor(lengths, device=device) - 1
    logits = model(tokens, caches=caches, last=last)
    for cache in caches:
        cache.truncate(lengths)
    return logits


def draw_tokens(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> Tensor:
    """Draw one token from each row of logits (B, V): (B,) int64.

    Draw on the CPU, so that the same seed gives the same tokens on all devices. A diverged model
    may have invalid logits: NaN counts as 0, and infinity as the largest finite number. For
    `temperature` and `top_p`, see `generate`.
    """
    if temperature < 1e-6:
        return logits.nan_to_num().argmax(-1)
    scaled = (logits / temperature).nan_to_num()
    probs = torch.softmax(scaled, dim=-1).cpu()
    if top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(-1) - ordered
        is_beyond = mass_before >= top_p
        is_beyond[:, 0] = False  # top_p may round to 0 in float32
        ordered[is_beyond] = 0
        probs = torch.zeros_like(probs).scatter(1, index, ordered)
    tokens = torch.multinomial(probs, 1, generator=generator)  # (B, 1)
    return tokens.squeeze(1).to(logits.device)
