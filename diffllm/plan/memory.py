"""Recorder of the memory and the collectives of a process; it intercepts tensor operations."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
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

from diffllm.plan.step import Call, Collective, Kind, Peak

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
SILENT = ("barrier", "waittensor", "wraptensorautograd")
"""Operations of these namespaces that send no tensor; names without underscores."""


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
    # Names contain the kind with additions, such as all_gather_into_tensor and _allgather_base_.
    kinds = [kind for kind in Collective if kind.value.replace("-", "") in name]
    if not kinds:
        raise NotImplementedError(
            f"unknown collective {func}: the number of sent bytes cannot be computed; "
            f"use one of {', '.join(kind.value for kind in Collective)}"
        )
    sizes = [bytes_of(part) for part in (*args, out)]
    group = process_group_of(args)
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if len(ranks) < 2:
        return None
    return Call(kinds[0], max(sizes), ranks)


def tensors_in(value: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def bytes_of(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def process_group_of(args: tuple) -> dist.ProcessGroup:
    for arg in args:
        # c10d operations get the group as an object, functional collectives get its name.
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # the argument is the operation of a reduction
                continue
    name: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
    return _resolve_process_group(name)


@dataclass(eq=False, slots=True)
class MemoryBlock:
    size: int
    born: int
    kind: Kind | None = None


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
        infer_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def infer_without_memory(*args: Any, **kwargs: Any) -> Any:
            with patch.object(self, "pretended", True):
                return infer_shapes(*args, **kwargs)

        # FSDP2 frees and refills gathered parameters by a resize of the storage. A resize is no
        # operation of the dispatcher, so `Observer` does not see it.
        def resize_and_record(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            block = self.live.get(storage._cdata)
            if block:
                self.events.append((block, size - block.size))
                block.size = size

        with (
            patch.object(torch.UntypedStorage, "resize_", resize_and_record),
            patch.object(ShardingPropagator, infer_shapes.__name__, infer_without_memory),
        ):
            yield

    def block(self, tensor: Tensor) -> MemoryBlock:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return self.live[key]
        size = 0 if self.pretended else storage.nbytes()
        block = MemoryBlock(size, born=len(self.events))
        # The storage, not the tensor, because views share the storage of a tensor.
        finalizer = weakref.finalize(storage, self._freed, key)
        finalizer.atexit = False
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
        changes = [change for _, change in self.events]
        totals = list(accumulate(changes, initial=0))
        event = max(range(start, len(totals)), key=totals.__getitem__)
        # Blocks get their kinds after their allocation, so the sums by kind need a second pass.
        by_kind = dict.fromkeys(Kind, 0)
        for block, change in self.events[:event]:
            kind = block.kind or Kind.working
            by_kind[kind] += change
        return Peak(totals[event], by_kind, event)


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
        is_communication = getattr(func, "namespace", None) == "fsdp"
        call = call_of(func, args, out)
        if call:
            self.calls.append(call)
            is_communication = call.kind is not Collective.all_to_all
        if is_communication:
            for tensor in tensors_in((args, kwargs, out)):
                block = self.memory.block(tensor)
                block.kind = block.kind or Kind.communication
        return out
