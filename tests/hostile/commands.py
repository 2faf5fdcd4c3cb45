"""Commands that a case starts: forked from a process that has imported them, or as a user would."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 90.0
"""A command that is not at its end by then hangs."""
FULL = "/dev/full"
CLOSED, BROKEN, GONE = "closed", "broken", "gone"
"""No stream at all, one whose reader has left, and a terminal that is gone."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None
    """The exit code, negative for a signal; None where it had to be killed."""
    out: str
    err: str


@dataclass(frozen=True)
class Streams:
    """The places that output goes to: a file that is read afterwards unless one is named."""

    out: str | None = None
    err: str | None = None


def forked(
    main: Callable[[Sequence[str]], int],
    words: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    streams: Streams = Streams(),
    limit_s: float = LIMIT_S,
) -> Ended:
    """Run `main(words)` in a process of its own that shares this one's imports."""
    files = [directory / "said-out", directory / "said-err"]
    places = [streams.out or str(files[0]), streams.err or str(files[1])]
    pid = os.fork()
    if pid == 0:
        try:
            become(main, words, directory, environment, places)
        finally:  # whatever happens, it never is a second one of its parent
            os._exit(70)
    code = waited(pid, limit_s)
    return Ended(code, *(said(file) for file in files))


def become(
    main: Callable[[Sequence[str]], int],
    words: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    places: Sequence[str],
) -> None:
    """Be the command, in a process group of its own, and end as an interpreter ends."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for descriptor, place in zip((1, 2), places, strict=True):
        if place == CLOSED:
            os.close(descriptor)
            continue
        if place in (BROKEN, GONE):
            reading, opened = os.pipe() if place == BROKEN else os.openpty()
            os.close(reading)
        else:
            opened = os.open(place, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    encoding, _, errors = environment.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdout, sys.stderr = (
        None if place == CLOSED
        else open(number, "w", encoding=encoding, errors=how, closefd=False)  # noqa: SIM115
        for number, place, how in zip(
            (1, 2), places, (errors or "strict", "backslashreplace"), strict=True
        )
    )  # fmt: skip
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    code = 1
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        if sys.stderr is not None:
            with contextlib.suppress(OSError):
                traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as an interpreter has it
    os._exit(code)


def waited(pid: int, limit_s: float) -> int | None:
    """Wait for a process, and kill it and its group when it takes too long."""
    deadline = time.monotonic() + limit_s
    pause = 0.002
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it left behind
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def real(
    words: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    streams: Streams = Streams(),
    limit_s: float = LIMIT_S,
) -> Ended:
    """Run a command line in a new interpreter."""
    files = [directory / "said-out", directory / "said-err"]
    ways = {CLOSED: "{0}>&-", BROKEN: "{0}> >(true)", GONE: "{0}> >(true)"}
    redirected = " ".join(
        ways.get(place or "", f"{{0}}>>{place or file}").format(number)
        for number, place, file in zip((1, 2), (streams.out, streams.err), files, strict=True)
    )
    shell = ["bash", "-c", f'exec "$@" {redirected}', "bash", *words]
    process = subprocess.Popen(
        shell, cwd=directory, env=dict(environment), stdin=subprocess.DEVNULL, process_group=0
    )
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(limit_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return Ended(code, *(said(file) for file in files))


def said(file: Path) -> str:
    """Return what a command said, whatever bytes it was."""
    return file.read_bytes().decode(errors="backslashreplace") if file.is_file() else ""
