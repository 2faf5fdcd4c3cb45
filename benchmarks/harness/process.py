"""Call a function in a separate process, which may crash, hang or run out of memory.

    python -m harness.process harness.machine.facts '{}'

The process prints one line of JSON to stdout, ["ok", result] or ["error", reason]. All other output
of the function and of its child processes goes to stderr.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent


class Outcome(NamedTuple):
    """Result of a call, or its failure."""

    status: str
    """"ok", "error" (the function raised), "died" (no reply) or "timeout"."""
    result: Any
    """The returned value, or one line about the failure."""


def call(
    function: str,
    arguments: dict[str, Any],
    limit: float,
    log: Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> Outcome:
    """Call a function in a new process, and kill all its processes afterwards.

    Args:
        function: dotted name with the module; arguments and result must be valid JSON.
        limit: seconds, including the start of the process.
        log: file to which stderr is appended; None discards it.
    """
    path = [str(BENCHMARKS), str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    # Use files: a surviving child process would keep a pipe open.
    with (
        tempfile.TemporaryFile() as out,
        open(log, "a+b") if log else tempfile.TemporaryFile() as err,
    ):
        begin = err.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.process", function, json.dumps(arguments)],
            env={**env, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", f"after {limit:.0f} s; {last_line(err, begin)}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process stuck in a driver never ends
                process.wait(10)
        out.seek(0)
        with suppress(ValueError):  # without a reply, the output is not JSON
            return Outcome(*json.loads(out.read()))
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Outcome("died", f"{how}; {last_line(err, begin)}")


def last_line(file: IO[bytes], begin: int) -> str:
    """Return the last printed line after position `begin` of the file."""
    file.seek(begin)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def reason(error: BaseException) -> str:
    """Return type and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def main() -> None:
    reply_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].rpartition(".")
    try:
        result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
        reply = json.dumps(["ok", result])
    except Exception as error:
        traceback.print_exc()
        reply = json.dumps(["error", reason(error)])
    reply_to.write(reply)
    reply_to.flush()
    sys.stdout.flush()
    os._exit(0)  # do not wait for process groups, data loaders and compilers


if __name__ == "__main__":
    main()
