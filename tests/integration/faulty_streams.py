"""Commands whose standard output or standard error fails, in forked processes."""

import os
import sys
from functools import partial
from typing import Any

import planted_train
from forked_runs import run_tool, run_train

FAULTS = ("full", "closed", "no reader", "no terminal", "ascii")
"""Faults of a stream: it has no room, is closed before the start, is a pipe or a terminal that
nobody reads any more, or lacks characters."""
COMMANDS = {"train": run_train, "tool": run_tool, "planted": planted_train.main}


def break_stream(number: int, fault: str) -> None:
    """Have this process start with a fault in its standard output, 1, or standard error, 2."""
    name, encoding = ("stdout", "stderr")[number - 1], "ascii" if fault == "ascii" else "utf-8"
    stream: Any = None
    if fault == "closed":
        os.close(number)
    else:
        if fault != "ascii":
            descriptor = failing(fault)
            os.dup2(descriptor, number)
            os.close(descriptor)
        errors = "strict" if number == 1 else "backslashreplace"
        stream = open(number, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def failing(fault: str) -> int:
    """Open a descriptor that cannot be written."""
    if fault == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.openpty() if fault == "no terminal" else os.pipe()
    os.close(reader)
    return writer


def faulty(command: str, stdout: str, stderr: str, *args: Any) -> int:
    """Run a command with these faults, "" for none."""
    for number, fault in ((1, stdout), (2, stderr)):
        if fault:
            break_stream(number, fault)
    return COMMANDS[command](*args)


def with_faults(command: str, stdout: str, stderr: str) -> partial[int]:
    """Return the same as a function of the command's arguments."""
    return partial(faulty, command, stdout, stderr)
