"""The terms of the objective, and a loss that computes the logits of one chunk of tokens at a time.

Shapes: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffllm.model.attention.ops import at_least_float32
from diffllm.model.auto_setting import ASKED, AutoSetting

if TYPE_CHECKING:
    from diffllm.model.config import ModelConfig

GPU_CHUNK = 4096
CPU_CHUNK = 512
LARGE_CPU_CHUNK = 2048
LARGE_WEIGHT = 2**22
"""Elements of an output weight whose float32 gradient (16 MiB) exceeds the caches of a CPU core."""
LARGE_LOGITS = 2**25
"""Maximum number of logits in a chunk of more than `CPU_CHUNK` tokens (128 MiB in float32)."""


class Term(Enum):
    """A term of the objective; each member is (metric, weight_key, divisor).

    metric: name of the metric that is the weighted mean of the term over the global batch.
    weight_key: config key of the weight, below `model.`; None means weight 1.
    divisor: count by which a sum over the global batch becomes a mean. "targets" are targets that
        the loss does not ignore, "tokens" are positions that are not padding. A term with divisor
        "tokens" must be differentiable in `TrainOutput.losses`, because the training step corrects
        its divisor in the objective.
    """

    cross_entropy = ("train/loss", None, "targets")
    z_loss = ("train/z_loss", "z_loss", "targets")
    balance_loss = ("train/balance_loss", "moe.balance_loss", "tokens")
    router_z_loss = ("train/router_z_loss", "moe.router_z_loss", "tokens")

    def __init__(self, metric: str, weight_key: str | None, divisor: str):
        self.metric = metric
        self.weight_key = weight_key
        self.divisor = divisor

    def weight(self, model: ModelConfig) -> float:
        if self.weight_key is None:
            return 1.0
        weight: float = attrgetter(self.weight_key)(model)
        return weight


Losses = dict[Term, Tensor]
"""Terms without their weights, each summed over tokens: scalars, float32 or wider."""


def loss_chunk(setting: int | None, device: torch.device, vocab_size: int, dim: int) -> AutoSetting:
    """Return the number of tokens per chunk of logits, and the reason for this number.

    The number is `setting` if given. Otherwise it depends on the device type and on the size of the
    output weight.
    """
    if setting is not None:
        return AutoSetting(setting, ASKED)
    if device.type == "cuda":
        return AutoSetting(GPU_CHUNK, "each chunk reads and writes the weight's gradient once")
    if vocab_size * dim >= LARGE_WEIGHT:
        chunk = min(LARGE_CPU_CHUNK, max(CPU_CHUNK, LARGE_LOGITS // vocab_size))
        return AutoSetting(chunk, "each chunk reads and writes a large weight's gradient once")
    return AutoSetting(CPU_CHUNK, "logits of more tokens exceed the cache")


def chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_weight: float,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cross-entropy nll and the z-loss z of a chunk of n tokens, and a gradient.

    The gradient is that of nll + z_weight * z with respect to the logits of the chunk.

    Args:
        hidden: (n, D).
        weight: output weight, (V, D).
        targets: (n,) int64; negative targets are ignored.
        needs_grad: whether to compute the gradient.

    Returns:
        nll, the sum of -log p(target) in nats; z, the sum of logsumexp(logits)^2; and the gradient
        (n, V) in the dtype of `hidden`. If `needs_grad` is False, an empty tensor takes the place
        of the gradient.
    """
    logits = hidden @ weight.T
    dtype = at_least_float32(logits.dtype)
    log_probs = torch.log_softmax(logits, dim=-1, dtype=dtype)
    valid = (targets >= 0).to(log_probs.dtype)
    index = targets.clamp_min(0).unsqueeze(1)
    picked = log_probs.gather(1, index)
    # logsumexp is logit - log p of any token, so a second reduction is not needed.
    lse = (logits.gather(1, index) - picked).squeeze(1)
    nll = -(picked.squeeze(1) * valid).sum()
    z = (lse.square() * valid).sum()
    if not needs_grad:
        return nll, z, hidden.new_empty(0)
    scale = valid * (1 + 2 * z_weight * lse)
    # In place, because the log probabilities are the largest tensor of a chunk.
    grad = log_probs.exp_().mul_(scale.unsqueeze(1))
    grad = minus_one_hot(grad, index, valid)
    return nll, z, grad.to(hidden.dtype)


