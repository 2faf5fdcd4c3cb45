"""Config of a decoder, shared by all attention variants."""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.ffn.router import MoEConfig
from diffllm.model.rope import RopeConfig


class InitMatch(Enum):
    """How to scale the initial values of the output projections `wo`.

    none: no scaling.
    write: scale so that the attention output of each layer initially has the same RMS as in a model
        with standard attention.
    """

    none = "none"
    write = "write"


@dataclass
class ModelConfig:
    """Settings of a Llama-style decoder: pre-norm RMSNorm, RoPE, SwiGLU and GQA."""

    dim: int = bounded(MISSING, least=1, most=2**20)
    """Width of the residual stream."""
    n_layers: int = bounded(MISSING, least=1, most=10_000)
    """Number of blocks."""
    n_heads: int = bounded(MISSING, least=1, most=2**16)
    """Query heads of standard attention; a variant derives its number of heads from this."""
    n_kv_heads: int = bounded(MISSING, least=1, most=2**16)
    """Key and value heads of standard attention, each shared by a group of query heads."""
    head_dim: int = bounded(MISSING, least=1, most=2**16)
    """Width of a head."""
    ffn_dim: int = bounded(MISSING, least=1, most=2**24)
    """Width of SwiGLU; in a MoE model, width of the dense layers before the experts."""
    match_params_to: str | None = None
    """Variant whose parameter count this model matches by changing its FFN width. Loading the
    config solves for `ffn_dim`, or for `moe.expert_dim` with experts."""
    match_flops_to: str | None = None
    """Variant whose training FLOPs per token this model matches by changing the same width."""
    vocab_size: int = bounded(MISSING, least=1, most=2**24)
    """Rows of the embedding and the output; must be at least the tokenizer's size."""
    seq_len: int = bounded("${seq_len}", least=1, most=2**27)
    """Number of positions with a RoPE table; follows `seq_len`, so set only `seq_len`."""
    attention: AttentionConfig = MISSING
    moe: MoEConfig = field(default_factory=MoEConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    """Apply RMSNorm over head_dim to queries and keys, before RoPE."""
    tie_embeddings: bool = False
    """Use the weight of the embedding for the output as well."""
    norm_eps: float = bounded(1e-5, above=0)
    """Added to the mean square inside RMSNorm."""
    init_std: float = bounded(0.02, above=0)
    """Standard deviation of matrices, truncated at 3 standard deviations. For wo and w2, divided by
    sqrt(2 n_layers)."""
    embed_init_std: float | None = bounded(None, above=0)
    """Standard deviation of the token embeddings; null: `init_std`."""
    init_match: InitMatch = InitMatch.none
    """write: scale initial `wo` so that attention writes the same RMS as `standard`."""
    init_seed: int = "${seed}"  # type: ignore[assignment]
    """Seed of initial values; a value depends on seed, parameter name and position."""
    z_loss: float = bounded(0.0, least=0)
    """Weight of mean(logsumexp(logits)^2) in the loss (PaLM, arXiv 2204.02311, section 5)."""
    loss_chunk: int | None = bounded(None, least=1, most=2**27)
    """Tokens per chunk of logits in the loss; null: chosen for the device."""

    def validate(self) -> None:
        check_bounds("model.", self)
        if self.match_params_to is not None and self.match_flops_to is not None:
            raise ConfigError(
                f"model.match_params_to={self.match_params_to} and model.match_flops_to="
                f"{self.match_flops_to} exclude each other: set only one"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"model.n_heads={self.n_heads} must be a multiple of "
                f"model.n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} must be even, because RoPE rotates channel pairs"
            )
        self.rope.validate()
        self.moe.validate(self.n_layers)
        self.attention.validate(self)
