"""Run the processes that encode the parts of a corpus, and report their progress."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray

from diffllm.core.bounds import check_bounds
from diffllm.core.errors import DataError
from diffllm.core.keys import key
from diffllm.core.printing import to_stderr

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REPORT_SECONDS = 60.0
"""Seconds between two lines of the report."""
READING, DONE = 1, 2
TRACEBACK_HEADER = "Traceback (most recent call last):"

_do: Callable[[int], None]


@dataclass
class PrepareConfig:
    """Number of parallel processes that encode a corpus to tokens; null: one per core."""

    processes: int | None = key(
        None,
        least=1,
        most=4096,
        effect="none",  # The time of training does not depend on this number.
        help="Number of processes; null: one per core, but at most one per remaining part of "
        "the corpus.",
    )

    def validate(self) -> None:
        check_bounds("prepare.", self)


class Counts:
    """Shared-memory arrays with one entry per corpus part: text bytes, tokens and state.

    The state is 0 (waiting), READING or DONE.
    """

    def __init__(self, parts: int) -> None:
        # No locks: each entry is written by one worker, and read only for progress reports.
        self.text_bytes = RawArray("q", parts)
        self.tokens = RawArray("q", parts)
        self.state = RawArray("q", parts)


def work_through(
    numbers: Sequence[int],
    do: Callable[[int], None],
    processes: int,
    tick: Callable[[], None],
    reading: Callable[[], str],
) -> None:
    """Call `do(number)` for all `numbers` in worker processes, and `tick()` once per minute.

    Workers are forked. All workers have ended when this function returns or raises. Raises the
    first error of a worker. If a worker is killed, raises a DataError with the result of
    `reading()`: the names of the files in progress.
    """
    other_children = multiprocessing.active_children()
    # Forked workers get `do` without pickling, which would fail for its closures.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, fork, start_worker, (do, os.getpid()))
    try:
        with signals_blocked():
            unfinished = {pool.submit(work, number) for number in numbers}
        while unfinished:
            done, unfinished = wait(unfinished, REPORT_SECONDS, FIRST_EXCEPTION)
            for future in done:
                failure = future.exception()
                if failure is None:
                    continue
                # Show one traceback with the frames of both processes, instead of two tracebacks.
                frames = str(failure.__cause__).strip('"\n')
                failure.add_note(frames.replace(TRACEBACK_HEADER, "In the worker:"))
                raise failure from None
            if unfinished:
                tick()
    except BaseException as error:
        for child in multiprocessing.active_children():
            if child not in other_children:
                child.kill()
        if not isinstance(error, BrokenProcessPool):
            raise
        raise DataError(
            "a preparation process was killed, perhaps because memory ran out; files in progress: "
            f"{reading() or 'none'}; run the same command again to resume"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(do: Callable[[int], None], parent: int) -> None:
    global _do
    _do = do
    # Collections would scan the objects of the parent, which never become garbage.
    gc.freeze()
    ignore_signals()

    # A killed parent cannot stop its workers, so each worker watches its parent.
    def leave_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def ignore_signals(*_: object) -> None:
    """Ignore SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, which only the main process handles.

    The arguments are unused: PyTorch passes the worker number to a `worker_init_fn`.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals of `ignore_signals` in the calling thread during a `with` block.

    A process that starts in this block receives no such signal before it calls `ignore_signals`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(number: int) -> None:
    # The pool pickles submitted functions, so the function of the job is a global of the worker.
    _do(number)


def report(counts: Counts, share: float, before: float, seconds: float, reading: str) -> None:
    """Print progress, throughput, remaining time and files in progress (`reading`) to stderr.

    `share` is the finished fraction (0 to 1) of the corpus now, and `before` the fraction when this
    preparation started, `seconds` seconds ago.
    """
    text_bytes = sum(counts.text_bytes)
    tokens = sum(counts.tokens)
    progress = f"{text_bytes / 1e6:,.0f} MB, {tokens / 1e6:,.1f}M tokens; "
    progress += f"{text_bytes / 1e6 / seconds:,.1f} MB/s, {tokens / seconds:,.0f} tokens/s"
    if share - before >= 1e-3:
        remaining = round(seconds * (1 - share) / (share - before))
        hours, minutes = divmod(remaining // 60, 60)
        progress += f"; ETA {hours}:{minutes:02d}:{remaining % 60:02d}"
    to_stderr(f"{share:4.0%}  {progress}; reading {reading[:100]}")
