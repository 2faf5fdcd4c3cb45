"""History of runs on a stand-in for wandb's server: each step once, after kills and resumes."""

import glob
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs.command import Gate, metrics, start
from wandb_server import StoredRun, WandbServer

SMALL = ("seq_len=32", "global_batch_size=2", "data.num_workers=0", "eval.sequences=1")
STEPS = (*SMALL, "steps=30", "log_interval=3", "eval.interval=7", "checkpoint.interval=5")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    found = WandbServer()
    home = tmp_path / "home"
    home.mkdir()
    variables = {
        "WANDB_BASE_URL": found.address, "WANDB_API_KEY": "0123456789" * 4, "HOME": str(home),
        "WANDB_ERROR_REPORTING": "false", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


def sync(run: Path) -> None:
    """Run the command that the first lines of the run print."""
    paths = glob.glob(f"{run}/wandb/offline-run-*")
    assert len(paths) == 1
    subprocess.run([sys.executable, "-m", "wandb", "sync", *paths], check=True, capture_output=True)


def as_logged(run: StoredRun) -> list[dict[str, Any]]:
    """Return the lines on the server without the keys that wandb adds."""
    for line in run.history:
        assert line["_step"] == line["step"]
    return [{k: v for k, v in line.items() if not k.startswith("_")} for line in run.history]


def recorded(run: Path) -> list[dict[str, Any]]:
    """Return the values of each step in steps.npy and metrics.jsonl."""
    rows = np.load(run / "steps.npy")
    lines = {line["step"]: line for line in metrics(run)}
    steps = [dict(zip(rows.dtype.names, row.tolist(), strict=True)) for row in rows]
    return [{**step, **lines.pop(step["step"], {})} for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline", "synced between", "then online"])
def test_history_has_each_step_once_after_three_kills(
    server: WandbServer, corpus: Path, tmp_path: Path, mode: str
) -> None:
    run = tmp_path / "run"
    words = (*STEPS, f"wandb.mode={'online' if mode == 'online' else 'offline'}")
    for place in (8, 17, 24):
        gate = Gate(run, place)
        process = start(corpus, run, *words)
        process.kill_at(gate, run / "checkpoints" / f"step-{place // 5 * 5:08}")
        if mode == "synced between":
            sync(run)
    last = "online" if mode == "then online" else mode
    start(corpus, run, *words, *["wandb.mode=online"] * (last == "online")).finish()
    if last != "online":
        sync(run)
    (stored,) = server.runs.values()
    lines = recorded(run)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert sum("perf/step_ms" in line for line in lines) == 11
    assert as_logged(stored) == lines
