"""A run on a mixture with a curriculum: sources in metrics, summary and report."""

import pytest
from runs.command import documents, finish, metric_lines, write_texts
from runs.json_files import read_json

from diffllm.compare.report import write_report

RAMP = "data.curriculum=[{at: 0.1, weights: {code: 3, prose: 1}}, {at: 0.9, weights: {prose: 1}}]"


@pytest.mark.slow
def test_run_on_data_mixture_writes_metrics_of_every_data_source(tmp_path):
    run, prose = tmp_path / "run", tmp_path / "prose.jsonl"
    code = write_texts(tmp_path / "code.jsonl", documents(60), "content")
    write_texts(prose, [f"Document {i} tells of {i * 7} days. " * (i % 9 + 2) for i in range(300)])
    sources = (
        f"{{code: {{source: files, paths: [{code}], text_column: content, weight: 0.75}},"
        f" prose: {{source: files, paths: [{prose}], weight: 0.25}}}}"
    )
    finish(
        *(prose, run, "data=mixture", "data.paths=[]", f"data.sources={sources}", RAMP),
        *("data.between=linear", "data.vocab_size=400", "data.heldout_fraction=0.1", "steps=24"),
        *("global_batch_size=12", "log_interval=1", "eval.interval=1000", "eval.tokens=null"),
    )
    lines = metric_lines(run)
    assert {"eval/loss", "eval/loss/code", "eval/loss/prose"} <= lines[-1].keys()
    read = [line["data/tokens/code"] + line["data/tokens/prose"] for line in lines]
    assert read == [line["tokens"] for line in lines]
    shares = [line["data/tokens/prose"] / line["tokens"] for line in lines]
    assert shares[-1] == pytest.approx(0.25 * 0.1 + 0.8 * 0.625 + 0.1, abs=0.02)
    assert shares[2] == pytest.approx(0.25, abs=0.04)
    summary = read_json(run / "summary.json")
    losses = [summary[f"heldout_loss/{name}"] for name in ("code", "prose")]
    assert min(losses) <= summary["heldout_loss"] <= max(losses)
    page, _ = write_report([run])
    text = page.read_text(encoding="utf-8")
    assert "Held-out sample loss, code" in text
    assert "Epochs, prose" in text
