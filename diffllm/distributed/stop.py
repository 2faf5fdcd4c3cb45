"""Stop all ranks at the same step after a signal or a read error on any rank."""

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
"""Signals of a scheduler, after which the run is requeued; SIGINT (Ctrl-C) is not included."""


class StoppedEarly(BaseException):
    """Raised when a signal stops a run before training begins; `args[0]` is the signal."""


class StopRequest:
    """Installs handlers of SIGTERM, SIGUSR1 and SIGINT; `close` restores the previous handlers.

    The handler stores the number of the signal in `received`. Before `defer` is called, the first
    signal raises StoppedEarly. A SIGINT after any earlier signal raises KeyboardInterrupt. In all
    other cases the handler raises nothing.
    """

    def __init__(self) -> None:
        self.received = 0
        self.deferred = False
        self.saved: Callable[[], str] = lambda: "this process has trained no step"
        self.cancelled = ""
        """Why `cancel` requested the stop of the run; "" if a signal did."""
        self.has_come_by_pipe = False
        self.previous: dict[int, Any] = {}
        # A Python handler runs only after the main thread returns from a collective; the wakeup
        # pipe gets a signal immediately. The pipe is never closed: a thread may still read.
        self.bytes, end = os.pipe()
        os.set_blocking(self.bytes, False)
        os.set_blocking(end, False)
        if threading.current_thread() is not threading.main_thread():
            return  # Python calls signal handlers only in the main thread.
        self.previous_end = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        self.previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def report_saved(self, saved: Callable[[], str]) -> None:
        """From now on, print the result of `saved` when a second Ctrl-C stops the run.

        `saved` describes the newest checkpoint.
        """
        self.saved = saved

    def defer(self) -> None:
        """From now on, the first signal only sets `received`: the run saves before it stops."""
        self.deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_repeated = bool(self.received)
        self.received = number
        if is_repeated and number == signal.SIGINT:
            report_signal(f"stopped immediately; {self.saved()}")
            raise KeyboardInterrupt
        if not is_repeated and not self.deferred:
            raise StoppedEarly(signal.Signals(number))
        if number == signal.SIGINT:
            report_signal("stopping after this step; press Ctrl-C again to stop now")

    def cancel(self, reason: str) -> None:
        """Request a stop as SIGTERM does, but without a requeue; may be called in any thread.

        Do nothing if a signal has been received.
        """
        if not self.received:
            self.cancelled, self.received = reason, signal.SIGTERM
            report_signal(f"stopping after this step: {reason}")

    def has_come(self) -> bool:
        """Return whether a signal has come, also while the main thread waits in a collective."""
        with contextlib.suppress(BlockingIOError):
            self.has_come_by_pipe |= any(number in SIGNALS for number in os.read(self.bytes, 4096))
        return self.has_come_by_pipe or self.received != 0

    def close(self) -> None:
        if self.previous:
            signal.set_wakeup_fd(self.previous_end)
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class Agreed(NamedTuple):
    """Flags of all ranks, combined: a flag is set if at least one rank has set it."""

    stopping: signal.Signals | None
    """Signal that asks the run to stop; None if no rank has received a signal."""
    save: bool
    """Whether a checkpoint is due."""
    failed: bool
    """Whether a rank failed to read data."""


class Agreement:
    """Combines the flags of all ranks (see `Agreed`) with one asynchronous all-reduce per step.

    The all-reduce starts at the end of a step and runs during the next step, so ranks receive the
    combined flags one step later. With a world size of 1, there is no all-reduce and no delay.
    """

    def __init__(self, request: StopRequest, timeout: int):
        self.request, self.group = request, None
        if dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.delay = int(self.group is not None)
        """Number of calls until all ranks get a flag: 0 on one rank, else 1."""
        self.flags = torch.zeros(3, dtype=torch.int32)
        self.work: Any = None

    def all_reduce_flags(self, save: bool = False, failed: bool = False) -> Agreed:
        """Start to combine the flags of all ranks; return the combined flags of the previous call.

        The first call returns flags that are not set. If the world size is 1, each call returns its
        own flags instead. Every rank must call this once per step.

        Args:
            save: whether a checkpoint is due.
            failed: whether this rank failed to read data.
        """
        number = self.request.received
        if self.group is not None:
            flags_of_rank = torch.tensor([number, save, failed], dtype=torch.int32)
            number, save, failed = 0, False, False
            if self.work is not None:
                # This all-reduce began one step ago, so it has usually ended.
                self.work.wait()
                number, save, failed = self.flags.tolist()
            # Only now: the previous all-reduce has written to the same tensor.
            self.flags.copy_(flags_of_rank)
            self.work = dist.all_reduce(
                self.flags, dist.ReduceOp.MAX, group=self.group, async_op=True
            )
        return Agreed(signal.Signals(number) if number else None, bool(save), bool(failed))

    def close(self) -> None:
        if self.work is not None:
            self.work.wait()


T = TypeVar("T")


def raise_together(error: DataError | None, suffix: str = "") -> None:
    """Raise AgreedByAll on every rank if `error` is not None on at least one rank.

    The message of AgreedByAll is the error of one such rank, followed by `suffix`. Every rank must
    call this function.
    """
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    for rank, text in enumerate(texts):
        if text is not None:
            prefix = f"rank {rank}: " if len(texts) > 1 else ""
            raise AgreedByAll(f"{prefix}{text}{suffix}")


def read_together(read: Callable[[], T]) -> T:
    """Return `read()`; if `read` raises DataError on any rank, raise AgreedByAll on every rank.

    Every rank must call this function.
    """
    result = None
    failure = None
    try:
        result = read()
    except DataError as error:
        failure = error
    raise_together(failure)
    return result  # type: ignore[return-value]
