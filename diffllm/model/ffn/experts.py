"""SwiGLU experts with stacked weights, and the matrix products with these weights.

Shapes: M rows (one per token and chosen expert), E experts, D model width, F expert width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.torch_versions import IS_ROCM
from diffllm.model.auto_setting import AutoSetting, dtype_name

ALIGNMENT = 16
"""A grouped product needs rows whose size in bytes is a multiple of this number."""
MOST_GROUPS = 1024
"""Torch has no grouped product on CUDA for this number of experts or more."""
JOIN_FROM = 4
"""Mean rows per expert, divided by F, from which joining gate and up is worth copying weights."""
GROUPED = "grouped"
LOOPED = "one per expert"


class Experts(nn.Module):
    """E SwiGLU experts with stacked weights; each input row passes through one expert."""

    adjacent = ("w1", "w3")
    """Two parameters that may share one contiguous (E, 2 F, D) tensor, in this order, as the halves
    [:, :F] and [:, F:]. Gate and up are then one product without a copy."""

    def __init__(self, n_experts: int, dim: int, expert_dim: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.activation: Any = weighted_swiglu

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Compute weights[i] * expert(x[i]) for each row i of x: (M, D) in the dtype of x.

        The factor weights[i] is applied before `w2`, so that the gradient of weights[i] does not
        need the output of `w2`.

        Args:
            x: rows (M, D), sorted by expert.
            weights: factor on each row, (M,).
            counts: number of rows per expert, (E,) int64.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        joining = rows_to_join(x.device, x.dtype, self.w1, self.w3)
        fewest_rows = joining.value
        if fewest_rows is not None and len(x) >= fewest_rows * len(counts):
            gate_up = [expert_linear(x, self.w1, self.w3, ends, False)]
        else:
            gate = expert_linear(x, self.w1, None, ends, False)
            up = expert_linear(x, self.w3, None, ends, False)
            gate_up = [gate, up]
        hidden = self.activation(weights, *gate_up)
        return expert_linear(hidden, self.w2, None, ends, False)


def weighted_swiglu(weights: Tensor, *gate_up: Tensor) -> Tensor:
    """Return weights[i] * silu(gate[i]) * up[i] for each row i: (M, F) in the dtype of gate.

    `weights` is (M,). `gate_up` is gate and up, (M, F) each, or their concatenation (M, 2 F).
    """
    if len(gate_up) == 1:
        gate_up = gate_up[0].chunk(2, 1)
    gate, up = gate_up
    hidden = F.silu(gate) * up
    factors = weights.to(gate.dtype).unsqueeze(1)  # (M, 1)
    return hidden * factors


def grouped_product(
    device: torch.device, dtype: torch.dtype, n_experts: int, widths: tuple[int, int]
) -> AutoSetting:
    """Choose one matrix product for all experts (`GROUPED`), or one per expert (`LOOPED`).

    `widths` are the input and output widths of the product, in any order.
    """
    if device.type not in ("cpu", "cuda"):
        return AutoSetting(LOOPED, f"torch has no grouped product on {device.type}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return AutoSetting(LOOPED, f"torch has no grouped product in {dtype_name(dtype)}")
    if n_experts >= MOST_GROUPS:
        return AutoSetting(LOOPED, f"torch groups fewer than {MOST_GROUPS} experts")
    if any(width * dtype.itemsize % ALIGNMENT for width in widths):
        return AutoSetting(LOOPED, f"row sizes must be multiples of {ALIGNMENT} bytes")
    if device.type == "cuda" and dtype == torch.bfloat16:
        return AutoSetting(
            GROUPED, "one kernel on Hopper and Blackwell, a loop in torch on other GPUs"
        )
    return AutoSetting(GROUPED, "a loop in torch")


def takes_groups(x: Tensor, n_experts: int, widths: tuple[int, int]) -> bool:
    if len(x) == 0:
        return False
    return grouped_product(x.device, x.dtype, n_experts, widths).value == GROUPED


def leaves_garbage(device: torch.device) -> bool:
    """Return whether grouped products leave weight gradients of unused experts uninitialised.

    True on Blackwell and on ROCm.
    """
    if device.type == "cpu":
        return False
    if IS_ROCM:
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return major > 9


def rows_to_join(device: torch.device, dtype: torch.dtype, w1: Tensor, w3: Tensor) -> AutoSetting:
    """Choose how many rows per expert are enough to multiply `w1` and `w3` in one product.

    The value is a minimum for the mean number of rows per expert; with fewer rows, `w1` and `w3`
    have one product each. If the value is None, they have one product each for any number of rows.
    """
    n_experts, width, dim = w1.shape
    if device.type != "cuda" or dtype != torch.bfloat16:
        return AutoSetting(None, "joined in bf16 on CUDA only")
    widths = (width, dim)
    if grouped_product(device, dtype, n_experts, widths).value != GROUPED:
        return AutoSetting(None, "not grouped")
    if strides_are_adjacent(w1, w3):
        return AutoSetting(0, "adjacent weights")
    return AutoSetting(JOIN_FROM * width, "joining copies the weights")


def strides_are_adjacent(w1: Tensor, w3: Tensor) -> bool:
    _, width, dim = w1.shape
    halves = (2 * width * dim, dim, 1)
    return w1.shape == w3.shape and w1.stride() == w3.stride() == halves


def joined(w1: Tensor, w3: Tensor) -> Tensor:
    """Concatenate `w1` and `w3`, both (E, F, D), to (E, 2 F, D); return a view if possible."""
    n_experts, width, dim = w1.shape
    bytes_per_expert = width * dim * w1.element_size()
    end_of_w1 = w1.data_ptr() + bytes_per_expert  # for the first expert
    storage_of_w1 = w1.untyped_storage().data_ptr()
    storage_of_w3 = w3.untyped_storage().data_ptr()
    # A view beyond the storage of w1 would be invalid, even if w3 happens to follow in memory.
    share_storage = storage_of_w1 == storage_of_w3
    if share_storage and strides_are_adjacent(w1, w3) and w3.data_ptr() == end_of_w1:
        return w1.as_strided((n_experts, 2 * width, dim), w1.stride())
    return torch.cat((w1, w3), 1)


# Custom operations, because compilers support grouped products only in bf16.


@torch.library.custom_op("diffllm::expert_linear", mutates_args=())
def expert_linear(
    x: Tensor, weight: Tensor, second_weight: Tensor | None, ends: Tensor, transposed: bool
) -> Tensor:
    """Return weight[e] @ x[i] for each row i of x (M, in): (M, out). Row i belongs to expert e.

    Args:
        weight: (E, out, in), in the dtype of x.
        second_weight: if given, a second weight (E, out, in); the result is then (M, 2 out).
        ends: (E,) int32, the index after the last row of each expert; x is sorted by expert.
        transposed: multiply by transposed weights: x is then (M, out), or (M, 2 out) with
            `second_weight`, and the result is (M, in).
    """
    if second_weight is not None:
        weight = joined(weight, second_weight)
    if transposed:
        weight = weight.transpose(1, 2)
    n_experts, out, width = weight.shape
    widths = (out, width)
    if takes_groups(x, n_experts, widths):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    # This loop waits for the device, because the values of `ends` determine shapes.
    rows_by_expert = split_by_expert(x, ends)
    products = []
    for rows, expert_weight in zip(rows_by_expert, weight, strict=True):
        products.append(rows @ expert_weight.T)
    return torch.cat(products)


@torch.library.custom_op("diffllm::expert_weight_grad", mutates_args=())
def expert_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Compute the gradient of the argument `weight` of `expert_linear`: (E, out, in).

    Args:
        grad: gradient of the output, (M, out).
        x: input rows, (M, in), sorted by expert.
        ends: (E,) int32, the index after the last row of each expert.
    """
    widths = (grad.shape[1], x.shape[1])
    if takes_groups(x, len(ends), widths):
        weight_grad = F.grouped_mm(grad.t(), x, offs=ends)
        if leaves_garbage(x.device):
            counts = ends.diff(prepend=ends.new_zeros(1))
            is_unused = counts == 0
            weight_grad.masked_fill_(is_unused[:, None, None], 0)
        return weight_grad
    grads_by_expert = split_by_expert(grad, ends)
    rows_by_expert = split_by_expert(x, ends)
    products = []
    for rows_grad, rows in zip(grads_by_expert, rows_by_expert, strict=True):
        products.append(rows_grad.T @ rows)
    return torch.stack(products)


