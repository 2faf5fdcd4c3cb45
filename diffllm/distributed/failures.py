"""Data that some rank cannot read: all ranks hear of it and stop at the same place."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from diffllm.core.errors import AgreedByAll, AgreedError, DataError

T = TypeVar("T")


class DataFailed(DataError, AgreedError, AgreedByAll):
    """Data that some rank could not read; every rank raises it."""


def raise_together(error: DataError | None, more: str = "") -> None:
    """Raise DataFailed on every rank where one of them has had an error; every rank calls it.

    Args:
        more: ends the line that says it.
    """
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    for rank, text in enumerate(texts):
        if text is not None:
            raise DataFailed(f"rank {rank}: " * (len(texts) > 1) + text + more)


def together(read: Callable[[], T]) -> T:
    """Return what a function reads, or raise DataFailed on every rank where one of them cannot read
    it; every rank calls it."""
    result, failed = None, None
    try:
        result = read()
    except DataError as error:
        failed = error
    raise_together(failed)
    return result  # type: ignore[return-value]
