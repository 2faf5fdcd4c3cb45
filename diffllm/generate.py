"""Sampling from a decoder with its KV cache.

Shapes: B sequences, T prompt tokens, V vocabulary.
"""

import torch
from torch import Tensor

from diffllm.model import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
    stop_token: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Continue a prompt token by token.

    Args:
        prompt: (B, T) int64, T >= 1, T + max_new_tokens <= model.cfg.seq_len.
        temperature: 0 (below 1e-6) takes the most likely token.
        top_p: sample among the fewest tokens whose probabilities sum to at least this
            (Holtzman et al., arXiv 1904.09751).
        seed: of the sampling; the same on every rank of a sharded model.
        vocab_size: tokens from here on are never drawn; for models wider than their tokenizer.
        stop_token: ends the generation once every sequence has it; rows are padded with it.
        dtype: of the caches; the parameters' by default.

    Returns:
        (B, T + n) int64, the prompt first, n <= max_new_tokens.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    caches = model.new_caches(prompt.shape[0], prompt.shape[1] + max_new_tokens, dtype)
    tokens, unseen = prompt, prompt
    done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        logits = model(unseen, caches=caches)[:, -1, :vocab_size].float()
        unseen = sample(logits, temperature, top_p, generator)
        if stop_token is not None:
            unseen = torch.where(done, stop_token, unseen)
            done |= unseen == stop_token
        unseen = unseen.unsqueeze(1)
        tokens = torch.cat((tokens, unseen), dim=1)
        if bool(done.all()):
            break
    return tokens


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token a row: logits (B, V) -> (B,) int64. Drawn on the CPU, so devices agree."""
    if temperature < 1e-6:
        return logits.argmax(-1)
    probs = torch.softmax(logits / temperature, dim=-1).cpu()
    if top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        probs = torch.zeros_like(probs).scatter(1, index, ordered)
    return torch.multinomial(probs, 1, generator=generator).squeeze(1).to(logits.device)
