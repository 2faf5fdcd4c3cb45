"""The shape of a decoder. `n_heads` and `n_kv_heads` always mean the baseline's."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from diffllm.errors import ConfigError
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.ffn.config import MoEConfig
from diffllm.model.rope import RopeConfig


@dataclass
class ModelConfig:
    """Llama-style decoder: pre-norm RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    dim: int = MISSING
    n_layers: int = MISSING
    n_heads: int = MISSING
    n_kv_heads: int = MISSING
    head_dim: int = MISSING
    ffn_dim: int = MISSING
    """Width of SwiGLU; with experts, of the dense layers before them."""
    match_params_to: str | None = None
    """A variant whose total parameter count `ffn_dim`, or with experts `moe.expert_dim`, is solved
    for when the config is loaded."""
    vocab_size: int = MISSING
    seq_len: int = "${seq_len}"  # type: ignore[assignment]
    attention: AttentionConfig = MISSING
    moe: MoEConfig = field(default_factory=MoEConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys, before RoPE."""
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of matrices, truncated at 3; wo and w2 divide it by sqrt(2 n_layers)."""
    init_seed: int = "${seed}"  # type: ignore[assignment]
    z_loss: float = 0.0
    """Weight of mean(logsumexp(logits)^2) in the loss (PaLM, arXiv 2204.02311, section 5)."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at once while the loss is computed; null: as suits the device."""

    def validate(self) -> None:
        """Raise ConfigError for a shape that cannot be built."""
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("vocab_size", "seq_len", "loss_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name}={value} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"model.n_heads={self.n_heads} must be a multiple of "
                f"model.n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")
        self.rope.validate()
        self.moe.validate(self.n_layers)
        for name in ("init_std", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be positive")
        if self.z_loss < 0:
            raise ConfigError(f"model.z_loss={self.z_loss} must not be negative")
        self.attention.validate(self)
