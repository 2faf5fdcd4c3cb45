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
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from diffllm.core.errors import AgreedError, UserError
from diffllm.core.files import open_to_write
from diffllm.core.printing import echo, to_stderr
from diffllm.distributed.heartbeats import GONE, Beat, diagnosis, missing_text, not_called
from diffllm.distributed.stop import StoppedEarly, StopRequest
from diffllm.distributed.world import Calls, World, recorded

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
FAILED_COLLECTIVE = re.compile(r"gloo|nccl|process ?group|closed by peer|timed out", re.I)


class Watch:
    """Detects missing ranks in background threads; if a rank is missing, exits this process.

    The error message names the missing rank. If the world size is 1, a thread exits this process
    when this process hangs, for example while the data loader waits for a disk.

    Args:
        timeout: timeout of collectives in seconds.
    """

    def __init__(self, world: World, timeout: float, request: StopRequest):
        self.rank, self.size, self.request = world.rank, world.size, request
        # Shorter than the timeout of collectives, whose error does not name a rank.
        self.limit = timeout - min(10.0, timeout / 5)
        self.traces: Path | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.on_stall: Callable[[str], None] = lambda message: None
        """Records a stall; called with the message, in a background thread of one rank."""
        self.words, self.verdict = "", ""
        self.patience = LEAVE_S
        self.stopped: signal.Signals | None = None
        self.error: BaseException | None = None
        self.reached("the start")
        self.closed, self.ending = threading.Event(), threading.Lock()
        self.beating = threading.Lock()
        self.watched: Iterable[int] = range(self.size) if self.rank == 0 else [0]
        if self.size == 1:
            threading.Thread(target=self._judge_itself, name="watch", daemon=True).start()
            return
        own = world.store.clone()  # type: ignore[attr-defined]
        self.world = replace(world, store=own)
        self.store = dist.PrefixStore("watch", own)
        self.store_gone = False
        self.answered = time.monotonic()
        self.beats: dict[int, Beat] = {}
        self.heard = dict.fromkeys(range(self.size), self.answered)
        self._beat(0)
        for work in (self._talk, self._judge):
            threading.Thread(target=work, name="watch", daemon=True).start()

    def reached(self, place: str) -> None:
        self.place, self.since = place, time.monotonic()
        self.waits: tuple[str, float] | None = None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Within this context, report in heartbeats that this rank waits for `what`."""
        self.waits = what, time.monotonic()
        try:
            yield
        finally:
            self.waits = None

    def where(self) -> str:
        return f"{self.place}, waiting for {self.waits[0]}" if self.waits else self.place

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
        deadline = time.monotonic() + self.patience * (self.rank == 0 and not self.words)
        with contextlib.suppress(DistError):
            self._beat(-1)
            while time.monotonic() < deadline:
                self._listen()
                if len(self.beats) == self.size and all(b.left for b in self.beats.values()):
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
            self.words = f"{type(error).__name__}: " * (not isinstance(error, UserError))
            self.words += _shortened(error)
            self.close()
            faulthandler.dump_traceback_later(EXIT_S, exit=True, file=open(os.devnull, "wb"))  # noqa: SIM115
            return
        with contextlib.suppress(DistError):
            self.stopped = self.world.stopped()
        if self.stopped:
            self.patience = STOPPING_S
            raise StoppedEarly(self.stopped) from error
        self.error = error
        calls = recorded()
        self.heard = dict.fromkeys(range(self.size), time.monotonic())
        self.watched = range(self.size)
        deadline, message = time.monotonic() + SILENT_S + 3 * BEAT_S, ""
        while not message and time.monotonic() < deadline:
            time.sleep(BEAT_S / 4)
            message = self.verdict or self._store_message(SILENT_S)
            silent = [rank for rank in self._silent(SILENT_S) if rank in self.beats]
            if not message and (silent or any(beat.words for beat in self.beats.values())):
                message = self._diagnosis(silent, calls)
        message = message or self._diagnosis([], calls)
        self._end(message or f"a collective failed: {_shortened(error)}")

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
            others = list(self.beats.values())
            stopping = self.request.has_come() or any(beat.stopping for beat in others)
            limit = min(self.limit, STOPPING_S) if stopping else self.limit
            message = self.verdict or self._store_message(limit)
            silent = self._silent(limit)
            # Check both ages: a save in the background may wait long for another rank's slow disk
            # during normal steps.
            stuck = self.rank == 0 and any(
                min(b.calls.age_s, b.place_s) > self.limit and not_called(self.beats, b)
                for b in others
            )
            if not message and (silent or stuck):
                message = self._diagnosis(silent, recorded())
            # The store may also be missing because the launch has just ended normally: wait.
            if message and not (self.store_gone and self.closed.wait(SILENT_S)):
                self._end(message)

    def _judge_itself(self) -> None:
        """Warn if this process hangs, and exit this process if it continues to hang.

        Runs in a background thread; used only if the world size is 1.
        """
        said = asked_at = None
        while not self.closed.wait(BEAT_S):
            waits = self.waits
            waited = time.monotonic() - waits[1] if waits else 0.0
            stopped = []
            for child in multiprocessing.active_children():
                with contextlib.suppress(OSError, IndexError):
                    stat = Path(f"/proc/{child.pid}/stat").read_bytes()  # has a name of any bytes
                    stopped += [str(child.pid)] * (stat.rpartition(b")")[2].split()[0] in b"Tt")
            message = f"this process hangs at {self.where()}"
            message += f" (stopped: process {', '.join(stopped)})" if stopped else ""
            if self.request.has_come() and asked_at is None:
                asked_at = time.monotonic()
            if waited > (min(self.limit, STOPPING_S) if asked_at else self.limit):
                self._end(message)
            if asked_at and time.monotonic() - max(asked_at, self.since) > self.limit:
                self._end(message)  # The process hangs outside of a `waiting` context.
            if waited > STOPPING_S and waits is not said:
                said = waits
                to_stderr(f"warning: {message}, for {waited:.0f} s now")
                # Not in this thread: the disk with the run directory may hang, too.
                threading.Thread(target=self.on_stall, args=[message], daemon=True).start()

    def _diagnosis(self, silent: list[int], calls: Calls) -> str:
        here = Beat(0, self.where(), 0.0, calls, stopping=False, left=False, words="")
        return diagnosis({**self.beats, self.rank: here}, silent)

    def _beat(self, number: int) -> None:
        with self.beating:  # Otherwise a thread could overwrite the last heartbeat of `close`.
            left, stopping = self.closed.is_set(), self.request.has_come()
            here = time.monotonic() - self.since
            beat = Beat(number, self.where(), here, recorded(), stopping, left, self.words)
            self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _listen(self) -> None:
        """Read into `self.beats` the newest heartbeat of each rank in `self.watched`."""
        ranks = list(self.watched)
        known = [r for r in ranks if r in self.beats or self.store.check([f"beat/{r}"])]
        texts = self.store.multi_get([f"beat/{r}" for r in known])
        for rank, text in zip(known, texts, strict=True):
            beat = Beat(*json.loads(text))
            if rank not in self.beats or beat.number != self.beats[rank].number:
                self.heard[rank] = time.monotonic()
            self.beats[rank] = beat._replace(calls=Calls(*beat.calls))

    def _silent(self, limit: float) -> list[int]:
        left = {rank for rank, beat in dict(self.beats).items() if beat.left}
        late = {rank for rank in self.watched if self.answered - self.heard[rank] > limit}
        return [] if self.store_gone else sorted(late - left)

    def _store_message(self, limit: float) -> str:
        """Return an error message if the store has not answered for `limit` seconds, else ""."""
        if not self.store_gone and time.monotonic() - self.answered < limit:
            return ""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "the launcher of the first node is missing; it hosts the store of all ranks"
        if 0 not in self.beats:
            # Rank 0 may have sent heartbeats, but its store ended before this rank read one.
            return f"rank 0 is missing: {GONE}; its store does not answer"
        return missing_text(0, self.beats[0])

    def _end(self, message: str) -> None:
        """Send `message` to other ranks, write stack traces, print `message`, and exit with code 1.

        If several ranks call this, only the first rank prints its message.
        """
        if not self.ending.acquire(blocking=False):
            time.sleep(3600)  # Another thread is ending the process.
        try:
            pool = ThreadPoolExecutor()  # Use threads: the store or a disk may hang.
            told = pool.submit(self._tell, message)
            written = pool.submit(self._write_traces, message)
            work: list[Future[Any]] = [told, written, pool.submit(self.on_end)]
            wait(work, LAST_WORDS_S)
            if not told.done() or told.result():
                where = written.result() if written.done() else ""
                to_stderr(f"error: {message}{where}")
                wait([pool.submit(self.on_stall, message)], LAST_WORDS_S)
            if self.size > 1:
                # Let other ranks read the message: the store may end with this process.
                time.sleep(2 * BEAT_S)
        finally:
            with contextlib.suppress(Exception):
                for child in multiprocessing.active_children():
                    child.kill()  # A stopped child would never exit.
            os._exit(1)

    def _tell(self, message: str) -> bool:
        """Write `message` to the store for other ranks; return whether this rank must print it.

        Return True if no other rank has called `_tell` before, or if writing to the store fails.
        """
        with contextlib.suppress(Exception):
            self.store.set("verdict", message)
            return self.store.add("said", 1) == 1
        return True

    def _write_traces(self, message: str) -> str:
        """Write `message` and the stack traces of all threads to a file in `self.traces`.

        Return text to append to an error message: the directory of the file, or why writing the
        file failed. Return "" if `self.traces` is None.
        """
        if self.traces is None:
            return ""
        try:
            self.traces.mkdir(exist_ok=True)
            file_of_rank = self.traces / f"rank-{self.rank:05d}.txt"
            with os.fdopen(
                open_to_write(file_of_rank), "w", encoding="utf-8", errors="replace"
            ) as file:
                echo(f"rank {self.rank} at {self.place}\n{message}\n", file=file)
                if self.error:
                    traceback.print_exception(self.error, file=file)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except Exception as problem:
            return f"; no stack traces: {problem}"
        return f"; stack traces in {self.traces}"


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def is_failed_collective(error: BaseException | None) -> bool:
    """Return whether `error` comes from a failed collective.

    If `error` is a UserError, return whether its cause comes from a failed collective.
    """
    if isinstance(error, UserError):
        return is_failed_collective(error.__cause__)
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and bool(FAILED_COLLECTIVE.search(str(error)))
    )
