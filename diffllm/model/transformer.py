"""The decoder, and functions that build a decoder with initial values.

Shapes: B batch, T tokens, D model width, V vocabulary, L layers.
"""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.errors import ConfigError
from diffllm.core.targets import PADDING_TARGET
from diffllm.model.attention.base import Attention, KVCache
from diffllm.model.attention.masks import Documents, Mask, Sliced
from diffllm.model.attention.ops import sdpa_for_any_length
from diffllm.model.attention.slices import Slices
from diffllm.model.auto_setting import AutoSetting
from diffllm.model.block import Block
from diffllm.model.config import ModelConfig
from diffllm.model.ffn.moe import MoE, Routed
from diffllm.model.ffn.router import Router
from diffllm.model.init import Initializer, Shard, unsharded
from diffllm.model.loss import (
    Losses,
    Term,
    chunk_loss,
    chunked_cross_entropy,
    loss_chunk,
    token_losses,
)
from diffllm.model.rope import Rope, RotaryEmbedding
from diffllm.model.stats import BlockStats, Probe, probe_at, stack_stats


class TrainOutput(NamedTuple):
    """Result of `Transformer.loss`."""

    objective: Tensor
    """Weighted sum of `losses`, summed over tokens; differentiable, float32."""
    losses: Losses
    """Terms of the objective. Cross-entropy and z-loss are detached; the terms of routers are
    differentiable sums over MoE layers, if any."""
    stats: BlockStats
    """Statistics by name; each is (L,), but lambda_head is (L, heads). Empty without `diagnose`."""
    expert_counts: Tensor | None
    """Tokens per expert without padding, (MoE layers, E) int64; None without MoE layers."""


