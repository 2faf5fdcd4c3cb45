"""A loader process that dies ends its run at once, with a line that says so."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from runs import command, descendants, finish, kill_everything, start, wait_for, write_corpus

from diffllm.checkpoint import list_checkpoints

PROMPT_SECONDS = 60
"""Far below distributed.timeout, far above what a busy machine needs."""


def loader_processes(trainer: int) -> list[int]:
    """Children that look like their parent: forked, not started anew."""
    own = Path(f"/proc/{trainer}/cmdline").read_bytes()
    return [
        pid
        for pid in descendants(trainer)
        if os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/cmdline").read_bytes() == own
    ]


def trainers(process) -> list[int]:  # type: ignore[no-untyped-def]
    """Below a launcher those whose parent it is, else the run itself."""
    if "torch.distributed.run" not in process.args:
        return [process.pid]
    everyone = descendants(process.pid)
    return [pid for pid in everyone if set(loader_processes(pid))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_process_that_is_killed(tmp_path: Path, ranks: int) -> None:
    """SIGKILL is what the kernel sends where memory runs out."""
    run = tmp_path / "run"
    words = ("steps=1000000", "checkpoint.interval=2", "data.num_workers=1", "log_interval=1")
    process = start(command(write_corpus(tmp_path), run, *words, ranks=ranks))
    try:
        wait_for(lambda: list_checkpoints(run / "checkpoints"), process, "checkpoint")
        loaders = loader_processes(trainers(process)[-1])
        assert loaders, "no loader process to kill"
        killed = time.monotonic()
        os.kill(loaders[0], signal.SIGKILL)
        output = finish(process, code=2 if ranks == 1 else 1)
        assert time.monotonic() - killed < PROMPT_SECONDS
        line = "a data loader process died"
        assert sum(line in text for text in output.splitlines()) >= 1, output
        if ranks == 1:
            assert "Traceback" not in output, output
        assert list_checkpoints(run / "checkpoints")
    finally:
        kill_everything(process)
    assert sys.platform == "linux"
