"""Which rank is missing: a heartbeat of every rank, and an end for those that wait in vain.

A thread of every rank writes every second where the rank is. Rank 0 reads all of that, the others
read rank 0's; so a rank costs a write and a read a second, however many there are.
"""

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import DistError

from diffllm.distributed.collectives import newest_collective, waits_in
from diffllm.distributed.stop import StopRequest
from diffllm.distributed.world import World
from diffllm.errors import AgreedError, UserError

BEAT_S = 1.0
SILENT_S = 4.0
"""A rank without a beat for so long is gone, once a collective has failed."""
STOPPING_S = 15.0
"""And so long where a scheduler has asked to stop and will not wait."""
FAILED_COLLECTIVE = re.compile(
    r"gloo|nccl|process ?group|connection (closed|reset)|timed out", re.I
)


class Beat(NamedTuple):
    """Where a rank is."""

    number: int
    place: str
    """"step 41" and the like."""
    waits_in: str | None
    """The collective that it waits in."""
    waits_s: float
    """For how long."""
    stopping: bool
    """It has been asked to stop."""
    left: bool
    """It is done, or has failed for a reason of its own."""
    words: str | None
    """That reason."""


class Watch:
    """Ends this process when a rank is missing, and says which; every rank makes one.

    `traces` may be set to a directory for the stack traces of that moment, `on_end` to something
    that has to happen before the process ends.
    """

    def __init__(self, world: World, timeout: float, request: StopRequest):
        self.rank, self.size, self.request = world.rank, world.size, request
        self.limit = timeout - min(10.0, timeout / 5)  # before a collective says only "timed out"
        self.traces: Path | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.place, self.number, self.words = "the start", 0, ""
        self.closed = threading.Event()
        if self.size == 1:
            return
        self.store = dist.PrefixStore("watch", world.store).clone()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=30))
        self.beats: dict[int, Beat] = {}
        self.heard = dict.fromkeys(range(self.size), time.monotonic())
        self._beat()
        self.thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self.thread.start()

    def reached(self, place: str) -> None:
        """Tell where this rank is."""
        self.place = place

    def close(self) -> None:
        """Leave: from here on nobody waits for this rank."""
        if self.size == 1 or self.closed.is_set():
            return
        self.closed.set()
        self.thread.join()
        with contextlib.suppress(DistError):
            self._beat()

    def blame(self, error: BaseException) -> None:
        """Before an error ends this rank: end with the name of the missing rank if there is one.

        An error of this rank's own is left for the others to read, and returns.
        """
        if self.size == 1 or self.closed.is_set() or isinstance(error, AgreedError):
            return
        if isinstance(error, UserError) or not is_failed_collective(error):
            self.words = f"{type(error).__name__}: " * (not isinstance(error, UserError))
            self.words += " ".join(str(error).split())[:500]
            self.close()
            return
        at = time.monotonic()
        while time.monotonic() < at + SILENT_S + 2 * BEAT_S:
            with contextlib.suppress(DistError):
                self._listen(range(self.size))
                if self._verdict():
                    break
                silent = [r for r in self.beats if self._silence(r) > SILENT_S]
                if silent or self._failed():
                    self._end(diagnosis(self.beats, silent, self.rank, newest_collective()))
            time.sleep(BEAT_S / 4)
        waiting = diagnosis(self.beats, [], self.rank, newest_collective())
        self._end(self._verdict() or waiting or f"a collective failed: {error}")

    def _work(self) -> None:
        """The thread."""
        while not self.closed.wait(BEAT_S):
            try:
                self._beat()
                self._listen(range(self.size) if self.rank == 0 else [0])
                message = self._verdict() or self._judge()
            except DistError as error:
                if self.closed.wait(SILENT_S):  # the others are done, and their store with them
                    return
                at = f", last at {self.beats[0].place}" if 0 in self.beats else ""
                message = (
                    f"the store that the ranks meet in is gone, and with it the process that held "
                    f"it: rank 0{at}, or its launcher ({type(error).__name__})"
                )
            if message:
                self._end(message)

    def _beat(self) -> None:
        self.number += 1
        name, seconds = waits_in()
        left = self.closed.is_set()
        beat = Beat(
            self.number,
            self.place,
            name,
            seconds,
            bool(self.request.received),
            left,
            self.words or None,
        )
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _listen(self, ranks: Any) -> None:
        """Read beats; a rank's that has never come is looked for one by one."""
        known = [r for r in ranks if r in self.beats or self.store.check([f"beat/{r}"])]
        texts = self.store.multi_get([f"beat/{r}" for r in known])
        for rank, text in zip(known, texts, strict=True):
            beat = Beat(*json.loads(text))
            if rank not in self.beats or beat.number != self.beats[rank].number:
                self.heard[rank] = time.monotonic()
            self.beats[rank] = beat

    def _silence(self, rank: int) -> float:
        """Seconds since a rank's last beat; none for one that has left."""
        left = rank in self.beats and self.beats[rank].left
        return 0.0 if left else time.monotonic() - self.heard[rank]

    def _failed(self) -> bool:
        return any(beat.words for beat in self.beats.values())

    def _judge(self) -> str | None:
        """What is wrong, if this rank is the one to find it."""
        watched = range(self.size) if self.rank == 0 else [0]
        stopping = any(beat.stopping for beat in self.beats.values())
        limit = min(self.limit, STOPPING_S) if stopping else self.limit
        silent = [r for r in watched if self._silence(r) > limit]
        stuck = [r for r in watched if r in self.beats and self.beats[r].waits_s > self.limit]
        if not silent and not (stuck and self.rank == 0):
            return None
        return diagnosis(self.beats, silent, self.rank, newest_collective())

    def _verdict(self) -> str | None:
        """What another rank has found."""
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else None

    def _end(self, message: str) -> None:
        """Tell the others, write stack traces, and end the process with code 1."""
        where = self._write_traces(message)
        first = True
        with contextlib.suppress(DistError):
            self.store.set("verdict", message)
            first = self.store.add("said", 1) == 1
        self.on_end()
        if first:
            print(f"error: {message}{where}", file=sys.stderr, flush=True)
        time.sleep(3 * BEAT_S)  # for the others to read it, should the store end with this process
        os._exit(1)

    def _write_traces(self, message: str) -> str:
        if self.traces is None:
            return ""
        try:
            self.traces.mkdir(exist_ok=True)
            with open(self.traces / f"rank-{self.rank:05d}.txt", "w") as file:
                print(f"rank {self.rank} at {self.place}\n{message}\n", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f"; no stack traces: {error}"
        return f"; stack traces in {self.traces}"


def is_failed_collective(error: BaseException) -> bool:
    """Whether a missing rank may have caused it."""
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and bool(FAILED_COLLECTIVE.search(str(error)))
    )


