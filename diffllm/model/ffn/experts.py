"""Experts as stacked tensors, and the products that run them on rows sorted by expert.

Shapes: M rows, E experts, D model width, F expert width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.torch_versions import IS_ROCM
from diffllm.model.auto_setting import AutoSetting, dtype_name

ALIGNMENT = 16
"""Rows of the operands of a grouped product must be a multiple of this many bytes."""
MOST_GROUPS = 1024
"""The number of experts from which on torch has no grouped product on CUDA."""
JOIN_FROM = 4
"""Rows an expert over F from which one product for gate and up is worth copying their weights."""
GROUPED = "grouped"
LOOPED = "one an expert"


class Experts(nn.Module):
    """E SwiGLU experts as stacked weights; each runs on its own rows."""

    adjacent = ("w1", "w3")
    """The two parameters that may be allocated, in this order, as the halves [:, :F] and [:, F:] of
    one contiguous (E, 2 F, D): gate and up are then one product without a copy."""

    def __init__(self, n_experts: int, dim: int, expert_dim: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.activation: Any = weighted_swiglu

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Compute weight * w2(silu(w1 x) * w3 x), each row through its expert: (M, D) as x.

        x (M, D) and weights (M,) are sorted by expert; counts (E,) int64 are the rows of each
        expert. The weight is applied before w2: that is the same, and keeps no output for its
        gradient.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        fewest = rows_to_join(x.device, x.dtype, self.w1, self.w3).value
        if fewest is not None and len(x) >= fewest * len(counts):
            gate_up = [expert_linear(x, self.w1, self.w3, ends, False)]
        else:
            gate_up = [expert_linear(x, weight, None, ends, False) for weight in (self.w1, self.w3)]
        return expert_linear(self.activation(weights, *gate_up), self.w2, None, ends, False)


def weighted_swiglu(weights: Tensor, *gate_up: Tensor) -> Tensor:
    """Compute the activation weight * silu(gate) * up: (M, F) in the dtype of gate.

    The weights are (M,) float; gate and up (M, F) each, or side by side in one tensor (M, 2 F).
    """
    gate, up = gate_up if len(gate_up) == 2 else gate_up[0].chunk(2, 1)
    return F.silu(gate) * up * weights.to(gate.dtype).unsqueeze(1)


def grouped_product(
    device: torch.device, dtype: torch.dtype, n_experts: int, widths: tuple[int, int]
) -> AutoSetting:
    """Choose `GROUPED`, one product for all experts, or `LOOPED`; `widths` of rows in and out."""
    if device.type not in ("cpu", "cuda"):
        return AutoSetting(LOOPED, f"torch groups none on {device.type}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return AutoSetting(LOOPED, f"torch groups none in {dtype_name(dtype)}")
    if n_experts >= MOST_GROUPS:
        return AutoSetting(LOOPED, f"torch groups fewer than {MOST_GROUPS}")
    if any(width * dtype.itemsize % ALIGNMENT for width in widths):
        return AutoSetting(LOOPED, f"rows have to be multiples of {ALIGNMENT} bytes")
    if device.type == "cuda" and dtype == torch.bfloat16:
        return AutoSetting(GROUPED, "a kernel on Hopper and Blackwell, torch's own loop elsewhere")
    return AutoSetting(GROUPED, "torch's own loop")


def takes_groups(x: Tensor, n_experts: int, widths: tuple[int, int]) -> bool:
    return len(x) > 0 and grouped_product(x.device, x.dtype, n_experts, widths).value == GROUPED


def leaves_garbage(device: torch.device) -> bool:
    """Whether an expert without rows may get an uninitialised gradient, as on Blackwell."""
    return device.type != "cpu" and (IS_ROCM or torch.cuda.get_device_capability(device)[0] > 9)


def rows_to_join(device: torch.device, dtype: torch.dtype, w1: Tensor, w3: Tensor) -> AutoSetting:
    """Return the mean rows of an expert from which gate and up are one product; None if never."""
    n_experts, width, dim = w1.shape
    if device.type != "cuda" or dtype != torch.bfloat16:
        return AutoSetting(None, "joined in bf16 on CUDA only")
    if grouped_product(device, dtype, n_experts, (width, dim)).value != GROUPED:
        return AutoSetting(None, "not grouped")
    if strides_are_adjacent(w1, w3):
        return AutoSetting(0, "their weights lie side by side")
    return AutoSetting(JOIN_FROM * width, "their weights lie apart")


def strides_are_adjacent(w1: Tensor, w3: Tensor) -> bool:
    """Whether w1 and w3 have the strides of the halves [:, :F] and [:, F:] of one (E, 2 F, D)."""
    _, width, dim = w1.shape
    return w1.shape == w3.shape and w1.stride() == w3.stride() == (2 * width * dim, dim, 1)


def joined(w1: Tensor, w3: Tensor) -> Tensor:
    """Join two tensors (E, F, D) to one (E, 2 F, D): a view if they are its halves."""
    n_experts, width, dim = w1.shape
    behind = w1.data_ptr() + width * dim * w1.element_size()
    one = w1.untyped_storage().data_ptr() == w3.untyped_storage().data_ptr()
    if one and strides_are_adjacent(w1, w3) and w3.data_ptr() == behind:
        return w1.as_strided((n_experts, 2 * width, dim), w1.stride())
    return torch.cat((w1, w3), 1)


# Each is one operation to compilers, which know grouped products in bf16 only.


@torch.library.custom_op("diffllm::expert_linear", mutates_args=())
def expert_linear(
    x: Tensor, weight: Tensor, beside: Tensor | None, ends: Tensor, transposed: bool
) -> Tensor:
    """Multiply rows (M, in), sorted by expert, with their expert's weight: (M, out).

    Args:
        weight: (E, out, in), in the dtype of x.
        beside: another one of that shape, for (M, 2 out): both products side by side.
        ends: (E,) int32, the index behind the last row of each expert.
        transposed: go back, as a gradient does: from rows as wide as that output to (M, in).
    """
    weight = weight if beside is None else joined(weight, beside)
    weight = weight.transpose(1, 2) if transposed else weight
    n_experts, out, width = weight.shape
    if takes_groups(x, n_experts, (out, width)):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return torch.cat([rows @ w.T for rows, w in zip(of_experts(x, ends), weight, strict=True)])


@torch.library.custom_op("diffllm::expert_weight_grad", mutates_args=())
def expert_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Compute a weight's gradient (E, out, in) from the output's (M, out) and x (M, in)."""
    if takes_groups(x, len(ends), (grad.shape[1], x.shape[1])):
        out = F.grouped_mm(grad.t(), x, offs=ends)
        if leaves_garbage(x.device):
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            out.masked_fill_(empty[:, None, None], 0)
        return out
    pairs = zip(of_experts(grad, ends), of_experts(x, ends), strict=True)
    return torch.stack([rows_grad.T @ rows for rows_grad, rows in pairs])


def of_experts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.tensor_split(ends.tolist()[:-1])


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, beside: Tensor | None, ends: Tensor, transposed: bool) -> Tensor:
    out = weight.shape[1] * (1 if beside is None else 2)
    return x.new_empty(len(x), weight.shape[2] if transposed else out)


@expert_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Give each weight a product of its own: halves of one gradient would be copied to be added."""
    x, weight, beside, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = expert_linear(grad, weight, beside, ends, True)
    parts = (grad, None) if beside is None else grad.chunk(2, 1)
    grads = (None if part is None else expert_weight_grad(part, x, ends) for part in parts)
    return grad_x, *grads, None, None


expert_linear.register_autograd(
    linear_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:-1])
)
