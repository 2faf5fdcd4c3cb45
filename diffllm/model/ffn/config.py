"""The config of the mixture of experts that takes a feed-forward layer's place."""

from dataclasses import dataclass
from enum import Enum

from diffllm.core.bounds import bounded
from diffllm.core.errors import ConfigError


class Score(Enum):
    """The function that turns a token's router logits into scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Balance(Enum):
    """The tokens over which the load-balancing loss compares experts."""

    sequence = "sequence"
    global_batch = "global_batch"


@dataclass
class MoEConfig:
    """Dropless top-k routing over SwiGLU experts, with balancing by bias, by loss, or both."""

    n_experts: int = bounded(0, least=0, most=2**16)
    """Routed experts of a layer; 0 is a dense model, for which the other fields are not read."""
    top_k: int = bounded(2, least=1, most=2**16)
    """Experts that a token is routed to."""
    expert_dim: int = bounded(0, least=0, most=2**24)
    """Width of each routed and of each shared expert."""
    n_shared: int = bounded(0, least=0, most=2**10)
    """Experts that every token goes to, as one SwiGLU of n_shared * expert_dim."""
    n_dense_layers: int = bounded(0, least=0)
    """Number of first layers that stay dense, `ffn_dim` wide."""
    score: Score = Score.sigmoid
    """Function that makes scores of a router's logits."""
    renormalise: bool = True
    """Make the weights of a token's top_k experts sum to 1."""
    routed_scaling: float = bounded(1.0, above=0)
    """Factor on the routed experts' weights (DeepSeek-V3, arXiv 2412.19437, equation 16)."""
    bias_update_rate: float = bounded(1e-3, least=0)
    """Change of the balancing bias at an optimizer step; 0: no bias. Wang et al., arXiv 2408.15664.
    The default is for sigmoid scores; of softmax, whose scores are 1 / n_experts on average, it
    would be several percent a step from 32 experts on."""
    balance_loss: float = bounded(0.0, least=0)
    """Weight of the load-balancing loss of a layer; the losses of layers are summed."""
    balance_over: Balance = Balance.global_batch
    """Tokens over which the load-balancing loss takes the experts' shares. With sequence as in
    DeepSeek-V3, equations 17 to 20; with global_batch those of the whole batch (Qiu et al., arXiv
    2501.11873), of the optimizer step before."""
    router_z_loss: float = bounded(0.0, least=0)
    """Weight of mean(logsumexp(router logits)^2) of a layer (ST-MoE, arXiv 2202.08906)."""

    def validate(self, n_layers: int) -> None:
        """Raise ConfigError for a mixture that cannot be built."""
        if self.n_experts == 0:
            return
        if self.top_k > self.n_experts:
            raise ConfigError(
                f"model.moe.top_k={self.top_k} must be at most model.moe.n_experts={self.n_experts}"
            )
        if self.expert_dim < 1:
            raise ConfigError(f"model.moe.expert_dim={self.expert_dim} must be at least 1")
        if self.n_dense_layers >= n_layers:
            raise ConfigError(
                f"model.moe.n_dense_layers={self.n_dense_layers} must be less than "
                f"model.n_layers={n_layers}"
            )
