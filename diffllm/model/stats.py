"""In-block statistics: computed where the tensors are, handed out detached.

How values combine over micro-batches and ranks stands in the row of each: diffllm/metrics/table.py.
"""

import torch
from torch import Tensor

from diffllm.model.attention.base import Shown

Stats = dict[str, Tensor]


def block_stats(x: Tensor, show: Shown | None) -> Stats:
    """Compute one block's statistics, each a float32 scalar; none unless something is shown.

    Args:
        x: the block's output (B, T, D).
        show: "context" (B, T, heads, width) before wo; "v" (B, T, K, width), the values; "lambda",
            "gate", and "router" (N, E), the shares of each token's experts, where there is one;
            "residual", "attn_write" and "ffn_write" (B, T, D), the block's input and what is added
            to it.
    """
    if show is None:
        return {}
    with torch.no_grad():
        stats = {"hidden_top1": x.abs().amax().float(), "hidden_kurtosis": kurtosis(x)}
        rms = over_channels(show["context"])
        stats |= {"context_rms": rms.mean(), **extremes("context_rms", rms)}
        if "v" in show:
            ratio = rms / values_rms(show["v"])
            stats |= {"context_over_value_rms": ratio.mean()}
            stats |= extremes("context_over_value_rms", ratio)
        if "lambda" in show:
            lam = show["lambda"].float()
            stats |= {"lambda_mean": lam.mean(), **extremes("lambda", lam)}
        if "gate" in show:
            stats["gate_mean"] = show["gate"].float().mean()
        if "router" in show:
            stats["router_entropy"] = torch.special.entr(show["router"]).sum(-1).mean()
        for name in ("residual", "attn_write", "ffn_write"):
            if name in show:
                stats[f"{name}_rms"] = show[name].float().square().mean().sqrt()
    return stats


def over_channels(x: Tensor) -> Tensor:
    """Compute the RMS over the last dimension, float32."""
    return x.float().square().mean(-1).sqrt()


def values_rms(v: Tensor) -> Tensor:
    """Compute the RMS of each sequence's values (B, T, K, width), over all but B: (B, 1, 1)."""
    return v.float().square().mean((1, 2, 3)).sqrt().clamp_min(1e-30)[:, None, None]


def extremes(name: str, values: Tensor) -> Stats:
    return {f"{name}_min": values.amin(), f"{name}_max": values.amax()}


def kurtosis(x: Tensor) -> Tensor:
    """Compute E[(x - mean)^4] / E[(x - mean)^2]^2 over channels, mean over tokens; normal: 3."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    squares = centred.square()
    variance = squares.mean(-1)
    return (squares.square().mean(-1) / variance.square().clamp_min(1e-30)).mean()


def stack_stats(layers: list[Stats]) -> Stats:
    """Stack the statistics of L layers to (L,) each; shorter where the first layers lack one."""
    return {
        name: torch.stack([stats[name] for stats in layers if name in stats]) for name in layers[-1]
    }
