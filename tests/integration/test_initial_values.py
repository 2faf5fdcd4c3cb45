"""Runs whose initial values depend on their first data."""

import json
import shutil
from pathlib import Path

import pytest
from runs.command import finish, metric_lines, prepared_corpus

WORDS = (
    "steps=4", "optim.warmup_steps=1", "checkpoint.interval=2", "eval.interval=4",
    "log_interval=1", "precision=fp32", "diagnostics.interval=1", "data.num_workers=0",
)  # fmt: skip
MATCHED = ("attention=diff_v2", "model.init_match=write")


def factors(run: Path) -> list[float]:
    return json.loads((run / "run.json").read_text())["init_match"]


@pytest.mark.slow
def test_factors_depend_on_no_rank_and_stay_when_the_run_continues(tmp_path):
    corpus = prepared_corpus(tmp_path)
    one, two, standard = (tmp_path / name for name in ("one", "two", "standard"))
    finish(corpus, standard, *WORDS, "attention=standard")
    finish(corpus, one, *WORDS, *MATCHED)
    finish(corpus, two, *WORDS, *MATCHED, ranks=2)
    first, line = metric_lines(standard)[0], metric_lines(one)[0]
    for layer in ("layer_00", "layer_01"):  # 8 sequences are the whole first batch
        name = f"attn_write_rms/{layer}"
        assert line[name] == pytest.approx(first[name], rel=1e-5)
        assert line[f"ffn_write_rms/{layer}"] != first[f"ffn_write_rms/{layer}"]
    assert factors(one) == factors(two)
    assert [line["train/loss"] for line in metric_lines(two)] == pytest.approx(
        [line["train/loss"] for line in metric_lines(one)], abs=2e-4
    )
    before, uninterrupted = factors(one), metric_lines(one)
    shutil.rmtree(one / "checkpoints" / "step-00000004")
    (one / "summary.json").unlink()
    assert "continues after step 2" in finish(corpus, one, *WORDS, *MATCHED)
    assert factors(one) == before
    assert metric_lines(one) == uninterrupted
