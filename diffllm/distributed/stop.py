"""Stopping together: a signal to any rank ends every rank at the same step."""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class StopFlag:
    """Set by SIGTERM or SIGINT; the ranks agree on it with one collective a step.

    The collective of a step runs while the next step computes, so nobody waits for it, and all
    ranks see the same answer one step later. A second SIGINT interrupts at once.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.work: Any = None
        self.previous = {
            s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)
        }

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether any rank had been signalled by the previous call; call once a step."""
        if self.group is None:
            return self.signal is not None
        stop = False
        if self.work is not None:
            self.work.wait()
            stop = bool(self.flag.item())
        self.flag.fill_(self.signal is not None)
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return stop

    def close(self) -> None:
        """Finish the pending collective and restore the signal handlers."""
        if self.work is not None:
            self.work.wait()
        for number, handler in self.previous.items():
            signal.signal(number, handler)
