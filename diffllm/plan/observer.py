"""The observer of a training step: memory and network, seen from below the autograd engine."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from diffllm.plan.memory import Kind, Memory
from diffllm.plan.traffic import Call, Collective, call_of, tensors_in


class Observer(TorchDispatchMode):
    """A context that adds every operation's storages to `memory`, its collectives to `calls`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.calls: list[Call] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore the making of compiled code, which is watched when it runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # comes back as operations on the tensors inside
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            if tensor.device.type != "meta":
                self.memory.block(tensor)
        moves = getattr(func, "namespace", None) == "fsdp"
        if call := call_of(func, args, out):
            self.calls.append(call)
            moves = call.kind is not Collective.all_to_all
        if moves:
            for tensor in tensors_in((args, kwargs, out)):
                self.memory.suggest(tensor, Kind.communication)
        return out