def minus_one_hot(probs: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Subtract valid[i] from probs[i, index[i, 0]] for each row i; return the result (n, V).

    `index` is (n, 1). `valid` is (n,) and contains 0 or 1. The result may overwrite `probs`.
    """
    # Compiled code fuses a comparison, but a scatter would write and reread all probabilities.
    if torch.compiler.is_compiling():
        vocabulary = torch.arange(probs.shape[1], device=probs.device)
        is_target = vocabulary == index  # (n, V)
        return torch.where(is_target, probs - valid.unsqueeze(1), probs)
    return probs.scatter_add_(1, index, -valid.unsqueeze(1))


def add_weight_gradient(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """Return total + grad_logits.T @ hidden, where a `total` of None counts as 0.

    Shapes: total (V, D), grad_logits (n, V), hidden (n, D). The result may overwrite `total`.
    """
    is_half = hidden.dtype != at_least_float32(hidden.dtype)
    if hidden.is_cuda and is_half:
        # cuBLAS sums in float32 and adds `total` in one call.
        if total is None:
            return torch.mm(grad_logits.T, hidden, out_dtype=torch.float32)
        return torch.addmm(total, grad_logits.T, hidden, out_dtype=torch.float32, out=total)
    if total is None:
        return grad_logits.T @ hidden
    if is_half:
        return total.to(torch.float32).add_(grad_logits.T @ hidden)
    return total.addmm_(grad_logits.T, hidden)


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function whose forward pass computes the loss and all gradients chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_weight: float,
        chunk: int,
        compute: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = any(ctx.needs_input_grad[:2])
        nll = z = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Without a gradient, `hidden` is a placeholder for `grad_hidden` in the loop.
        grad_hidden = torch.empty_like(hidden) if needs_grad else hidden
        grad_weight = None
        chunks = zip(
            hidden.split(chunk), targets.split(chunk), grad_hidden.split(chunk), strict=True
        )
        for chunk_hidden, chunk_targets, grad_chunk in chunks:
            chunk_nll, chunk_z, grad_logits = compute(
                chunk_hidden, weight, chunk_targets, z_weight, needs_grad
            )
            nll = nll + chunk_nll
            z = z + chunk_z
            # Gradients in the forward pass: a backward pass would compute all logits again.
            if needs_grad:
                torch.mm(grad_logits, weight, out=grad_chunk)
                grad_weight = add_weight_gradient(grad_weight, grad_logits, chunk_hidden)
        if needs_grad:
            assert grad_weight is not None
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(nll, z)
        return nll + z_weight * z, nll, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale = grads[0].view(1)
        scaled = []
        for grad in ctx.saved_tensors:
            # Write in the final dtype: a product in float32 would allocate another large tensor.
            out = torch.empty_like(grad, dtype=ctx.dtype)
            scaled.append(torch.mul(grad, scale, out=out))
        grad_hidden, grad_weight = scaled
        return grad_hidden, grad_weight, None, None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_weight: float = 0.0,
    chunk: int = 2048,
    compute: Any = chunk_loss,
) -> tuple[Tensor, Losses]:
    """Compute the objective nll + z_weight * z for the logits `hidden @ weight.T`.

    Returns the objective, a differentiable scalar in float32 or wider, and the detached terms nll
    and z.

    Args:
        hidden: (N, D).
        weight: (V, D), in the dtype of `hidden`.
        targets: (N,) int64; negative targets are ignored.
        z_weight: weight of the z-loss (PaLM, arXiv 2204.02311, section 5).
        chunk: number of tokens per chunk of logits.
        compute: `chunk_loss`, or `chunk_loss` compiled.
    """
    total, nll, z = _ChunkedLoss.apply(hidden, weight, targets, z_weight, chunk, compute)
    return total, {Term.cross_entropy: nll, Term.z_loss: z}


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 2048) -> Tensor:
    """Compute -log p(target) of each token in nats: (N,) in float32 or wider.

    Tokens with a negative target have loss 0. For the arguments, see `chunked_cross_entropy`.
    """
    losses = []
    chunks = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    for chunk_hidden, chunk_targets in chunks:
        logits = chunk_hidden @ weight.T
        dtype = at_least_float32(logits.dtype)
        log_probs = torch.log_softmax(logits, dim=-1, dtype=dtype)
        # An ignored target may be any negative number, but an index must be at least 0.
        index = chunk_targets.clamp_min(0).unsqueeze(1)
        picked = log_probs.gather(1, index).squeeze(1)
        is_valid = chunk_targets >= 0
        losses.append(torch.where(is_valid, -picked, 0.0))
    return torch.cat(losses)
