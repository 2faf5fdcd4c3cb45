"""Runs of a sweep as child processes.

This module has few imports, because every rank of a cluster job loads it.
"""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from diffllm.core.files import open_to_append
from diffllm.core.printing import echo
from diffllm.core.run_files import RunFile, RunFolder, list_checkpoints, step_of, sweep_log
from diffllm.distributed.launcher import SWEEP_JOB, report_signal

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ERROR = re.compile(
    r"error: .*|(\[rank\d+\]: ?)?([A-Za-z_]\w*\.)*\w*(Error|Exception|Interrupt)\b.*"
)


class Ending(NamedTuple):
    """How a run of a sweep ended."""

    state: str
    """"finished", "stopped", "failed", "stays" (the job is in SLURM's queue) or "not started"."""
    reason: str = ""

    at: float = 0.0
    """Time of the end in seconds since the Unix epoch."""
    silent: bool = False
    """Whether the run failed without an error message."""


@dataclass
class Job:
    """A planned run of a sweep that has `total` runs."""

    number: int
    """Number of the run in the sweep, from 1 to `total`."""
    total: int
    name: str
    path: str

    steps: int
    flops_of_step: float
    """Training FLOPs of one step; 0 if unknown."""
    words: list[str]
    """Arguments of `diffllm train`."""
    finished: bool
    """Whether the run had ended before this start of the sweep."""
    group: str = ""
    """Default group in wandb: the row of the run in the report, or its arm in a study."""
    tags: Sequence[str] = ()
    """Tags in wandb, in addition to run.sweep."""
    quiet: bool = False
    """Whether the output of the run is printed only if the run fails."""

    @property
    def log(self) -> Path:
        return sweep_log(Path(self.path))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the child process that executes the run."""
        return {
            SWEEP_JOB: str(self.number),
            "DIFFLLM_WANDB_NAME": self.name,
            "DIFFLLM_WANDB_GROUP": self.group,
            "DIFFLLM_WANDB_TAGS": ",".join(self.tags),
        }

    @property
    def has_summary(self) -> bool:
        return Path(self.path, RunFile.SUMMARY).is_file()

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint; 0 without a checkpoint."""
        checkpoints = list_checkpoints(Path(self.path, RunFolder.CHECKPOINTS))
        return step_of(checkpoints[-1]) if checkpoints else 0

    def progress(self) -> str:
        step = self.saved_step
        return f"saved at step {step} of {self.steps}" if step else "nothing saved yet"


class JobProcess:
    """The child process that executes a run.

    The stderr of the child is copied to the stderr of this process and to the log of the run. If
    the job is quiet, stdout and stderr of the child go to the log, and also to the stderr of this
    process after a failure.
    """

    def __init__(self, job: Job, rank: int = 0):
        self.job = job
        self.rank = rank
        self.is_signalled = False
        self.log = job.log.with_name(f"{job.log.stem}.rank{rank}.log") if rank else job.log
        # -P keeps Python from importing a diffllm/ of the current directory, see `path_for_jobs`.
        command = [sys.executable, "-P", "-m", "diffllm", "train", *job.words]
        date = time.strftime("%Y-%m-%d %H:%M:%S")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._note(f"{date} on {socket.gethostname()}: {shlex.join(command)}")
        self.output_file = tempfile.TemporaryFile()  # noqa: SIM115
        """Output in the log since this start."""
        # A process, not a thread: the child can still write after the end of this process.
        self.tee = subprocess.Popen(
            ["tee", "-a", self.log, f"/dev/fd/{self.output_file.fileno()}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if job.quiet else 2,
            pass_fds=[self.output_file.fileno()],
            start_new_session=True,
            restore_signals=False,  # Ignore SIGPIPE: the log continues if stderr is closed.
        )
        assert self.tee.stdin
        with self.tee.stdin as pipe:
            self.child = subprocess.Popen(
                command,
                env={**os.environ, **job.variables},
                stdout=pipe if job.quiet else None,
                stderr=pipe,
                process_group=0,  # Ctrl-C reaches the child only through `stop`.
                preexec_fn=tie_to_parent,
            )

    def stop(self, number: int) -> None:
        """Send the signal `number` to the child process.

        The first signal makes the run save a checkpoint and stop. A second SIGINT aborts the run.
        """
        self.child.send_signal(number)
        self.is_signalled = True

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError), os.fdopen(open_to_append(self.log), "ab") as log:
            log.write(os.fsencode(f"{text}\n"))

    def wait(self) -> Ending:
        code = self.child.wait()
        # `first_failed` orders the failures of ranks by this time, so it must not include the wait
        # for `tee`.
        at = time.time()
        try:
            self.tee.wait(timeout=5)
        except subprocess.TimeoutExpired:
            # A remaining child of the run keeps the pipe open.
            self.tee.terminate()
            self.tee.wait()
        # Rank 0 decides whether a run finished; a stopped run has no summary.
        if code == 0 and (self.rank or self.job.has_summary):
            return Ending("finished", "", at)
        # A signal that reached only the child also stopped the run: exit code 0, 130 after SIGINT.
        if code in (0, 128 + signal.SIGINT) or self.is_signalled:
            return Ending("stopped", self.job.progress(), at)
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if -code == signal.SIGKILL:
            reason += " (out of memory?)"
        self._note(reason)
        self.output_file.seek(0)
        output = self.output_file.read().decode(errors="replace")
        if self.job.quiet:
            echo(f"\n{output}", end="", file=sys.stderr, flush=True)
        message = last_error(output)
        details = f": {message}" if message else f", {self.job.progress()}"
        return Ending("failed", reason + details, at, silent=code > 0 and not message)


