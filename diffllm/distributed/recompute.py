"""Activation checkpointing: blocks recompute activations in the backward pass, to save memory."""

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KERNELS = (
    "aten::_scaled_dot_product", "torch_attn::", "flash_attn::", "flex_attention",
    "diffllm::document_attention",
)  # fmt: skip
"""Prefixes of the operator names of attention kernels: SDPA, torch's kernels for variable lengths,
flash-attn, FlexAttention, and `document_attention`."""
# torch warns once about in-place operations inside checkpointed regions; blocks have none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)


class ActivationCheckpointing(Enum):
    """The activations of a block that the backward pass recomputes.

    none: no activations. selective: all but the results of attention kernels. full: all.
    """

    none = "none"
    selective = "selective"
    full = "full"


def checkpointed(
    forward: Callable[..., Any], policy: ActivationCheckpointing, one_graph: bool
) -> Callable[..., Any]:
    """Return `forward`, which takes positional arguments, with activation checkpointing.

    `one_graph` is whether torch.compile may later compile the returned function, as one graph.
    """
    if policy is ActivationCheckpointing.none:
        return forward
    options: dict[str, Any] = {}
    if policy is ActivationCheckpointing.selective and one_graph:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_kernels)
    elif policy is ActivationCheckpointing.selective:
        options["context_fn"] = kept_and_reused

    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def is_kernel(op: Any) -> bool:
    return bool(op.name().startswith(KERNELS))


def keep_kernels(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kernel(op) else CheckpointPolicy.PREFER_RECOMPUTE


def kept_and_reused() -> tuple["KernelResults", "KernelResults"]:
    """Return the contexts of a forward pass and of its recomputation.

    torch's own contexts need the same operations in both. If experts are divided between ranks,
    FSDP and the exchange of tokens perform other operations in the recomputation.
    """
    results: deque[Any] = deque()
    return KernelResults(results, reuse=False), KernelResults(results, reuse=True)


class KernelResults(TorchDispatchMode):
    """Stores the results of attention kernels, or returns stored results instead."""

    supports_higher_order_operators = True

    def __init__(self, results: deque[Any], reuse: bool):
        super().__init__()
        self.results, self.reuse = results, reuse

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code calls kernels at run time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_kernel(func):
            return func(*args, **(kwargs or {}))
        if self.reuse:
            return self.results.popleft()
        out = func(*args, **(kwargs or {}))
        # Without `detach`, the stored results would keep the graph of the forward pass.
        self.results.append(tree_map_only(Tensor, Tensor.detach, out))
        return out