def split_by_expert(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.tensor_split(ends.tolist()[:-1])


@expert_linear.register_fake
def _(
    x: Tensor, weight: Tensor, second_weight: Tensor | None, ends: Tensor, transposed: bool
) -> Tensor:
    _, out, width = weight.shape
    if transposed:
        return x.new_empty(len(x), width)
    if second_weight is not None:
        out = 2 * out
    return x.new_empty(len(x), out)


@expert_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return a gradient for each argument of `expert_linear`, or None if it has no gradient.

    The gradients of `weight` and `second_weight` are computed by one product each. A single product
    would return both gradients in one tensor, and its halves would need copies.
    """
    x, weight, second_weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = expert_linear(grad, weight, second_weight, ends, True)
    if second_weight is None:
        grad_weight = expert_weight_grad(grad, x, ends)
        return grad_x, grad_weight, None, None, None
    first_half, second_half = grad.chunk(2, 1)
    grad_weight = expert_weight_grad(first_half, x, ends)
    grad_second = expert_weight_grad(second_half, x, ends)
    return grad_x, grad_weight, grad_second, None, None


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, second_weight, ends, _ = inputs
    ctx.save_for_backward(x, weight, second_weight, ends)


expert_linear.register_autograd(linear_backward, setup_context=save_inputs)
