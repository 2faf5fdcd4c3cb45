"""Fixtures: a tiny corpus, a cache for the session, and a finished run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import disks
import pytest
from runs.command import clean_environment, documents, prepared_corpus, train, unfinish, write_texts
from wandb_server import WandbServer


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("integration")


@pytest.fixture(scope="session")
def cache_dir(shared_directory: Path) -> Path:
    return shared_directory / "cache"


@pytest.fixture(scope="session")
def environment(cache_dir: Path) -> dict[str, str]:
    """Return the environment of commands."""
    return clean_environment(cache_dir)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the read-only corpus for `overrides_of`, with prepared tokens."""
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def code_corpus(shared_directory: Path) -> Path:
    """Return the corpus of `tiny`."""
    return write_texts(shared_directory / "corpus.jsonl", documents(300))


@pytest.fixture(scope="session")
def tiny(code_corpus: Path) -> list[str]:
    """Return overrides of a fast run."""
    return [
        *("model=tiny", "model.vocab_size=512", "data=files", f"data.paths=[{code_corpus}]"),
        *("data.num_workers=0", "data.heldout_fraction=0.1", "seq_len=32", "global_batch_size=4"),
        *("steps=4", "optim.warmup_steps=1", "log_interval=2", "diagnostics.interval=2"),
        *("eval.interval=2", "eval.sequences=4", "eval.tokens=200", "checkpoint.interval=2"),
        *("wandb.mode=disabled", "run.report=false"),
    ]


@pytest.fixture(scope="session")
def finished_run(shared_directory: Path, environment: dict[str, str], tiny: list[str]) -> Path:
    """Return the read-only directory of a finished run with standard attention."""
    words = [*tiny, "attention=standard", "run.name=finished", "run.report=true"]
    result = train(words, shared_directory, environment)
    assert result.code == 0, result.err
    assert "outputs/finished/report.html" in result.out
    return shared_directory / "outputs" / "finished"


@pytest.fixture
def killed_run(finished_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run in the state of a kill after the checkpoint of step 2."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    unfinish(run, 4)
    return run


@pytest.fixture
def disk_of_24_mb(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 24 MB, slightly more than three checkpoints."""
    with disks.small_disk(tmp_path / "disk", "24m") as disk:
        yield disk


@pytest.fixture
def server(
    wandb_server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WandbServer:
    """Return a stand-in for wandb's server, to which runs of the test log."""
    home = tmp_path / "home"
    home.mkdir()
    variables = {
        "WANDB_BASE_URL": wandb_server.address,
        "WANDB_API_KEY": "0123456789" * 4, "HOME": str(home),
        "WANDB_ERROR_REPORTING": "false", "OMP_NUM_THREADS": "1",
        # In seconds; the default delays the test of uploaded lines.
        "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return wandb_server
