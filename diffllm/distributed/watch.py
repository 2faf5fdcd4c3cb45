"""Detection of ranks that hang or were killed; all other ranks then exit with an error message.

Once per second, a thread of every rank writes a heartbeat to the key-value store. The heartbeat
contains the current activity of the rank and its last collectives. Rank 0 reads all heartbeats, and
the other ranks read the heartbeat of rank 0. A second thread decides whether a rank is missing.
The second thread never accesses the store, because the store may hang too.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from diffllm.core.errors import AgreedError, UserError
from diffllm.core.printing import to_stderr
from diffllm.distributed.heartbeats import (
    LOST,
    Beat,
    diagnosis,
    missing_text,
    not_called,
    stopped_children,
)
from diffllm.distributed.stack_traces import write_traces
from diffllm.distributed.stop import StoppedEarly, StopRequest
from diffllm.distributed.world import Calls, World, is_failed_collective, recorded

BEAT_S = 1.0
SILENT_S = 4.0
"""Seconds without a heartbeat until a rank counts as missing, after a failed collective."""
STOPPING_S = 15.0
"""Seconds without a heartbeat after a request to stop; a scheduler kills processes soon."""
EXIT_S = 10.0
"""Maximum seconds from a rank's own error to its exit, even if other ranks delay the exit."""
LAST_WORDS_S = 5.0
"""Maximum seconds for a failing rank to inform other ranks and to write stack traces."""
LEAVE_S = 60.0
"""Seconds that rank 0 waits for other ranks at the end: its process may host the store."""