class Transformer(nn.Module):
    """A Llama-style decoder with any attention variant.

    FSDP2 gathers parameters only for `forward` and for the methods in `forward_methods`.
    """

    layers: Any  # nn.ModuleList of Block
    forward_methods = ("loss", "token_losses")

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        # nn.Embedding(...) would draw values, which imports torch._dynamo (0.8 s) on "meta".
        weight = torch.empty(cfg.vocab_size, cfg.dim)
        self.tok_embeddings = nn.Embedding.from_pretrained(weight, freeze=False)
        self.rope = RotaryEmbedding(cfg.head_dim, cfg.seq_len, cfg.rope)
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.output = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        self.chunk_loss: Any = chunk_loss

    def forward(
        self,
        tokens: Tensor,
        caches: list[KVCache] | None = None,
        documents: Documents | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """Map tokens (B, T) int64 to logits (B, T, V).

        Args:
            caches: one KV cache per layer, for decoding; `tokens` follow the cached tokens.
            documents: if given, attention stays within each document, where positions start at 0.
            last: positions (B,) or (B, n) int64; if given, return only the logits at these
                positions, (B, V) or (B, n, V).
        """
        x, _, _ = self.apply_layers(tokens, documents, caches=caches)
        # Select positions before the output layer, so that no other logits are computed.
        if last is not None:
            rows = torch.arange(len(x), device=x.device)
            if last.dim() != 1:
                rows = rows[:, None]
            x = x[rows, last]
        x = self.norm(x)
        return F.linear(x, self.output_weight)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Documents | None = None,
        slices: Slices | None = None,
        diagnose: bool = False,
        probe: Tensor | None = None,
    ) -> TrainOutput:
        """Compute the objective for tokens (B, T) int64.

        Args:
            targets: (B, T) int64; negative targets are ignored. Targets equal to PADDING_TARGET
                mark padding, which router losses and token counts of experts exclude.
            documents: if given, attention stays within each document, where positions start at 0.
            slices: if given, `tokens` and `targets` are this rank's slice of each sequence, and
                `documents` and `probe` refer to whole sequences.
            diagnose: whether to return statistics of each layer.
            probe: (N,) int64; query positions at which `diagnose` also measures attention maps.
        """
        attention_probe = None
        if probe is not None:
            length = tokens.shape[1]
            if slices:
                length = length * slices.size
            attention_probe = probe_at(probe, length, documents)
        padding = self.padding(targets)
        x, stats, routed = self.apply_layers(
            tokens, documents, slices, padding, diagnose=diagnose, probe=attention_probe
        )
        x = self.norm(x)
        z_weight = Term.z_loss.weight(self.cfg)
        chunk = self.loss_chunk(x.device).value
        objective, losses = chunked_cross_entropy(
            x.flatten(0, 1),
            self.output_weight,
            targets.flatten(),
            z_weight,
            chunk,
            self.chunk_loss,
        )
        if not routed:
            return TrainOutput(objective, losses, stack_stats(stats), None)
        for term in routed[0].losses:
            losses[term] = torch.stack([layer.losses[term] for layer in routed]).sum()
            objective = objective + term.weight(self.cfg) * losses[term]
        counts = torch.stack([layer.counts for layer in routed])
        return TrainOutput(objective, losses, stack_stats(stats), counts)

    def token_losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Documents | None = None,
        slices: Slices | None = None,
    ) -> Tensor:
        """Compute the cross-entropy of each token in nats, (B, T) float32; 0 if ignored.

        For the arguments, see `loss`.
        """
        padding = self.padding(targets)
        x, _, _ = self.apply_layers(tokens, documents, slices, padding)
        x = self.norm(x)
        chunk = self.loss_chunk(x.device).value
        losses = token_losses(x.flatten(0, 1), self.output_weight, targets.flatten(), chunk)
        return losses.view_as(targets)

    def apply_layers(
        self,
        tokens: Tensor,
        documents: Documents | None,
        slices: Slices | None = None,
        padding: Tensor | None = None,
        caches: list[KVCache] | None = None,
        diagnose: bool = False,
        probe: Probe | None = None,
    ) -> tuple[Tensor, list[BlockStats], list[Routed]]:
        """Apply all blocks to tokens (B, T); return (B, T, D), before the final norm.

        The lists contain the statistics of each block, and the token counts and router losses of
        each MoE layer. For the arguments, see `forward`, `loss` and `Block.forward`.
        """
        x = self.tok_embeddings(tokens)
        if caches:
            rope, mask = self.continued(caches[0], tokens)
        else:
            rope, mask = self.whole_sequences(tokens, documents, x.dtype, slices)
        stats: list[BlockStats] = []
        routed: list[Routed] = []
        context = sdpa_for_any_length(x.device) if caches else nullcontext()
        with context:
            for i, layer in enumerate(self.layers):
                cache = caches[i] if caches else None
                x, layer_stats, layer_routed = layer(x, rope, mask, cache, diagnose, probe, padding)
                stats.append(layer_stats)
                if layer_routed is not None:
                    routed.append(layer_routed)
        return x, stats, routed

    def padding(self, targets: Tensor) -> Tensor | None:
        if self.cfg.moe.n_experts:
            return targets == PADDING_TARGET
        return None

    def loss_chunk(self, device: torch.device) -> AutoSetting:
        cfg = self.cfg
        return loss_chunk(cfg.loss_chunk, device, cfg.vocab_size, cfg.dim)

    @property
    def mixtures(self) -> list[MoE]:
        return [layer.ffn for layer in self.layers if layer.routes]

    def rebalance(self, counts: Tensor, skipped: Tensor) -> None:
        for mixture, layer_counts in zip(self.mixtures, counts.unbind(), strict=True):
            mixture.router.rebalance(layer_counts, skipped)

    def router_state(self) -> dict[str, Tensor]:
        """Return all buffers of the MoE routers by name, for checkpoints."""
        return {name: buffer for name, buffer in self.named_buffers() if ".router." in name}

    def router_bias_range(self) -> Tensor:
        biases = torch.stack([mixture.router.bias for mixture in self.mixtures])
        return biases.amax(1) - biases.amin(1)

    def active_parameters(self) -> int:
        total = sum(param.numel() for param in self.parameters())
        idle = sum(mixture.idle_parameters() for mixture in self.mixtures)
        return total - idle

    def whole_sequences(
        self,
        tokens: Tensor,
        documents: Documents | None,
        dtype: torch.dtype,
        slices: Slices | None = None,
    ) -> tuple[Rope, Mask]:
        """Return the RoPE tables of `tokens` (B, T), and the mask of the whole sequences.

        With context parallelism, `tokens` are this rank's slice. Its positions need RoPE; its
        queries attend to the keys of all ranks, so the mask is that of the whole sequences.
        """
        batch, length = tokens.shape
        start = 0
        sequences = tokens
        if slices:
            start = slices.rank * length
            # Apart from `documents`, masks depend only on the shape of the tokens, so the tokens of
            # other ranks are not needed.
            sequences = tokens.new_empty(batch, length * slices.size)
        self.check_length(sequences.shape[1])
        # All layers have the same attention variant and therefore the same mask.
        mask = self.layers[0].attention.training_mask(documents, sequences, dtype)
        if documents is None:
            rope = self.rope(start, length)
        else:
            positions = documents.positions[:, start : start + length]
            rope = self.rope.at(positions)
        if slices:
            return rope, Sliced(mask, slices)
        return rope, mask

    def continued(self, cache: KVCache, tokens: Tensor) -> tuple[Rope, Mask]:
        length = tokens.shape[1]
        self.check_length(cache.length + length)
        if cache.lengths is None:
            return self.rope(cache.length, length), None
        # Rows of different lengths: a row must not see the unused slots after its last token.
        slots = torch.arange(cache.length + 1, device=tokens.device)
        mask = slots <= cache.lengths.view(-1, 1, 1, 1)  # (B, 1, 1, slots)
        positions = cache.lengths.unsqueeze(1)
        return self.rope.at(positions), mask

    def check_length(self, positions: int) -> None:
        if positions > self.cfg.seq_len:
            raise ValueError(f"{positions} positions exceed model.seq_len={self.cfg.seq_len}")

    @property
    def output_weight(self) -> Tensor:
        return self.tok_embeddings.weight if self.cfg.tie_embeddings else self.output.weight

    def reset_parameters(self, shard: Shard = unsharded) -> None:
        """Set initial values of all parameters and buffers; for `shard`, see `Initializer`."""
        initialise(self, self.cfg, shard=shard)

    def new_caches(
        self, batch: int, length: int, dtype: torch.dtype | None = None
    ) -> list[KVCache]:
        """Return an empty KV cache per layer, for `batch` sequences of up to `length` positions.

        If `dtype` is None, the caches have the dtype of the parameters.
        """
        weight = self.tok_embeddings.weight
        dtype = dtype or weight.dtype
        caches = []
        for layer in self.layers:
            cache = layer.attention.new_cache(batch, length, dtype, weight.device)
            caches.append(cache)
        return caches

    def choices(
        self, device: torch.device, dtype: torch.dtype, documents: bool
    ) -> dict[str, AutoSetting]:
        """Return the device-dependent settings for training on `device`, by name of the setting.

        `dtype` is the dtype of activations. `documents` tells whether attention is limited to keys
        of the same document.
        """
        cfg = self.cfg
        settings = cfg.attention.resolve(cfg, device).choices(dtype, documents)
        settings["loss_chunk"] = self.loss_chunk(device)
        if self.mixtures:
            settings |= self.mixtures[0].choices(device, dtype)
        return settings

    def flops_per_token(self, visible_keys: float | None = None) -> float:
        """Count the FLOPs of all matrix products per training token, forward and backward.

        `visible_keys` is the mean number of keys that a query sees. The default is
        (cfg.seq_len + 1) / 2, the mean under a causal mask without document masking.
        """
        # An attention variant of a user may define `flops_per_token` without the second parameter.
        keys = () if visible_keys is None else (visible_keys,)
        flops = 0
        for layer in self.layers:
            attention_flops = layer.attention.flops_per_token(self.cfg.seq_len, *keys)
            flops += attention_flops + layer.ffn.flops_per_token()
        return flops + 6 * self.output_weight.numel()

    def flops_per_visible_key(self) -> float:
        """Count the additional training FLOPs per token if each query sees one more key."""
        return self.flops_per_token(2) - self.flops_per_token(1)

    def kv_cache_bytes_per_token(self) -> int:
        return sum(layer.attention.kv_cache_bytes_per_token() for layer in self.layers)


