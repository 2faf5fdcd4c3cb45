"""If tokens are lost or change during a run, the run saves and stops with one error line.

With restored tokens, the run resumes.
"""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from runs.command import Gate, finish, prepared_corpus, rank_samples, start, the_error
from runs.json_files import read_json
from tiers import pairs

from diffllm.core.run_files import list_checkpoints

STEPS = 12
WORDS = (f"steps={STEPS}", "eval.interval=6", "checkpoint.interval=100", "log_interval=4")


def truncated(split: str) -> Callable[[Path], None]:
    def cut(directory: Path) -> None:
        os.truncate(directory / f"{split}-00000-00000.bin", 100)

    return cut


def overwritten(directory: Path) -> None:
    shard = directory / "train-00000-00000.bin"
    with shard.open("r+b") as file:
        file.write(bytes(shard.stat().st_size))


def removed(directory: Path) -> None:
    (directory / "heldout-00000-00000.bin").unlink()


def deleted(directory: Path) -> None:
    shutil.rmtree(directory)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "train cut off": truncated("train"),
    "train written over": overwritten,
    "heldout cut off": truncated("heldout"),
    "heldout removed": removed,
    "all deleted": deleted,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a corpus of this file alone, so that its cache contains tokens of one preparation."""
    return prepared_corpus(tmp_path_factory.mktemp("vanishing"))


@pytest.fixture
def tokens_copy(corpus, tmp_path):
    """Copy a corpus with its cache; return the directory of the copied tokens."""
    shutil.copy(corpus, tmp_path)
    shutil.copytree(corpus.parent / "cache", tmp_path / "cache")
    (directory,) = (p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir())
    return directory


@pytest.fixture(scope="module")
def undisturbed_run(corpus, tmp_path_factory):
    """Return a function that trains a run on intact tokens, once per world size."""

    @cache
    def run_on(ranks: int) -> Path:
        run = tmp_path_factory.mktemp("undisturbed") / "run"
        finish(corpus, run, *WORDS, ranks=ranks)
        return run

    return run_on


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "ranks", "workers"), pairs(tuple(DAMAGE), (1, 2), (0, 1)))
def test_resume_matches_uninterrupted_run_after_token_files_are_restored(
    corpus, tokens_copy, undisturbed_run, tmp_path, damage, ranks, workers
):
    copy = tmp_path / corpus.name
    run, gate = tmp_path / "run", Gate(tmp_path / "run", 4)
    words = (*WORDS, f"data.num_workers={workers}")
    process = start(copy, run, *words, ranks=ranks)
    process.wait_for(gate.reached, "step 3")
    DAMAGE[damage](tokens_copy)
    gate.open()
    line = the_error(process.finish(2))
    made = max(rank_samples(run, 0))
    assert 3 <= made < STEPS  # the run still uses samples that are intact or already read
    assert str(tokens_copy) in line
    assert line.endswith(f"stopped after step {made}, saved")
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-{made:08d}"]
    shutil.rmtree(tokens_copy, ignore_errors=True)
    shutil.copytree(corpus.parent / "cache" / "tokens" / tokens_copy.name, tokens_copy)
    finish(copy, run, *words, ranks=ranks)
    for rank in range(ranks):
        assert rank_samples(run, rank) == rank_samples(undisturbed_run(ranks), rank)


def test_damaged_training_tokens_stop_run_before_first_step(corpus, tokens_copy, tmp_path):
    copy = tmp_path / corpus.name
    DAMAGE["train written over"](tokens_copy)
    text = start(copy, tmp_path / "run", *WORDS, ranks=2).finish(2)
    assert "train-00000-00000.bin: damaged" in the_error(text)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
def test_damaged_heldout_tokens_prevent_evaluation(corpus, tokens_copy, undisturbed_run, tmp_path):
    copy = tmp_path / corpus.name
    run, gate = tmp_path / "run", Gate(tmp_path / "run", "heldout")
    process = start(copy, run, *WORDS, ranks=2)
    process.wait_for(gate.reached, "the last evaluation")
    DAMAGE["heldout cut off"](tokens_copy)
    gate.open()
    assert "heldout-00000-00000.bin: truncated" in the_error(process.finish(2))
    shutil.rmtree(tokens_copy)
    shutil.copytree(corpus.parent / "cache" / "tokens" / tokens_copy.name, tokens_copy)
    finish(copy, run, *WORDS, ranks=2)
    summary, undisturbed = (read_json(x / "summary.json") for x in (run, undisturbed_run(2)))
    assert summary["heldout_loss"] == undisturbed["heldout_loss"]