class Watch:
    """Detects missing ranks in background threads; if a rank is missing, exits this process.

    The error message names the missing rank. If the world size is 1, a thread exits this process
    when this process hangs, for example while the data loader waits for a disk.

    Args:
        timeout: timeout of collectives in seconds.
        on_end: called in a background thread before this process exits, to restore the terminal.
    """

    def __init__(
        self,
        world: World,
        timeout: float,
        request: StopRequest,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.rank = world.rank
        self.size = world.size
        self.request = request
        # Shorter than the timeout of collectives, whose error does not name a rank.
        self.limit = timeout - min(10.0, timeout / 5)
        self.on_end = on_end
        self.traces: Path | None = None
        self.record_stall: Callable[[str], None] = lambda message: None
        self.send_alert: Callable[[str], None] = lambda message: None
        self.words = ""
        self.verdict = ""
        self.patience = LEAVE_S
        self.stopped: signal.Signals | None = None
        self.error: BaseException | None = None
        self.reached("the start")
        self.closed = threading.Event()
        self.ending = threading.Lock()
        self.beating = threading.Lock()
        self.watched: Iterable[int] = range(self.size) if self.rank == 0 else [0]
        if self.size == 1:
            threading.Thread(target=self._judge_itself, name="watch", daemon=True).start()
            return
        # A separate connection: a call in the main thread may hold the connection of `world`.
        store = world.store.clone()  # type: ignore[attr-defined]
        self.world = replace(world, store=store)
        self.store = dist.PrefixStore("watch", store)
        self.store_gone = False
        self.answered = time.monotonic()
        self.beats: dict[int, Beat] = {}
        self.heard = dict.fromkeys(range(self.size), self.answered)
        self._beat(0)
        # Two threads: a hanging store must not stop the thread that judges.
        for work in (self._talk, self._judge):
            threading.Thread(target=work, name="watch", daemon=True).start()

    def record_in(self, traces: Path, record_stall: Callable[[str], None]) -> None:
        """From now on, write stack traces to the directory `traces`, and record each stall.

        One rank calls `record_stall` with the message of a stall, in a background thread.
        """
        self.traces = traces
        self.record_stall = record_stall

    def alert_by(self, send_alert: Callable[[str], None]) -> None:
        """From now on, call `send_alert` with the message of each stall; only for rank 0."""
        self.send_alert = send_alert

    def reached(self, place: str) -> None:
        self.place = place
        self.since = time.monotonic()
        self.waits: tuple[str, float] | None = None

    @contextlib.contextmanager
    def waiting(self, event: str) -> Iterator[None]:
        """Within this context, report in heartbeats that this rank waits for `event`."""
        self.waits = event, time.monotonic()
        try:
            yield
        finally:
            self.waits = None

    def activity(self) -> str:
        # The attribute is read once, because another thread may change it.
        waits = self.waits
        if waits is None:
            return self.place
        event, _ = waits
        return f"{self.place}, waiting for {event}"

    def close(self) -> None:
        """Stop watching, and tell other ranks that this rank has finished or failed.

        If this is rank 0 and it has not failed, wait until all other ranks have called `close`,
        because rank 0 may host the store. Wait at most `self.patience` seconds.
        """
        if self.closed.is_set():
            return
        self.closed.set()
        if self.size == 1:
            return
        deadline = time.monotonic()
        if self.rank == 0 and not self.words:
            deadline += self.patience
        with contextlib.suppress(DistError):
            self._beat(-1)
            while time.monotonic() < deadline:
                self._listen()
                # Iterate only over complete beats, to which the other thread adds no rank.
                have_all_begun = len(self.beats) == self.size
                if have_all_begun and all(beat.has_left for beat in self.beats.values()):
                    break
                time.sleep(BEAT_S / 20)

    def blame(self, error: BaseException) -> None:
        """Inform other ranks of `error`, which ends this process.

        If `error` does not come from a failed collective, return; if this process still runs 10
        seconds later, it is killed. After a failed collective, raise StoppedEarly if a signal has
        stopped another rank. Otherwise, print which rank is missing or has failed, and exit.
        """
        if self.size == 1 or self.closed.is_set() or isinstance(error, AgreedError):
            return
        if isinstance(error, StoppedEarly):
            with contextlib.suppress(DistError):
                self.world.stop(*error.args)
            self.patience = STOPPING_S
            self.close()
            return
        if not is_failed_collective(error):
            words = _shortened(error)
            if not isinstance(error, UserError):
                words = f"{type(error).__name__}: {words}"
            # One assignment, because another thread writes this attribute to the store.
            self.words = words
            self.close()
            faulthandler.dump_traceback_later(EXIT_S, exit=True, file=open(os.devnull, "wb"))  # noqa: SIM115
            return
        # A local name: the other thread may overwrite the attribute with an older answer.
        stopped = self.stopped
        with contextlib.suppress(DistError):
            stopped = self.world.stopped() or stopped
        if stopped:
            self.patience = STOPPING_S
            raise StoppedEarly(stopped) from error
        self.error = error
        calls = recorded()
        self.heard = dict.fromkeys(range(self.size), time.monotonic())
        self.watched = range(self.size)
        deadline = time.monotonic() + SILENT_S + 3 * BEAT_S
        message = ""
        while not message and time.monotonic() < deadline:
            time.sleep(BEAT_S / 4)
            message = self.verdict or self._store_message(SILENT_S)
            silent = [rank for rank in self._silent(SILENT_S) if rank in self.beats]
            has_failed = any(beat.words for beat in self._latest_beats.values())
            if not message and (silent or has_failed):
                message = self._diagnosis(silent, calls)
        if not message:
            message = self._diagnosis([], calls)
        if not message:
            message = f"a collective failed: {_shortened(error)}"
        self._end(message)

    def _talk(self) -> None:
        """Write and read heartbeats once per second, in a background thread."""
        number = 0
        while not self.closed.wait(BEAT_S):
            number += 1
            try:
                self._beat(number)
                self._listen()
                if self.store.check(["verdict"]):
                    self.verdict = self.store.get("verdict").decode()
                self.stopped = self.world.stopped()
            except DistError:
                self.store_gone = True
                return
            self.answered = time.monotonic()

    def _judge(self) -> None:
        """Exit this process if another rank is missing; runs in a background thread."""
        while not self.closed.wait(BEAT_S):
            if self.stopped and self.rank and not self.closed.wait(SILENT_S):
                self.close()  # Rank 0 prints why the run stopped.
                os._exit(0)
            others = self._latest_beats.values()
            is_stopping = self.request.has_come() or any(beat.stopping for beat in others)
            limit = min(self.limit, STOPPING_S) if is_stopping else self.limit
            message = self.verdict or self._store_message(limit)
            silent = self._silent(limit)
            is_stuck = self.rank == 0 and any(self._is_stuck(beat) for beat in others)
            if not message and (silent or is_stuck):
                message = self._diagnosis(silent, recorded())
            # The store may also be missing because the launch has just ended normally: wait.
            if message and not (self.store_gone and self.closed.wait(SILENT_S)):
                self._end(message)

    def _is_stuck(self, beat: Beat) -> bool:
        """Return whether a rank has waited too long for ranks that do not call its collective."""
        # Check both ages: a save in the background may wait long for another rank's slow disk
        # during normal steps.
        age_s = min(beat.calls.age_s, beat.place_s)
        if age_s <= self.limit:
            return False
        return bool(not_called(self.beats, beat))

    def _judge_itself(self) -> None:
        """Warn if this process hangs, and exit this process if it continues to hang.

        Runs in a background thread; used only if the world size is 1.
        """
        reported_wait = None
        stop_requested_at = None
        while not self.closed.wait(BEAT_S):
            # The attribute is read once, because the main thread may change it.
            waits = self.waits
            waited = 0.0
            if waits is not None:
                _, since = waits
                waited = time.monotonic() - since
            message = f"this process hangs at {self.activity()}"
            stopped = stopped_children()
            if stopped:
                message += f" (stopped: process {', '.join(stopped)})"
            if self.request.has_come() and stop_requested_at is None:
                stop_requested_at = time.monotonic()
            limit = min(self.limit, STOPPING_S) if stop_requested_at else self.limit
            if waited > limit:
                self._end(message)
            if stop_requested_at:
                unchanged_since = max(stop_requested_at, self.since)
                if time.monotonic() - unchanged_since > self.limit:
                    self._end(message)  # The process hangs outside of a `waiting` context.
            if waited > STOPPING_S and waits is not reported_wait:
                reported_wait = waits
                to_stderr(f"warning: {message}, for {waited:.0f} s now")
                self.send_alert(message)
                # Not in this thread: the disk with the run directory may hang, too.
                threading.Thread(target=self.record_stall, args=[message], daemon=True).start()

    @property
    def _latest_beats(self) -> dict[int, Beat]:
        # A copy: another thread adds heartbeats, and a dict must not grow during an iteration.
        return dict(self.beats)

    def _diagnosis(self, silent: list[int], calls: Calls) -> str:
        beat = Beat(0, self.activity(), 0.0, calls, stopping=False, has_left=False, words="")
        return diagnosis({**self.beats, self.rank: beat}, silent)

    def _beat(self, number: int) -> None:
        with self.beating:  # Otherwise a thread could overwrite the last heartbeat of `close`.
            beat = Beat(
                number,
                self.activity(),
                time.monotonic() - self.since,
                recorded(),
                stopping=self.request.has_come(),
                has_left=self.closed.is_set(),
                words=self.words,
            )
            self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _listen(self) -> None:
        """Read into `self.beats` the newest heartbeat of each rank in `self.watched`."""
        started = []
        keys = []
        for rank in self.watched:
            key = f"beat/{rank}"
            # Reading a missing key would wait, so check the ranks without a heartbeat so far.
            if rank in self.beats or self.store.check([key]):
                started.append(rank)
                keys.append(key)
        texts = self.store.multi_get(keys)
        for rank, text in zip(started, texts, strict=True):
            beat = Beat(*json.loads(text))
            # Compare numbers, not times of the sender: the clocks of two machines differ.
            if rank not in self.beats or beat.number != self.beats[rank].number:
                self.heard[rank] = time.monotonic()
            self.beats[rank] = beat._replace(calls=Calls(*beat.calls))

    def _silent(self, limit: float) -> list[int]:
        if self.store_gone:
            return []
        beats = self._latest_beats
        silent = []
        for rank in self.watched:
            has_left = rank in beats and beats[rank].has_left
            # The reference is the last answer of the store: a slow store delays all heartbeats.
            if not has_left and self.answered - self.heard[rank] > limit:
                silent.append(rank)
        return silent

    def _store_message(self, limit: float) -> str:
        """Return an error message if the store has not answered for `limit` seconds, else ""."""
        if not self.store_gone and time.monotonic() - self.answered < limit:
            return ""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "the launcher of the first node is missing; it hosts the store of all ranks"
        if 0 not in self.beats:
            # Rank 0 may have sent heartbeats, but its store ended before this rank read one.
            return f"rank 0 is missing: {LOST}; its store does not answer"
        return missing_text(0, self.beats[0])

    def _end(self, message: str) -> None:
        """Send `message` to other ranks, write stack traces, print `message`, and exit with code 1.

        If several ranks call this, only the first rank prints its message.
        """
        if not self.ending.acquire(blocking=False):
            time.sleep(3600)  # Another thread is ending the process.
        try:
            if self.rank == 0:
                self.send_alert(message)
            pool = ThreadPoolExecutor()  # Use threads: the store or a disk may hang.
            announcement = pool.submit(self._announce, message)
            heading = f"rank {self.rank} at {self.place}\n{message}\n"
            traces = pool.submit(write_traces, self.traces, self.rank, heading, self.error)
            end_hook = pool.submit(self.on_end)
            work: list[Future[Any]] = [announcement, traces, end_hook]
            wait(work, LAST_WORDS_S)
            if not announcement.done() or announcement.result():
                traces_text = traces.result() if traces.done() else ""
                to_stderr(f"error: {message}{traces_text}")
                wait([pool.submit(self.record_stall, message)], LAST_WORDS_S)
            # Let other ranks read the message, and wandb's service send the alert: the store and
            # the service may end with this process.
            time.sleep(2 * BEAT_S)
        finally:
            with contextlib.suppress(Exception):
                for child in multiprocessing.active_children():
                    child.kill()  # A stopped child would never exit.
            os._exit(1)

    def _announce(self, message: str) -> bool:
        """Write `message` to the store for other ranks; return whether this rank must print it.

        Return True if no other rank has called `_announce` before, or if writing fails.
        """
        with contextlib.suppress(Exception):
            self.store.set("verdict", message)
            return self.store.add("said", 1) == 1
        return True


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