def initialise(
    part: nn.Module, cfg: ModelConfig, prefix: str = "", shard: Shard = unsharded
) -> None:
    """Set initial values of all parameters and buffers of a decoder or of one submodule.

    Args:
        prefix: dotted name of the submodule in the decoder, ending with a dot; "" for a decoder.
        shard: see `Initializer`.
    """
    names: dict[Tensor, str] = {}
    for name, param in part.named_parameters():
        names[param] = prefix + name
    init = Initializer(cfg.init_seed, names, shard)
    out_std = cfg.init_std / math.sqrt(2 * cfg.n_layers)
    # The order matters: the loop replaces the values of matrices that have another rule.
    init.matrices_(cfg.init_std, out_std)
    for module in part.modules():
        if isinstance(module, nn.RMSNorm):
            init.constant_(module.weight, 1.0)
        elif isinstance(module, nn.Embedding) and cfg.embed_init_std is not None:
            init.normal_(module.weight, cfg.embed_init_std, truncate=3)
        elif isinstance(module, Attention):
            module.reset_parameters(init)
        elif isinstance(module, Router):
            module.reset_buffers()
        elif isinstance(module, RotaryEmbedding):
            module.reset_parameters()
    init.check_all_filled()


def without_storage(cfg: ModelConfig) -> Transformer:
    """Build a decoder on the meta device: parameters have names and shapes, but no values."""
    with torch.device("meta"):
        return Transformer(cfg)


def build_model(cfg: Any) -> Transformer:
    """Build an initialised decoder in float32 on the current default device.

    `cfg` must be a ModelConfig or a TrainConfig; any other type raises ConfigError. An attention
    kernel that cannot run on the device also raises ConfigError.
    """
    cfg = getattr(cfg, "model", cfg)
    if not isinstance(cfg, ModelConfig):
        raise ConfigError(f"build_model needs a TrainConfig or ModelConfig, not {cfg!r}")
    device = torch.get_default_device()
    if device.type != "meta":
        cfg.attention.resolve(cfg, device).prepare()
    model = without_storage(cfg)  # skips the default initial values of the layers
    if device.type != "meta":
        model.to_empty(device=device)
        model.reset_parameters()
    return model
