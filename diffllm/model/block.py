"""One decoder layer.

Shapes: B batch, T tokens, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from diffllm.model.attention.base import Attention, Aux, KVCache
from diffllm.model.attention.masks import Mask, Sliced
from diffllm.model.config import ModelConfig
from diffllm.model.ffn.moe import MoE, Routed, SwiGLU
from diffllm.model.rope import Rope
from diffllm.model.stats import BlockStats, Probe, block_stats, probe_stats


class Block(nn.Module):
    """Decoder layer: x + attention(norm(x)), then x + ffn(norm(x)), with RMSNorm as norm."""

    def __init__(self, cfg: ModelConfig, layer_idx: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.attention: Attention = cfg.attention.build(cfg, layer_idx)
        self.ffn_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.routes = cfg.moe.n_experts > 0 and layer_idx >= cfg.moe.n_dense_layers
        self.ffn: Any
        if self.routes:
            self.ffn = MoE(cfg.dim, cfg.moe)
        else:
            self.ffn = SwiGLU(cfg.dim, cfg.ffn_dim)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Mask = None,
        cache: KVCache | None = None,
        diagnose: bool = False,
        probe: Probe | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, BlockStats, Routed | None]:
        """Apply the block to x (B, T, D).

        Args:
            rope: cos and sin tables of the T positions.
            mask: see `Mask`; None means a causal mask.
            cache: KV cache of earlier positions; the block appends the T new keys and values.
            diagnose: whether to compute statistics.
            probe: with diagnose=True, also measure attention maps at these query positions.
            padding: (B, T) boolean; positions that the router of a MoE layer does not count.

        Returns:
            Three values: the output (B, T, D); statistics by name, empty if `diagnose` is False;
            and the token counts and router losses of a MoE layer, or None in a dense layer.
        """
        aux: Aux | None = {} if diagnose else None
        normed = self.attention_norm(x)
        attended = self.attention(normed, rope, mask, cache, aux)
        between = x + attended
        slices = mask.slices if isinstance(mask, Sliced) else None
        if self.routes:
            fed, routed = self.ffn(self.ffn_norm(between), aux, slices, padding)
        else:
            fed, routed = self.ffn(self.ffn_norm(between)), None
        if aux is not None:
            aux["residual"] = x
            aux["attn_write"] = attended
            aux["ffn_write"] = fed
        x = between + fed
        stats = block_stats(x, aux, slices)
        if aux is not None:
            with torch.no_grad():
                stats |= self.attention.statistics(aux)
            if probe is not None:
                stats |= probe_stats(self.attention, normed, aux, probe, slices)
        return x, stats, routed
