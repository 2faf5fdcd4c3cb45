"""A tiny corpus, one cache for the session, and one finished run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import disks
import pytest
from runs.command import (
    clean_environment,
    documents,
    prepared_corpus,
    train,
    unfinish,
    write_jsonl,
)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("integration")


@pytest.fixture(scope="session")
def cache_dir(workplace: Path) -> Path:
    return workplace / "cache"


@pytest.fixture(scope="session")
def environment(cache_dir: Path) -> dict[str, str]:
    """The environment that commands are started with."""
    return clean_environment(cache_dir)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of `overrides_of`, with its tokens prepared; not to be written to."""
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def code_corpus(workplace: Path) -> Path:
    """The corpus of `tiny`."""
    return write_jsonl(workplace / "corpus.jsonl", documents(300))


@pytest.fixture(scope="session")
def tiny(code_corpus: Path) -> list[str]:
    """Overrides of a run that takes a moment."""
    return [
        "model=tiny",
        "model.vocab_size=512",
        "data=files",
        f"data.paths=[{code_corpus}]",
        "data.num_workers=0",
        "data.heldout_fraction=0.1",
        "seq_len=32",
        "global_batch_size=4",
        "steps=4",
        "optim.warmup_steps=1",
        "log_interval=2",
        "diagnostics.interval=2",
        "eval.interval=2",
        "eval.sequences=4",
        "eval.tokens=200",
        "checkpoint.interval=2",
        "wandb.mode=disabled",
        "run.report=false",
    ]


@pytest.fixture(scope="session")
def finished_run(workplace: Path, environment: dict[str, str], tiny: list[str]) -> Path:
    """The directory of a finished run of standard attention; not to be written to."""
    words = [*tiny, "attention=standard", "run.name=finished", "run.report=true"]
    result = train(words, workplace, environment)
    assert result.code == 0, result.err
    assert "outputs/finished/report.html" in result.out
    return workplace / "outputs" / "finished"


@pytest.fixture
def killed_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of that run as if it had been killed after its checkpoint of step 2."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    unfinish(run, 4)
    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB: three checkpoints of the runs here and a bit."""
    with disks.small_disk(tmp_path / "disk", "24m") as disk:
        yield disk
