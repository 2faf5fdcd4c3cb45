"""AdamW, learning-rate schedules, and the decision whether to skip an optimizer update."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key


class Schedule(Enum):
    """Learning rate after warm-up: cosine decay, or wsd (constant rate, then linear decay)."""

    cosine = "cosine"
    wsd = "wsd"


@dataclass
class OptimConfig:
    """Settings of AdamW (Loshchilov and Hutter, arXiv 1711.05101) and of the learning rate."""

    lr: float = key(
        1e-3,
        above=0,
        most=1e20,
        effect="numbers",
        may_differ="report",
        help="Peak learning rate.",
    )
    beta1: float = key(
        0.9,
        least=0,
        below=1,
        effect="numbers",
        may_differ="report",
        help="Decay rate of AdamW's running mean of gradients.",
    )
    beta2: float = key(
        0.95,
        least=0,
        below=1,
        effect="numbers",
        may_differ="report",
        help="Decay rate of AdamW's running mean of squared gradients.",
    )
    eps: float = key(
        1e-8,
        above=0,
        effect="numbers",
        may_differ="report",
        help="Added to AdamW's denominator.",
    )
    weight_decay: float = key(
        0.1,
        least=0,
        effect="numbers",
        may_differ="report",
        help="A step scales matrices by 1 - learning rate * weight_decay, but never below 0.",
    )
    clip_norm: float = key(
        1.0,
        least=0,
        effect="numbers",
        may_differ="report",
        help="Largest global gradient norm; 0 turns clipping off.",
    )
    schedule: Schedule = key(
        Schedule.cosine,
        effect="numbers",
        help="Schedule of the learning rate after warm-up.",
    )
    warmup_steps: int = key(
        100,
        least=0,
        effect="numbers",
        help="Steps over which the learning rate rises linearly from 0 to `lr`.",
    )
    decay_fraction: float = key(
        0.2,
        least=0,
        most=1,
        effect="numbers",
        help="For wsd (warm-up, stable, decay): share of all steps with linear decay.",
    )
    min_lr_ratio: float = key(
        0.1,
        least=0,
        most=1,
        effect="numbers",
        help="Final learning rate as a share of `lr`.",
    )

    def validate(self, steps: int) -> None:
        if self.warmup_steps > steps:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps} must be at most steps={steps}"
            )


class SkipStep(Enum):
    """Which optimizer updates to skip.

    off: skip no update.
    nonfinite: skip updates whose loss or gradient norm is not finite.
    spike: as nonfinite, but also skip updates whose loss or gradient norm is a spike (see `Guard`).
    """

    off = "off"
    nonfinite = "nonfinite"
    spike = "spike"


@dataclass
class BudgetConfig:
    """Cost of a run that determines its length, so that runs of all variants cost the same."""

    flops: float | None = key(
        None,
        above=0,
        effect="numbers",
        fact="steps",
        resumable=True,
        help="Training FLOPs of the run; determines steps, rounded to the nearest number. Forward "
        "and backward; attention counts visible keys only.",
    )


@dataclass
class ProtectionConfig:
    """Budget of the training, and protection from non-finite or unusually large updates."""

    skip_step: SkipStep = key(
        SkipStep.nonfinite,
        effect="numbers",
        help="Updates to skip: none, updates with nan or infinity, or also loss spikes.",
    )
    max_consecutive_skips: int = key(
        20,
        least=1,
        effect="numbers",
        may_differ="report",
        resumable=True,
        help="Consecutive skipped updates after which a run saves and ends as diverged.",
    )
    budget: BudgetConfig = field(default_factory=BudgetConfig)


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, in a run of `steps` steps.

    The rate rises linearly to `lr` in `warmup_steps` steps, and later falls to `min_lr_ratio * lr`.
    With schedule=cosine, the rate falls as half a cosine directly after warm-up. With schedule=wsd,
    the rate stays at `lr` after warm-up, then falls linearly over the last
    `decay_fraction * steps` steps.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    start = cfg.warmup_steps
    if cfg.schedule is Schedule.wsd:
        start = max(start, steps - max(1, round(cfg.decay_fraction * steps)))
    progress = max(0.0, (step - start + 1) / max(1, steps - start))
    cosine = cfg.schedule is Schedule.cosine
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if cosine else 1 - progress
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * remaining)


def build_optimizer(params: Mapping[str, Tensor], cfg: OptimConfig) -> torch.optim.AdamW:
    """Build fused AdamW over named parameters, and allocate the optimizer state.

    Weight decay applies only to tensors with at least two dimensions. Parameters on different
    device meshes are in different groups, because a fused kernel accepts tensors of only one mesh.
    """
    groups: dict[tuple[DeviceMesh | None, bool], list[Tensor]] = {}
    for param in params.values():
        mesh = getattr(param, "device_mesh", None)  # not isinstance: importing DTensor takes 0.5 s
        groups.setdefault((mesh, param.ndim >= 2), []).append(param)
    optimizer = torch.optim.AdamW(
        [
            {"params": group, "decay": cfg.weight_decay if decays else 0.0}
            for (_, decays), group in groups.items()
        ],
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.eps,
        fused=True,
    )
    for param in params.values():
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    set_learning_rate(optimizer, cfg.lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate, and limit weight decay to 1 / lr, so that decay flips no signs."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = group["decay"] if lr * group["decay"] <= 1 else 1 / lr


def update(
    optimizer: torch.optim.AdamW, lr: float, clip_norm: float, grad_norm: Tensor, skip: Tensor
) -> None:
    """Clip all gradients, and update the parameters, unless `skip` is 1.0.

    Args:
        lr: learning rate.
        clip_norm: maximum L2 norm of all gradients together; 0 turns clipping off.
        grad_norm: L2 norm of all gradients together, a float32 scalar on the parameters' device.
        skip: 0.0 or 1.0, a float32 scalar on the same device.
    """
    set_learning_rate(optimizer, lr)
    # Fused AdamW divides the gradients by `grad_scale`, and does nothing if `found_inf` is 1.
    if clip_norm:
        optimizer.grad_scale = ((grad_norm + 1e-6) / clip_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the optimizer state by name, such as `<parameter name>.exp_avg`."""
    tensors = {}
    for name, param in params.items():
        for state, value in optimizer.state[param].items():
            tensors[f"{name}.{state}"] = value
    return tensors


