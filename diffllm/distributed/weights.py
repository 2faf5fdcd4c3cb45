"""The float32 parameters that the optimizer updates, and how a model computes with them.

On several ranks FSDP2 shards them. One rank has nothing to gather or reduce, and there FSDP2 would
only cast and copy every parameter in both passes of every micro-batch; it keeps copies instead.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffllm.distributed.experts import expert_ranks
from diffllm.distributed.fsdp import fp32_parameters, local_block
from diffllm.distributed.mesh import Reduce
from diffllm.model.auto_setting import ASKED, AutoSetting
from diffllm.model.init import LocalBlock, whole

LAST_UP_TO = 8 * 2**30
"""The largest float32 gradient of all parameters, in bytes, that waits for the last micro-batch."""


class Weights:
    """The parameters that one rank updates and computes with."""

    choices: dict[str, AutoSetting]
    """The settings that the size of the model decided, by name."""

    params: dict[str, Tensor]
    """Float32 parameters by name, whose `grad` the optimizer reads."""

    def block(self, param: Tensor) -> LocalBlock:
        """Return the part of a parameter of the model that this rank holds, for `Initializer`."""
        raise NotImplementedError

    def begin_micro_batch(self, last: bool) -> None:
        """Prepare for a forward and a backward pass, the `last` of a step or not."""

    def changed(self) -> None:
        """Let the model compute with the values that `params` have now."""

    def reshard(self) -> None:
        """Free what a forward pass without a backward pass left behind."""


class OneRank(Weights):
    """Whole parameters in float32, and one copy of them in the dtype of the computation.

    A copy is made once a step. The gradient of a copy is added to its parameter's, in float32 and
    in place, as soon as the backward pass has it, and then dropped.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        """Give `model` copies in `dtype` as its parameters, all but its `fp32_parameters`."""
        self.choices: dict[str, AutoSetting] = {}
        self.params: dict[str, Tensor] = dict(model.named_parameters())
        self.origins: dict[Tensor, Tensor] = {}
        """The float32 parameter behind each copy."""
        stay = fp32_parameters(model)
        for module in model.modules():
            own = {
                name: param
                for name, param in module.named_parameters(recurse=False)
                if param not in stay and param.dtype != dtype
            }
            for name, empty in empty_copies(own, getattr(module, "adjacent", ()), dtype).items():
                copy = nn.Parameter(empty)
                copy.register_post_accumulate_grad_hook(partial(hand_over, own[name]))
                self.origins[copy] = own[name]
                setattr(module, name, copy)

    def block(self, param: Tensor) -> LocalBlock:
        return whole(self.origins.get(param, param))

    @torch.no_grad()
    def changed(self) -> None:
        if self.origins:
            torch._foreach_copy_(list(self.origins), list(self.origins.values()))


def empty_copies(
    params: dict[str, nn.Parameter], adjacent: tuple[str, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Allocate tensors in `dtype` for the parameters of a module, by name.

    Those named in `adjacent`, each (E, F, D), are the slices [:, i F : (i + 1) F] of one tensor.
    """
    apart = {n: torch.empty_like(p, dtype=dtype) for n, p in params.items() if n not in adjacent}
    neighbours = [name for name in adjacent if name in params]
    if not neighbours:
        return apart
    sizes = [params[name].shape[1] for name in neighbours]
    first = params[neighbours[0]]
    together = first.new_empty((len(first), sum(sizes), first.shape[2]), dtype=dtype)
    return apart | dict(zip(neighbours, together.split(sizes, dim=1), strict=True))


def hand_over(param: Tensor, copy: Tensor) -> None:
    """Add the gradient of a copy to that of its parameter, and drop it."""
    assert copy.grad is not None
    if param.grad is None:
        param.grad = copy.grad.to(param.dtype)
    else:
        param.grad += copy.grad
    copy.grad = None


class Sharded(Weights):
    """Parameters that FSDP2 shards, casts and gathers."""

    def __init__(self, model: Any, reduce: Reduce | None):
        self.model = model
        self.params: dict[str, Tensor] = dict(model.named_parameters())
        self.choices = {"reduce": chosen_reduce(reduce, self.params.values())}
        self.reduce: Reduce = self.choices["reduce"].value

    def block(self, param: Tensor) -> LocalBlock:
        return local_block(param)

    def begin_micro_batch(self, last: bool) -> None:
        self.model.set_requires_gradient_sync(last or self.reduce is Reduce.every)
        self.model.set_requires_all_reduce(last)  # HSDP: once a step

    def reshard(self) -> None:
        self.model.reshard()


def chosen_reduce(asked: Reduce | None, params: Iterable[Tensor]) -> AutoSetting:
    """Decide when gradients of micro-batches are reduced: once a step, where a whole gradient is
    small enough to wait, unless the config says otherwise."""
    if asked is not None:
        return AutoSetting(asked, ASKED)
    # Of experts, a rank computes with its own only.
    size = 4 * sum(param.numel() // expert_ranks(param) for param in params)
    reason = f"a float32 gradient of {size / 2**30:.2g} GiB on every rank"
    return AutoSetting(Reduce.last if size <= LAST_UP_TO else Reduce.every, reason)