class ClusterTask:
    """Callable that executes a run; submitit calls it on each rank of a cluster job."""

    process: JobProcess | None = None

    def __call__(self, job: Job) -> Ending:
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        world = JobEnvironment()
        if world.num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        self.process = process = JobProcess(job, world.global_rank)
        signal.signal(signal.SIGINT, lambda number, _: process.stop(number))
        return process.wait()

    def checkpoint(self, job: Job) -> Any:
        """Let the run save a checkpoint and stop; return a submitit job that resumes the run.

        submitit calls this method before preemption or a timeout, and queues the returned job.
        """
        from submitit.helpers import DelayedSubmission

        if self.process:
            self.process.stop(signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):  # WNOWAIT: `__call__` reaps the child.
                os.waitid(os.P_PID, self.process.child.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(ClusterTask(), job)


class Stops:
    """Context manager that records SIGINT and SIGTERM and forwards them to the child process.

    `Stops.run` starts the child process. If SIGINT arrives while no child process runs, the context
    manager prints `message`.
    """

    def __init__(self, message: str = "stopping") -> None:
        self.message = message

    def __enter__(self) -> "Stops":
        self.received = 0
        self.process: JobProcess | None = None
        self.previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.process:
            self.process.stop(number)
        elif number == signal.SIGINT:  # The running job reports the signal itself.
            report_signal(self.message)

    def run(self, job: Job, rank: int) -> Ending:
        process = JobProcess(job, rank)
        self.process = process
        # The signal may have arrived while no child process existed, or between both lines above.
        if self.received and not process.is_signalled:
            process.stop(self.received)
        try:
            return process.wait()
        finally:
            self.process = None

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def path_for_jobs() -> str:
    """Return the PYTHONPATH that lets child processes import the same modules as this process.

    The result contains, in this order: the parent directory of the package diffllm, sys.path[0],
    and the current entries of PYTHONPATH. The parent directory is omitted if it is site-packages.
    """
    package = str(Path(__file__).resolve().parents[3])
    paths = sys.path[:1]
    if package not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths.insert(0, package)
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if path:
            paths.append(path)
    absolute_paths = [os.path.abspath(path) for path in paths]
    return os.pathsep.join(dict.fromkeys(absolute_paths))


def tie_to_parent() -> None:
    """Make this process ignore SIGUSR2 and, on Linux, receive SIGTERM when its parent dies.

    SIGUSR2 is ignored because a scheduler may send this signal to all processes of a job.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def last_error(output: str) -> str:
    """Return the last line of `output` with an error, or else the last line; "" without lines."""
    last_line = error = ""
    for line in output.splitlines():
        text = line.strip()
        if text:
            last_line = text
        if ERROR.fullmatch(text):
            error = text
    text = (error or last_line).removeprefix("error: ")
    return text if len(text) <= 300 else f"{text[:300]}..."
