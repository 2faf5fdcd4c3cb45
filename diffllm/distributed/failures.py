"""Data that some rank cannot read: all ranks hear of it and stop at the same place."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from diffllm.core.errors import AgreedByAll, DataError

T = TypeVar("T")


def raise_together(error: DataError | None, more: str = "") -> None:
    """Raise AgreedByAll on every rank if any of them has an error; every rank must call this.

    Args:
        more: ends the line that says it.
    """
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    for rank, text in enumerate(texts):
        if text is not None:
            raise AgreedByAll(f"rank {rank}: " * (len(texts) > 1) + text + more)


def together(read: Callable[[], T]) -> T:
    """Return the result of `read`, or raise AgreedByAll on every rank if it fails on any of them.

    Every rank must call this.
    """
    result, failed = None, None
    try:
        result = read()
    except DataError as error:
        failed = error
    raise_together(failed)
    return result  # type: ignore[return-value]
