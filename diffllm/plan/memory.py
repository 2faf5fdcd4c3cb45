"""Recorder of the memory and the collectives of a process; it intercepts tensor operations."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from diffllm.plan.collectives import Call, Collective

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


SILENT = ("barrier", "waittensor", "wraptensorautograd")


def call_of(func: Any, args: tuple, out: Any) -> Call | None:
    """Return the collective that the torch operation `func` starts.

    Return None if `func` sends no data to another rank. `args` are the positional arguments of
    `func`, and `out` is its result. Raises NotImplementedError if `func` communicates but is not in
    `Collective`.
    """
    if getattr(func, "namespace", None) not in NAMESPACES:
        return None
    name = func._schema.name.partition("::")[2].replace("_", "")
    if name in SILENT:
        return None
    kind = next((kind for kind in Collective if kind.value.replace("-", "") in name), None)
    if kind is None:
        raise NotImplementedError(
            f"unknown collective {func}: the number of sent bytes cannot be computed; "
            f"use one of {', '.join(kind.value for kind in Collective)}"
        )
    size = max(sum(t.nbytes for t in tensors_in(part)) for part in (*args, out))
    ranks = tuple(sorted(dist.get_process_group_ranks(process_group_of(args))))
    return Call(kind, size, ranks) if len(ranks) > 1 else None


def tensors_in(value: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def process_group_of(args: tuple) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # the argument is the operation of a reduction
                continue
    name: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
    return _resolve_process_group(name)


class Kind(Enum):
    """The purpose of allocated memory."""

    parameters = "parameters"
    gradients = "gradients"
    optimizer = "optimizer state"
    activations = "activations"
    """Results of a forward pass that the backward pass needs."""
    communication = "communication"
    """Gathered parameters, gradients before reduction, buffers of collectives."""
    working = "working memory"
    other = "other state"


@dataclass(eq=False, slots=True)
class MemoryBlock:
    size: int
    born: int
    kind: Kind | None = None


class Peak(NamedTuple):
    """Largest memory use of a process in bytes, in total and by purpose.

    `event` is the number of allocations, resizes and releases recorded up to the peak.
    """

    total: int
    by_kind: dict[Kind, int]
    event: int


class Memory:
    def __init__(self) -> None:
        self.live: dict[int, MemoryBlock] = {}
        self.events: list[tuple[MemoryBlock, int]] = []
        self.pretended = False
        """Count new storages as empty while True."""

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Record storage resizes in this context; ignore memory of DTensor's shape inference."""
        resize = torch.UntypedStorage.resize_
        shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def found_out(*args: Any, **kwargs: Any) -> Any:
            with patch.object(self, "pretended", True):
                return shapes(*args, **kwargs)

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if block := self.live.get(storage._cdata):
                self.events.append((block, size - block.size))
                block.size = size

        with (
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(ShardingPropagator, shapes.__name__, found_out),
        ):
            yield

    def block(self, tensor: Tensor) -> MemoryBlock:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return self.live[key]
        block = MemoryBlock(0 if self.pretended else storage.nbytes(), len(self.events))
        weakref.finalize(storage, self._freed, key).atexit = False
        self.live[key] = block
        self.events.append((block, block.size))
        return block

    def _freed(self, key: int) -> None:
        block = self.live.pop(key)
        self.events.append((block, -block.size))

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        for tensor in tensors:
            self.block(tensor).kind = kind

    def label_since(self, event: int, kind: Kind) -> None:
        """Set the kind of live blocks that have no kind and were allocated in `events[event:]`."""
        for block in self.live.values():
            if block.born >= event and block.kind is None:
                block.kind = kind

    def now(self) -> int:
        return len(self.events)

    def peak(self, start: int) -> Peak:
        """Return the largest memory use from just before `events[start]` until now."""
        totals = list(accumulate((change for _, change in self.events), initial=0))
        at = max(range(start, len(totals)), key=totals.__getitem__)
        by_kind: Counter[Kind] = Counter()
        for block, change in self.events[:at]:
            by_kind[block.kind or Kind.working] += change
        return Peak(totals[at], {kind: by_kind[kind] for kind in Kind}, at)


class Observer(TorchDispatchMode):
    """Context manager that records memory use in `memory` and collectives in `calls`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.calls: list[Call] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code is observed at run time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # torch dispatches again with the wrapped tensors
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            # A wrapper, such as the result of an asynchronous collective, allocates no memory.
            if tensor.device.type != "meta" and not is_traceable_wrapper_subclass(tensor):
                self.memory.block(tensor)
        # Operations of FSDP copy tensors to and from buffers of collectives.
        moves = getattr(func, "namespace", None) == "fsdp"
        if call := call_of(func, args, out):
            self.calls.append(call)
            moves = call.kind is not Collective.all_to_all
        if moves:
            for tensor in tensors_in((args, kwargs, out)):
                block = self.memory.block(tensor)
                block.kind = block.kind or Kind.communication
        return out
