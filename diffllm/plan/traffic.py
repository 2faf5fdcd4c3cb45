"""The collectives of a process: the bytes it sends, and the ranks it sends them to."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Collective(Enum):
    """The kinds of collectives. Their size is that of the larger of input and output, in bytes."""

    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    all_reduce = "all-reduce"
    all_to_all = "all-to-all"
    broadcast = "broadcast"

    def on_the_wire(self, size: int, ranks: int) -> float:
        """Return the bytes that a rank sends: around a ring, or all to all, to the others."""
        if self is Collective.broadcast:
            return size
        return (2 if self is Collective.all_reduce else 1) * size * (ranks - 1) / ranks


SILENT = ("barrier", "waittensor", "wraptensorautograd")


class Call(NamedTuple):
    """One collective of one process."""

    kind: Collective
    size: int
    """Size in bytes."""
    ranks: tuple[int, ...]


def call_of(func: Any, args: tuple, out: Any) -> Call | None:
    """Return the collective that an operation is, None for other operations; raises
    NotImplementedError if it communicates in another way than all of a group together."""
    if getattr(func, "namespace", None) not in NAMESPACES:
        return None
    name = func._schema.name.partition("::")[2].replace("_", "")
    if name in SILENT:
        return None
    kind = next((kind for kind in Collective if kind.value.replace("-", "") in name), None)
    if kind is None:
        raise NotImplementedError(f"what {func} sends cannot be counted")
    size = max(sum(t.nbytes for t in tensors_in(part)) for part in (*args, out))
    ranks = tuple(sorted(dist.get_process_group_ranks(group_of(args))))
    return Call(kind, size, ranks) if len(ranks) > 1 else None


def tensors_in(value: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def group_of(args: tuple) -> dist.ProcessGroup:
    """Find the process group among the arguments of an operation."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # the operation of a reduction
                continue
    name: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
    return _resolve_process_group(name)
