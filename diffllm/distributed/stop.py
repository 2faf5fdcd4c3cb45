"""Stopping together: a signal or an unreadable file on any rank ends all ranks at the same step."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from diffllm.core.errors import AgreedByAll, DataError
from diffllm.distributed.launcher import report_signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler takes the machine back; a person's Ctrl-C is not among them."""


class StoppedEarly(BaseException):
    """A signal, its argument, arrived before training began."""


class StopRequest:
    """The request to stop this process, by SIGTERM, SIGUSR1 or SIGINT, in the main thread.

    Unless `deferred` is set, the first signal raises StoppedEarly, because there is nothing to
    save. Later signals are only noted, except SIGINT after another signal: KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received = 0
        self.deferred = False
        self.saved: Callable[[], str] = lambda: "nothing is saved"
        self.come = False
        self.previous: dict[int, Any] = {}
        # A handler waits for the main thread to be back from a collective, these bytes do not.
        # Never closed: a thread may still read.
        self.bytes, end = os.pipe()
        os.set_blocking(self.bytes, False)
        os.set_blocking(end, False)
        if threading.current_thread() is not threading.main_thread():
            return  # which alone gets signals
        self.previous_end = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        self.previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received, number
        if again and number == signal.SIGINT:
            report_signal(f"stopped at once; {self.saved()}")
            raise KeyboardInterrupt
        if not again and not self.deferred:
            raise StoppedEarly(signal.Signals(number))
        if number == signal.SIGINT:
            report_signal("stopping after this step; press again to stop now")

    def has_come(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.come |= any(number in SIGNALS for number in os.read(self.bytes, 4096))
        return self.come

    def close(self) -> None:
        if self.previous:
            signal.set_wakeup_fd(self.previous_end)
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class Agreed(NamedTuple):
    """Flags of all ranks together."""

    stopping: signal.Signals | None
    save: bool
    failed: bool


class Agreement:
    """An exchange of flags between ranks: one small asynchronous collective per step.

    No rank waits for it; all ranks see the same flags one step later, or at once on one rank.
    """

    def __init__(self, request: StopRequest, timeout: int):
        self.request, self.group = request, None
        if dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.delay = int(self.group is not None)
        """Number of calls until all ranks see a flag: 0 on one rank, else 1."""
        self.flags = torch.zeros(3, dtype=torch.int32)
        self.work: Any = None

    def all_reduce_flags(self, save: bool = False, failed: bool = False) -> Agreed:
        """Exchange flags, on every rank once per step; return those of `delay` calls before."""
        number = self.request.received
        if self.group is not None:
            mine = torch.tensor([number, save, failed], dtype=torch.int32)
            number, save, failed = 0, False, False
            if self.work is not None:
                self.work.wait()
                number, save, failed = self.flags.tolist()
            self.flags.copy_(mine)
            self.work = dist.all_reduce(
                self.flags, dist.ReduceOp.MAX, group=self.group, async_op=True
            )
        return Agreed(signal.Signals(number) if number else None, bool(save), bool(failed))

    def close(self) -> None:
        if self.work is not None:
            self.work.wait()


T = TypeVar("T")


def raise_together(error: DataError | None, more: str = "") -> None:
    """Raise AgreedByAll on every rank if any rank has an error; `more` ends the message."""
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    for rank, text in enumerate(texts):
        if text is not None:
            raise AgreedByAll(f"rank {rank}: " * (len(texts) > 1) + text + more)


def read_together(read: Callable[[], T]) -> T:
    """Return `read()`, or raise AgreedByAll on every rank if one rank's call raises DataError."""
    result, failed = None, None
    try:
        result = read()
    except DataError as error:
        failed = error
    raise_together(failed)
    return result  # type: ignore[return-value]
