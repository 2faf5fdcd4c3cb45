"""Runs whose documents, or some of their targets, are masked, in this process."""

import json
import shutil
from pathlib import Path

import pytest
from runs.command import assert_same_weights, documents, metric_lines, overrides_of, prepared_corpus

from diffllm.cli.run import run_and_report as run
from diffllm.config import load_config
from diffllm.core.errors import ConfigError, DataError

WORDS = ("steps=8", "checkpoint.interval=4", "eval.interval=4", "log_interval=2")
MASKED = ("data.mask_documents=true", "activation_checkpointing=true", "compile=false")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def train(corpus: Path, directory: Path, *overrides: str) -> None:
    words = [*overrides_of(corpus, directory), *WORDS, "data.num_workers=0", *overrides]
    run(load_config(words))


@pytest.mark.slow
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


def test_a_sample_without_anything_to_predict_is_refused_before_the_first_step(tmp_path):
    """One sequence lies within the first prompt; of sixteen, some have an answer."""
    rows = [{"prompt": text, "completion": text[:40]} for text in documents(60)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *("data.text_column=completion", "data.prompt_column=prompt", "data.heldout_fraction=0.2"),
        "data.vocab_size=400",
    ]
    run_dir = tmp_path / "run"
    with pytest.raises(DataError, match="1 sequence of 64 tokens, has only context and nothing to"):
        train(tmp_path / "corpus.jsonl", run_dir, *words, "eval.sequences=1")
    assert not run_dir.exists()
    train(tmp_path / "corpus.jsonl", run_dir, *words, "eval.sequences=16")
    losses = [line["eval/loss"] for line in metric_lines(run_dir) if "eval/loss" in line]
    assert len(losses) == 2
    assert None not in losses
