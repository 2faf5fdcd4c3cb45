"""Whole runs of train.py on several ranks, forked from a process that has torch imported already.

They are real processes of the real command, without the seconds that torchrun and imports take.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted_train
import torch
from gloo import CONTEXT
from planted_train import Fault

NO_FAULT = Fault()


class ForkedRun:
    """A run on `ranks` processes; what they say goes to said-<rank>.txt in `directory`."""

    def __init__(self, words: list[str], ranks: int, directory: Path, fault: Fault = NO_FAULT):
        directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.said = [directory / f"said-{rank}.txt" for rank in range(ranks)]
        self.processes: list[Any] = []
        for rank in range(ranks):
            environment = {
                **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            }
            args = (fault, words, environment if ranks > 1 else {}, str(self.said[rank]))
            self.processes.append(CONTEXT.Process(target=_rank, args=args))
        for process in self.processes:
            process.start()

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        """Poll until `condition()`; no rank may end before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert all(p.is_alive() for p in self.processes), f"ended before {what}: {self.text()}"
            assert time.monotonic() < deadline, f"no {what}: {self.text()}"
            time.sleep(0.005)

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def codes(self, seconds: float = 120) -> list[int]:
        """Exit codes, once all have ended; a frozen one has to be killed first."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"does not end: {self.text()}"
        return [process.exitcode for process in self.processes]

    def finish(self) -> str:
        """What was said, once all have ended well."""
        codes = self.codes()
        assert set(codes) == {0}, f"{codes}: {self.text()}"
        return self.text()

    def kill(self) -> None:
        """SIGKILL to every rank."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def text(self) -> str:
        """What the ranks said, one after the other."""
        return "".join(file.read_text() for file in self.said if file.exists())


def _rank(fault: Fault, words: list[str], environment: dict[str, str], said: str) -> None:
    os.environ.update(environment)
    descriptor = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    # Of the loader's processes; one that forkserver started would go on when this one is killed.
    multiprocessing.set_start_method("fork", force=True)
    code = 1
    try:
        code = planted_train.main(fault, words)
    except BaseException:
        traceback.print_exc()
    # What an interpreter does as it exits; multiprocessing would wait for the loader's processes.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