class Guard:
    """Decides which optimizer updates to skip, without a transfer of tensors to the CPU.

    A loss is a spike if it is more than `sigmas` standard deviations above the mean of the last
    `window` finite losses. Before there are `window` finite losses, no loss is a spike. The same
    rule defines spikes of the gradient norm.
    """

    def __init__(self, mode: SkipStep, window: int, sigmas: float, device: torch.device):
        self.mode, self.sigmas = mode, sigmas
        self.windows = torch.full((2, window), torch.nan, dtype=torch.float64, device=device)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1.0 if the update with this loss and gradient norm must be skipped, else 0.0.

        Arguments and result are float32 scalars. All ranks must pass the same values.
        """
        if self.mode is SkipStep.off:
            return torch.zeros((), device=loss.device)
        values = torch.stack((loss, grad_norm)).double()
        finite = values.isfinite()
        bad = ~finite
        if self.mode is SkipStep.spike:
            # Until the window is full, its mean is NaN, so every comparison is false.
            mean, std = self.windows.mean(1), self.windows.std(1, correction=0)
            bad = bad | (values - mean > self.sigmas * std)
            moved = torch.cat((self.windows[:, 1:], values[:, None]), dim=1)
            self.windows = torch.where(finite[:, None], moved, self.windows)
        return bad.any().float()

    def load(self, losses: Sequence[float], grad_norms: Sequence[float]) -> None:
        """Restore the last finite losses and gradient norms, oldest first.

        Each sequence has at most `window` values.
        """
        size = self.windows.shape[1]
        padded = [[math.nan] * (size - len(row)) + list(row) for row in (losses, grad_norms)]
        self.windows = torch.tensor(padded, dtype=torch.float64, device=self.windows.device)
