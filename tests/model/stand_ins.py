"""Random heads and documents, explicit maps, and replacements for GPU kernels in tests."""

import math
from itertools import pairwise

import torch

from diffllm.model.attention.kernels import training_kernel, training_mask

END = 0
CUDA = torch.device("cuda")
MAIN = ("standard", "gated", "diff_v1", "diff_v2")
V2 = ("flash_attn", "flash_attn.flash_attn_interface")
"""The modules of flash-attn 2."""
V4 = ("flash_attn", "flash_attn.cute")
"""The modules of flash-attn-4."""


def heads(shape, wide=1, batch=2, length=40, dtype=torch.float32):
    """Return random q (B, T, H, d), k (B, T, K, d) and v (B, T, K / wide, wide * d)."""
    n, groups, d = shape
    return (
        torch.randn(batch, length, n, d, dtype=dtype),
        torch.randn(batch, length, groups, d, dtype=dtype),
        torch.randn(batch, length, groups // wide, wide * d, dtype=dtype),
    )


def tokens_with_documents(batch=2, length=40):
    tokens = torch.randint(1, 64, (batch, length))
    tokens[torch.rand(batch, length) < 0.15] = END
    return tokens


def mask_for(documents, tokens, backend, dtype, width, explicit=False):
    """Return the mask of a batch in the form of the chosen kernel."""
    masked = documents is not None
    kernel = training_kernel(backend, tokens.device, dtype, width, masked, explicit)
    return training_mask(kernel.value, documents, tokens)


def explicit(q, k, v, scale):
    """Compute causal attention of q (T, H, d), k (S, K, d) and v (S, K, dv), head by head."""
    out = q.new_zeros(len(q), q.shape[1], v.shape[-1])
    for h in range(q.shape[1]):
        j = h // (q.shape[1] // k.shape[1])
        scores = (q[:, h].float() @ k[:, j].float().T) * scale
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        out[:, h] = (torch.softmax(scores, -1) @ v[:, j].float()).to(q.dtype)
    return out


def packed_attention(q, k, v, ends_q, ends_k, longest_q, longest_k, scale):
    """Compute causal attention within documents with the arguments of variable-length kernels.

    Checks the requirements of these kernels on their arguments first.
    """
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert q.ndim == k.ndim == v.ndim == 3
    assert len(q) == len(k) == len(v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "q, k and v must have the same width"
    assert k.shape[1] == v.shape[1]
    assert q.shape[1] % k.shape[1] == 0
    for ends, longest in ((ends_q, longest_q), (ends_k, longest_k)):
        assert ends.dtype == torch.int32
        assert (ends[0], ends[-1]) == (0, len(q))
        assert (ends.diff() > 0).all()
        assert isinstance(longest, int)
        assert longest >= ends.diff().max()
    assert torch.equal(ends_q, ends_k)
    cuts = ends_q.tolist()
    parts = [explicit(q[a:b], k[a:b], v[a:b], scale) for a, b in pairwise(cuts)]
    return torch.cat(parts)


def assert_close_in_bf16(mine, other):
    assert mine.dtype == other.dtype == torch.bfloat16
    torch.testing.assert_close(mine.float(), other.float(), rtol=0.02, atol=0.02)


def relative(mine, other):
    return (torch.linalg.vector_norm(mine - other) / torch.linalg.vector_norm(other)).item()


class Cuda(torch.Tensor):
    """A CPU tensor with a CUDA device attribute."""

    device = torch.device("cuda", 0)
