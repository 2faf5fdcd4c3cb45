"""Runs whose documents are masked, in this process."""

import shutil
from pathlib import Path

import pytest
from runs import assert_same_weights, metric_lines, overrides_of, prepared_corpus

from diffllm.config import load_config
from diffllm.errors import ConfigError
from diffllm.run.start import run

WORDS = ("steps=8", "checkpoint.interval=4", "eval.interval=4", "log_interval=2")
MASKED = ("data.mask_documents=true", "activation_checkpointing=true", "compile=false")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def train(corpus: Path, directory: Path, *overrides: str) -> None:
    words = [*overrides_of(corpus, directory), *WORDS, "data.num_workers=0", *overrides]
    run(load_config(words))


def test_masked_documents_stay_masked_when_a_run_continues(tmp_path, capfd):
    corpus = prepared_corpus(tmp_path)
    straight, broken, free = (tmp_path / name for name in ("straight", "broken", "free"))
    train(corpus, straight, *MASKED)
    shutil.copytree(straight, broken)  # what a run leaves that is killed after its first checkpoint
    shutil.rmtree(broken / "checkpoints" / "step-00000008")
    (broken / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"data\.mask_documents: True there, False here"):
        train(corpus, broken)
    capfd.readouterr()
    train(corpus, broken, *MASKED)
    assert "continues after step 4" in capfd.readouterr().out
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, 8)
    train(corpus, free)
    for mine, other in zip(metric_lines(straight), metric_lines(free), strict=True):
        for name in mine.keys() & {"train/loss", "eval/loss"}:
            assert mine[name] != other[name], (mine["step"], name)
