"""A loader process that dies ends its run at once, with a line that says so; one that hangs is
named."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from processes import has_ended, wait_until
from runs.command import Gate, descendants, start, the_error

from diffllm.checkpoint.directory import list_checkpoints


def loader_processes(trainer: int) -> list[int]:
    """Children that look like their parent: forked, not started anew."""
    own, found = Path(f"/proc/{trainer}/cmdline").read_bytes(), []
    for pid in descendants(trainer):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes() == own:
                found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_process_that_is_killed(corpus, tmp_path, ranks):
    """SIGKILL is what the kernel sends where memory runs out.

    Without steps enough to use up distributed.timeout, a wait for it would outlast this test.
    """
    run = tmp_path / "run"
    words = ("steps=1000000", "checkpoint.interval=2", "data.num_workers=1", "log_interval=1")
    gate = Gate(run, 4)
    process = start(corpus, run, *words, "distributed.timeout=3000", ranks=ranks)
    try:
        process.wait_for(lambda: list_checkpoints(run / "checkpoints"), "checkpoint")
        loaders = loader_processes(process.pid(ranks - 1))
        assert loaders, "no loader process to kill"
        os.kill(loaders[0], signal.SIGKILL)
        gate.open()
        codes = process.codes()
        assert codes == [2] * ranks, process.text()
        line = the_error(process.text())
        assert "a data loader process died" in line
        step = int(list_checkpoints(run / "checkpoints")[-1].name[5:])
        assert f"stopped after step {step}, saved" in line
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "signalled"), [(20, False), (3000, True)])
def test_a_loader_process_that_hangs(corpus, tmp_path, timeout, signalled):
    """One process ends within distributed.timeout, and soon where somebody asks it to stop."""
    run = tmp_path / "run"
    words = ("steps=1000000", "checkpoint.interval=2", "data.num_workers=1", "log_interval=1")
    process = start(corpus, run, *words, f"distributed.timeout={timeout}")
    try:
        process.wait_for(lambda: list_checkpoints(run / "checkpoints"), "checkpoint")
        (loader,) = loader_processes(process.pid())
        os.kill(loader, signal.SIGSTOP)
        if signalled:  # once what it had read ahead is used up
            process.wait_for(lambda: "warning: this process hangs at" in process.text(), "warning")
            process.signal(signal.SIGTERM)
        said = process.finish(1)
        assert "error: this process hangs at step " in said
        assert f"waiting for a batch of the data loader (stopped: process {loader})" in said
        wait_until(lambda: has_ended(loader), "end of the loader process after its run")
    finally:
        process.kill()
