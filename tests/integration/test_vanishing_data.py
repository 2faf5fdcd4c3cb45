"""If tokens are lost or change during a run, the run saves and stops with one error line.

With restored tokens, the run resumes.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs.command import Gate, finish, prepared_corpus, start, the_error
from tiers import pairs

from diffllm.checkpoint.directory import list_checkpoints

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


def samples(run: Path, rank: int) -> dict[int, list[str]]:
    """Return the samples of a rank by step; for a repeated step, the last."""
    lines = (run / f"samples-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line["samples"] for line in map(json.loads, lines)}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    path = tmp_path_factory.mktemp("vanishing")
    prepared_corpus(path)
    return path


def undisturbed(workplace: Path, ranks: int) -> Path:
    run = workplace / f"undisturbed-{ranks}"
    if not run.is_dir():
        finish(workplace / "corpus.jsonl", run, *WORDS, ranks=ranks)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "ranks", "workers"), pairs(tuple(DAMAGE), (1, 2), (0, 1)))
def test_resume_matches_uninterrupted_run_after_token_files_are_restored(
    workplace, tmp_path, damage, ranks, workers
):
    corpus = shutil.copy(workplace / "corpus.jsonl", tmp_path)
    shutil.copytree(workplace / "cache", tmp_path / "cache")
    (directory,) = (p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir())
    run, gate = tmp_path / "run", Gate(tmp_path / "run", 4)
    words = (*WORDS, f"data.num_workers={workers}")
    process = start(Path(corpus), run, *words, ranks=ranks)
    process.wait_for(gate.reached, "step 3")
    DAMAGE[damage](directory)
    gate.open()
    line = the_error(process.finish(2))
    made = max(samples(run, 0))
    assert 3 <= made < STEPS  # the run still uses samples that are intact or already read
    assert str(directory) in line
    assert line.endswith(f"stopped after step {made}, saved")
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-{made:08d}"]
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(workplace / "cache" / "tokens" / directory.name, directory)
    finish(Path(corpus), run, *words, ranks=ranks)
    for rank in range(ranks):
        assert samples(run, rank) == samples(undisturbed(workplace, ranks), rank)


def test_damaged_training_tokens_stop_run_before_first_step(workplace, tmp_path):
    corpus = shutil.copy(workplace / "corpus.jsonl", tmp_path)
    shutil.copytree(workplace / "cache", tmp_path / "cache")
    (directory,) = (p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir())
    DAMAGE["train written over"](directory)
    text = start(Path(corpus), tmp_path / "run", *WORDS, ranks=2).finish(2)
    assert "train-00000-00000.bin: damaged" in the_error(text)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
def test_damaged_heldout_tokens_stop_run_before_evaluation(workplace, tmp_path):
    corpus = shutil.copy(workplace / "corpus.jsonl", tmp_path)
    shutil.copytree(workplace / "cache", tmp_path / "cache")
    (directory,) = (p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir())
    run, gate = tmp_path / "run", Gate(tmp_path / "run", "heldout")
    process = start(Path(corpus), run, *WORDS, ranks=2)
    process.wait_for(gate.reached, "the last evaluation")
    DAMAGE["heldout cut off"](directory)
    gate.open()
    assert "heldout-00000-00000.bin: truncated" in the_error(process.finish(2))
    shutil.rmtree(directory)
    shutil.copytree(workplace / "cache" / "tokens" / directory.name, directory)
    finish(Path(corpus), run, *WORDS, ranks=2)
    losses = [
        json.loads((path / "summary.json").read_text(encoding="utf-8"))["heldout_loss"]
        for path in (run, undisturbed(workplace, 2))
    ]
    assert losses[0] == losses[1]
