"""Config of a decoder, shared by all attention variants."""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from diffllm.core.bounds import check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
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

    dim: int = key(
        MISSING,
        least=1,
        most=2**20,
        effect="numbers",
        help="Width of the residual stream.",
    )
    n_layers: int = key(
        MISSING,
        least=1,
        most=10_000,
        effect="numbers",
        help="Number of blocks.",
    )
    n_heads: int = key(
        MISSING,
        least=1,
        most=2**16,
        effect="numbers",
        help="Query heads of standard attention; a variant derives its number of heads from this.",
    )
    n_kv_heads: int = key(
        MISSING,
        least=1,
        most=2**16,
        effect="numbers",
        help="Key and value heads of standard attention, each shared by a group of query heads.",
    )
    head_dim: int = key(
        MISSING,
        least=1,
        most=2**16,
        effect="numbers",
        help="Width of a head.",
    )
    ffn_dim: int = key(
        MISSING,
        least=1,
        most=2**24,
        effect="numbers",
        may_differ=("report", "study"),
        help="Width of SwiGLU; in a MoE model, width of the dense layers before the experts.",
    )
    match_params_to: str | None = key(
        None,
        effect="numbers",
        kind=("text", "run"),
        may_differ=("report", "study"),
        help="Variant whose parameter count this model matches by changing its FFN width. "
        "Loading the config solves for `ffn_dim`, or for `moe.expert_dim` with experts.",
    )
    match_flops_to: str | None = key(
        None,
        effect="numbers",
        kind=("text", "run"),
        may_differ=("report", "study"),
        help="Variant whose training FLOPs per token this model matches by changing the same "
        "width.",
    )
    vocab_size: int = key(
        MISSING,
        least=1,
        most=2**24,
        effect="numbers",
        help="Rows of the embedding and the output; must be at least the tokenizer's size.",
    )
    seq_len: int = key(
        "${seq_len}",
        least=1,
        most=2**27,
        effect="numbers",
        kind="run",
        help="Number of positions with a RoPE table; follows `seq_len`, so set only `seq_len`.",
    )
    attention: AttentionConfig = MISSING
    moe: MoEConfig = field(default_factory=MoEConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = key(
        False,
        effect="numbers",
        help="Apply RMSNorm over head_dim to queries and keys, before RoPE.",
    )
    tie_embeddings: bool = key(
        False,
        effect="numbers",
        help="Use the weight of the embedding for the output as well.",
    )
    norm_eps: float = key(
        1e-5,
        above=0,
        effect="numbers",
        help="Added to the mean square inside RMSNorm.",
    )
    init_std: float = key(
        0.02,
        above=0,
        effect="numbers",
        may_differ="report",
        help="Standard deviation of matrices, truncated at 3 standard deviations. For wo and "
        "w2, divided by sqrt(2 n_layers).",
    )
    embed_init_std: float | None = key(
        None,
        above=0,
        effect="numbers",
        help="Standard deviation of the token embeddings; null: `init_std`.",
    )
    init_match: InitMatch = key(
        InitMatch.none,
        effect="numbers",
        kind="run",
        help="write: scale initial `wo` so that attention writes the same RMS as `standard`.",
    )
    init_seed: int = key(
        "${seed}",
        effect="numbers",
        kind=("seed", "run"),
        help="Seed of initial values; a value depends on seed, parameter name and position.",
    )
    z_loss: float = key(
        0.0,
        least=0,
        effect="numbers",
        may_differ="report",
        help="Weight of mean(logsumexp(logits)^2) in the loss (PaLM, arXiv 2204.02311, section 5).",
    )
    loss_chunk: int | None = key(
        None,
        least=1,
        most=2**27,
        effect="speed",
        help="Tokens per chunk of logits in the loss; null: chosen for the device.",
    )

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