def diagnosis(beats: dict[int, Beat], silent: list[int], own: int, collective: str | None) -> str:
    """One line: which ranks are missing, at what, and which wait for them in what.

    Args:
        silent: ranks without a sign of life.
        own: the rank that asks; it knows the newest collective it called, `collective`.
    """
    waiting = {r: b for r, b in beats.items() if b.waits_in and r not in silent}
    failed = [r for r, b in beats.items() if b.words]
    hanging = [r for r, b in beats.items() if not b.waits_in and not b.left and r != own]
    if failed:
        parts = [f"rank {r} failed at {beats[r].place}: {beats[r].words}" for r in failed]
    elif silent:
        parts = [missing(r, beats.get(r)) for r in silent]
    elif waiting and hanging:
        parts = [f"rank {r} is missing: it hangs at {beats[r].place}" for r in hanging]
    elif waiting:
        parts = ["the ranks wait in different collectives"]
    else:
        return ""
    for rank in [r for r in waiting if r != own][:3]:
        parts.append(f"rank {rank} waits at {beats[rank].place} in {waiting[rank].waits_in}")
    if own in beats and own not in silent and collective:
        parts.append(f"rank {own} waits at {beats[own].place} in {collective}")
    return "; ".join(parts)


def missing(rank: int, beat: Beat | None) -> str:
    """Of a rank without a sign of life."""
    if beat is None:
        return f"rank {rank} is missing: it never started"
    inside = f", in {beat.waits_in}" if beat.waits_in else ""
    return (
        f"rank {rank} is missing: killed, stopped or cut off; its last sign of life is from "
        f"{beat.place}{inside}"
    )
