"""A process that measures when it is told to, and that may crash, hang or run out of memory."""

import importlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("spawn")
GRACE_S = 5
"""Seconds that a process is given to end by itself."""
State = dict[str, Any]
"""The values that a process keeps between calls; begins with "device"."""


class Reply(NamedTuple):
    """How a call ended."""

    status: str
    """"ok", "error" (it raised), "died" (the process is gone) or "timeout"."""
    result: Any
    """The value that the call returned, or one line about why there is none."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class Worker:
    """One process, a call at a time.

    Args:
        device: "cuda" or "cpu".
        log: takes what the process prints.

    A call names a function with its module, which is called as function(state, **arguments) with
    the `State` of the process.
    """

    def __init__(self, device: str, log: Path):
        self.log = log
        self.connection, theirs = CONTEXT.Pipe()
        arguments = (theirs, device, str(log))
        self.process = CONTEXT.Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()

    def ask(self, call: str, arguments: dict[str, Any], limit: float) -> Reply:
        """Call a function, and wait for at most `limit` seconds."""
        return together({"": (self, call, arguments)}, limit)[""]

    def send(self, call: str, arguments: dict[str, Any]) -> Reply | None:
        """Begin a call; return a reply only if the process is gone already."""
        try:
            self.connection.send((call, arguments))
        except OSError:
            return self.death()
        return None

    def receive(self) -> Reply:
        """Read the reply to a call, which must have arrived or the process be gone."""
        try:
            return Reply(*self.connection.recv())
        except (EOFError, OSError):
            return self.death()

    def death(self) -> Reply:
        """A reply that tells how the process ended."""
        self.process.join(GRACE_S)
        code = self.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Reply("died", f"{how}; {last_line(self.log)}")

    def close(self) -> None:
        """Let the process end, and kill it with all that it has started if it does not."""
        self.connection.close()
        self.process.join(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the process and those that it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # before it has a group of its own
            self.process.kill()
        self.process.join()


def together(
    calls: dict[str, tuple[Worker, str, dict[str, Any]]], limit: float, at_once: float = math.inf
) -> dict[str, Reply]:
    """Make a call in each of several workers, `at_once` at a time, and wait for all replies.

    A worker whose call takes longer than `limit` seconds is killed.
    """
    waiting, replies = dict(calls), {}
    running: dict[Connection, tuple[str, Worker, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = next(iter(waiting))
            worker, call, arguments = waiting.pop(name)
            if gone := worker.send(call, arguments):
                replies[name] = gone
            else:
                running[worker.connection] = (name, worker, time.monotonic() + limit)
        if not running:
            continue
        nearest = min(deadline for *_, deadline in running.values()) - time.monotonic()
        for connection in wait(list(running), max(0, nearest)):
            name, worker, _ = running.pop(connection)
            replies[name] = worker.receive()
        for connection, (name, worker, deadline) in list(running.items()):
            if time.monotonic() > deadline and not connection.poll():
                del running[connection]
                worker.kill()
                replies[name] = Reply("timeout", f"after {limit:.0f} s; {last_line(worker.log)}")
    return replies


def last_line(log: Path) -> str:
    """The last line that a process printed."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:200] if lines else "it printed nothing"


def serve(connection: Connection, device: str, log: str) -> None:
    """Answer calls until the other end is closed; in the process of a `Worker`."""
    os.setpgid(0, 0)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    state: State = {"device": device}
    while True:
        try:
            call, arguments = connection.recv()
        except (EOFError, OSError):
            break
        try:
            module, _, name = call.rpartition(".")
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
            reply = ("ok", function(state, **arguments))
        except Exception as error:
            traceback.print_exc()
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            reply = ("error", f"{type(error).__name__}: {reason}")
        connection.send(reply)
    os._exit(0)  # neither process groups nor compilers are waited for
