"""A loader process that dies ends its run at once, with a line that says so."""

import os
import signal
from pathlib import Path

import pytest
from forked_runs import Gate, start
from runs import descendants, prepared_corpus

from diffllm.checkpoint import list_checkpoints


def loader_processes(trainer: int) -> list[int]:
    """Children that look like their parent: forked, not started anew."""
    own = Path(f"/proc/{trainer}/cmdline").read_bytes()
    return [
        pid
        for pid in descendants(trainer)
        if os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/cmdline").read_bytes() == own
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_process_that_is_killed(tmp_path: Path, ranks: int) -> None:
    """SIGKILL is what the kernel sends where memory runs out.

    Without steps enough to use up distributed.timeout, a wait for it would outlast this test.
    """
    run = tmp_path / "run"
    words = ("steps=1000000", "checkpoint.interval=2", "data.num_workers=1", "log_interval=1")
    gate = Gate(run, 4)
    process = start(prepared_corpus(tmp_path), run, *words, "distributed.timeout=3000", ranks=ranks)
    try:
        process.wait_for(lambda: list_checkpoints(run / "checkpoints"), "checkpoint")
        loaders = loader_processes(process.pid(ranks - 1))
        assert loaders, "no loader process to kill"
        os.kill(loaders[0], signal.SIGKILL)
        gate.open()
        codes = process.codes()
        assert codes == ([2] if ranks == 1 else [1, 2]), process.text()
        assert "a data loader process died" in process.text()
        if ranks == 1:
            assert "Traceback" not in process.text()
        assert list_checkpoints(run / "checkpoints")
    finally:
        process.kill()
