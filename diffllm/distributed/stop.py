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
        self.received = 0
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.work: Any = None
        stops = (signal.SIGTERM, signal.SIGINT)
        self.previous = {number: signal.signal(number, self._on_signal) for number in stops}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def agreed(self) -> str | None:
        """The signal that some rank had received by the previous call; call once a step."""
        number = self.received
        if self.group is not None:
            number = 0
            if self.work is not None:
                self.work.wait()
                number = int(self.flag.item())
            self.flag.fill_(self.received)
            self.work = dist.all_reduce(
                self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True
            )
        return signal.Signals(number).name if number else None

    def close(self) -> None:
        """Finish the pending collective and restore the signal handlers."""
        if self.work is not None:
            self.work.wait()
        for number, handler in self.previous.items():
            signal.signal(number, handler)
