"""Simulation of the GPU memory of compiled graphs and fused kernels, without computation.

The partitioner of torch's default backend chooses the tensors that a forward graph saves for the
backward graph. Inside a graph, only these results take memory: outputs of the graph, inputs and
outputs of library kernels such as matrix products and attention, and results of reductions. All
other results are fused into the kernels that read them.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from diffllm.distributed.recompute import is_kernel
from diffllm.model import loss
from diffllm.model.attention import ops
from diffllm.plan.memory import NAMESPACES

aten, prims = torch.ops.aten, torch.ops.prims

FUSED_TOO = {
    aten.arange, aten.cat, aten.clone, aten.constant_pad_nd, aten.copy, aten.embedding, aten.empty,
    aten.full, aten.full_like, aten.gather, aten.index, aten.index_select, aten.scalar_tensor,
    aten.slice_scatter, aten.where, prims.convert_element_type, prims.iota,
}  # fmt: skip
"""Operations that compiled kernels fuse although torch does not tag them as pointwise."""

RANDOM_STATE_BYTES = 16


@contextmanager
def compiling() -> Iterator[None]:
    """In this context, functions from torch.compile allocate memory but compute nothing.

    They allocate as much memory as with torch's default backend on a GPU. Their inputs must be fake
    tensors (FakeTensorMode).
    """

    def compiler(graph: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        in_memory = nodes_in_memory(graph.graph)

        def run(args: list[Any]) -> Any:
            return AllocatingInterpreter(graph, in_memory).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # `run` frees its arguments
        return run

    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table,
    )
    torch._dynamo.reset()
    real_compile = torch.compile

    def compile(function: Any, fullgraph: bool = False, **_: Any) -> Any:
        # Static, because there is one shape. Options of Inductor have no effect here.
        return real_compile(function, fullgraph=fullgraph, backend=backend, dynamic=False)

    with patch.object(torch, "compile", compile):
        yield


class AllocatingInterpreter(fx.Interpreter):
    """Interpreter of an fx graph that allocates memory for results but computes nothing.

    Collectives are called, so that an observer sees them. Attention kernels are called, so that
    selective activation checkpointing sees them. Only the nodes in the set `in_memory` get
    memory for their results. All other nodes count as fused into the kernels that read them.
    """

    def __init__(self, graph: fx.GraphModule, in_memory: set[fx.Node]):
        super().__init__(graph)
        self.in_memory = in_memory

    def run_node(self, n: fx.Node) -> Any:
        source = viewed_node(n)
        if source.op == "call_function" and source not in self.in_memory:
            # A fused node holds its inputs, so that they live until the kernel that reads them.
            return [self.env[input_node] for input_node in n.all_input_nodes]
        if n.op != "call_function" or is_view(n) or is_called(n.target):
            return super().run_node(n)
        if fuses(n):
            # A fused kernel reuses the memory of its inputs: free inputs with their last use here.
            for last_used in self.user_to_last_uses.get(n, ()):
                self.env[last_used] = None
        return allocate_result(n)


def is_called(target: Any) -> bool:
    """Return whether `target` is a collective or an attention kernel."""
    is_collective = getattr(target, "namespace", "") in NAMESPACES
    return is_collective or (isinstance(target, OpOverload) and is_kernel(target))


def allocate_result(node: fx.Node) -> Any:
    if "val" in node.meta:
        return tree_map(memory_for, node.meta["val"])
    # A random operation is wrapped to save the random state, so only the parts have shapes.
    parts = {}
    for user in node.users:
        if user.target is operator.getitem:
            _, index = user.args
            parts[index] = allocate_result(user)
    return parts if parts else random_state_memory()


def memory_for(like: Any) -> Any:
    """Allocate memory for a tensor like `like`; return values that are no tensors unchanged."""
    if not isinstance(like, Tensor):
        return like
    # Only the random state that a wrapped random operation returns: torch makes its size symbolic.
    is_symbolic = not all(isinstance(size, int) for size in like.shape)
    if is_symbolic:
        return random_state_memory()
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def random_state_memory() -> Tensor:
    """Allocate memory of the size of a GPU's random state, without initial values."""
    return torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8)


def nodes_in_memory(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose results take memory; see the docstring of this module."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        # Kernels that are not fused read and write whole tensors.
        is_kernel_call = node.op == "call_function" and not fuses(node)
        if is_kernel_call or node.op == "output":
            nodes.update(map(viewed_node, node.all_input_nodes))
        if is_kernel_call or reduces(node):
            nodes.add(node)
    # Inputs of the graph have memory already.
    return {node for node in nodes if node.op == "call_function"}


def viewed_node(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # a part of a tuple shares its memory
        return True
    return bool(getattr(node.target, "is_view", False))


def reduces(node: fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def fuses(node: fx.Node) -> bool:
    """Return whether the compiler fuses `node` into one kernel with the nodes that it reads."""
    if is_view(node) or reduces(node):
        return True
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    packet = getattr(node.target, "overloadpacket", None)
    return is_pointwise or packet in FUSED_TOO


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """In this context, kernels take as much memory as on a GPU.

    RMSNorm outside compiled code and `loss.add_weight_gradient` are replaced by functions that
    allocate memory but compute nothing. Attention in bf16 does not change to float32, as it can on
    CPUs.
    """

    composed = F.rms_norm

    def rms_norm(
        x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return composed(x, shape, weight, eps)
        return _RMSNorm.apply(x, weight)

    def add_weight_gradient(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
        if total is not None:
            return total
        # float32 as on a GPU, where the product sums in float32 without a copy.
        shape = grad_logits.shape[1], hidden.shape[1]
        return torch.zeros(shape, dtype=torch.float32, device=hidden.device)

    with (
        patch.object(F, "rms_norm", rms_norm),
        patch.object(loss, "add_weight_gradient", add_weight_gradient),
        patch.object(ops, "in_float32", lambda *_: False),
    ):
        yield


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that returns zeros and saves as many bytes for backward as a fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # The kernel saves one number per row, in float32 also for bf16 inputs.
        rows = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)
