"""A killed loader process stops its run with an error; a hanging loader process is named."""

import os
import signal

import pytest
from processes import has_ended, wait_until
from runs.command import Gate, loader_processes, start, the_error

from diffllm.core.run_files import list_checkpoints
from diffllm.metrics.events import read_events


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_loader_process_stops_run_with_error(corpus, tmp_path, ranks):
    """The kernel sends SIGKILL if memory runs out.

    The run must not wait until distributed.timeout, which is longer than this test's time limit.
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
def test_error_message_contains_id_of_frozen_loader_process(corpus, tmp_path, timeout, signalled):
    """The run stops within distributed.timeout, or soon after a signal."""
    run = tmp_path / "run"
    words = ("steps=1000000", "checkpoint.interval=2", "data.num_workers=1", "log_interval=1")
    process = start(corpus, run, *words, f"distributed.timeout={timeout}")
    try:
        process.wait_for(lambda: list_checkpoints(run / "checkpoints"), "checkpoint")
        (loader,) = loader_processes(process.pid())
        os.kill(loader, signal.SIGSTOP)
        if signalled:  # after the run has used all batches that the loader had read ahead
            process.wait_for(lambda: "warning: this process hangs at" in process.text(), "warning")
            process.signal(signal.SIGTERM)
        said = process.finish(1)
        assert "error: this process hangs at step " in said
        hang = f"waiting for a batch of the data loader (stopped: process {loader})"
        assert hang in said
        (stall,) = (event for event in read_events(run) if event.kind == "stall")
        assert stall.step > 0
        assert hang in stall.detail
        wait_until(lambda: has_ended(loader), "end of the loader process after its run")
    finally:
        process.kill()
