"""The one way in which tests start commands: forked from a process that has imported them already.

They are real processes of the real `train.py` and `diffllm`, with signals, exit codes and output of
their own, without the seconds that an interpreter, torchrun and imports take. What depends on those
starts them with `cli_helpers.command` or torchrun, and says so.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import planted_train
import torch
from cli_helpers import TRAIN, Result
from gloo import forked
from planted_train import Fault
from processes import PATIENCE_S
from runs import overrides_of

NO_FAULT = Fault()


class ForkedRun:
    """A run of train.py on `ranks` processes, with its samples recorded and perhaps a fault.

    `run.dir=` has to be among its words. What the ranks say goes to said-<rank>.txt in `directory`,
    unless `said` names a file for each.
    """

    def __init__(
        self,
        words: list[str],
        ranks: int = 1,
        directory: Path | None = None,
        fault: Fault = NO_FAULT,
        main: Callable[..., int] = planted_train.main,
        said: list[str] | None = None,
    ):
        self.said = said or said_files(ranks, directory)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes: list[Any] = []
        for rank in range(ranks):
            environment = {
                **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            }
            more = {**os.environ, **(environment if ranks > 1 else {})}
            args = (main, (fault, words), more, os.getcwd(), [self.said[rank]] * 2)
            self.processes.append(forked(_process, args))
        for process in self.processes:
            process.start()

    def pid(self, rank: int = 0) -> int:
        return self.processes[rank].pid

    def wait_for(
        self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S
    ) -> None:
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

    def codes(self, seconds: float = PATIENCE_S) -> list[int]:
        """Exit codes, once all have ended; a frozen one has to be killed first."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"does not end: {self.text()}"
        return [process.exitcode for process in self.processes]

    def finish(self, code: int = 0) -> str:
        """Wait until all have ended with this exit code; return their output."""
        codes = self.codes()
        assert set(codes) == {code}, f"{codes}: {self.text()}"
        return self.text()

    def kill(self) -> None:
        """SIGKILL to every rank."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def text(self) -> str:
        """Return the output of all ranks, one after the other."""
        return "".join(Path(file).read_text() for file in self.said)


class Gate:
    """A step, or the first batch of the "heldout" documents, that no rank of a run begins before
    the gate is opened."""

    def __init__(self, run: Path, place: int | str):
        run.mkdir(parents=True, exist_ok=True)
        self.file = run / f"gate-{place}"
        self.file.touch()

    def reached(self) -> bool:
        return self.file.read_text() == "reached"

    def open(self) -> None:
        self.file.unlink()


def said_files(ranks: int, directory: Path | None) -> list[str]:
    """A file for each rank; without a directory, one that nothing else knows of."""
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="said-"))
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"said-{rank}.txt" for rank in range(ranks)]
    for file in files:
        file.touch()
    return [str(file) for file in files]


def start(corpus: Path, run: Path, *overrides: str, ranks: int = 1) -> ForkedRun:
    """A small run of train.py, on its way."""
    return ForkedRun([*overrides_of(corpus, run), *overrides], ranks)


def finish(corpus: Path, run: Path, *overrides: str, ranks: int = 1) -> str:
    """Run train.py small to a good end; return its output."""
    return start(corpus, run, *overrides, ranks=ranks).finish()


def train(words: list[str], cwd: Path, environment: Mapping[str, str]) -> Result:
    """How `python train.py words` ends, started in `cwd`."""
    return forked_call(run_train, words, cwd, environment)


def tool(words: list[str], cwd: Path, environment: Mapping[str, str]) -> Result:
    """How `diffllm words` ends, started in `cwd`."""
    return forked_call(run_tool, words, cwd, environment)


def forked_call(
    main: Callable[[list[str]], int], words: list[str], cwd: Path, environment: Mapping[str, str]
) -> Result:
    """How a call of `main` ends, a function of a module, as a command that is started in `cwd`."""
    with tempfile.TemporaryDirectory(prefix="said-") as folder:
        files = [f"{folder}/out", f"{folder}/err"]
        process = forked(_process, (main, (words,), dict(environment), str(cwd), files))
        process.start()
        process.join(PATIENCE_S)
        out, err = (Path(file).read_text() for file in files)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"does not end: {out}{err}")
        return Result(process.exitcode, out, err)


def run_train(words: list[str]) -> int:
    sys.argv = [str(TRAIN), *words]
    return planted_train.entry_module().main()


def run_tool(words: list[str]) -> int:
    from diffllm import cli as tools

    return tools.main(words)


def _process(
    main: Callable[..., int],
    args: tuple[Any, ...],
    environment: dict[str, str],
    cwd: str,
    said: list[str],
) -> None:
    """The process: `main` in its directory, its output in two files or twice the same."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # as an interpreter would
    sys.path[:0] = [path for path in given if path and path not in sys.path]
    for descriptor, file in zip((1, 2), said, strict=True):
        opened = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    # Of the loader's processes; one that forkserver started would go on when this one is killed.
    multiprocessing.set_start_method("fork", force=True)
    code = 1
    try:
        code = main(*args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    # What an interpreter does as it exits; multiprocessing would wait for the loader's processes.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
