"""Runs on a mixture: the same samples on any ranks, killed on a slope of weights, and its sources
in metrics and report."""

import json
import signal
from pathlib import Path

import pytest
from runs.command import ForkedRun, Gate, documents, metric_lines, write_jsonl
from test_same_data import samples

from diffllm import load_config
from diffllm.checkpoint.directory import list_checkpoints
from diffllm.checkpoint.manifest import read_state
from diffllm.compare.report import write_report
from diffllm.data.preparation.prepare import prepare

STEPS, BATCH = 24, 12
RAMP = "data.curriculum=[{at: 0.1, weights: {code: 3, prose: 1}}, {at: 0.9, weights: {prose: 1}}]"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two corpora, prepared."""
    directory = tmp_path_factory.mktemp("mixture")
    write_jsonl(directory / "code.jsonl", documents(60), "content")
    texts = [f"Document {i} tells of {i * 7} days. " * (i % 9 + 2) for i in range(300)]
    write_jsonl(directory / "prose.jsonl", texts)
    prepare(load_config(words(directory, directory / "none")).data)
    return directory


def words(place: Path, run: Path, *more: str) -> list[str]:
    code = f"{{source: files, paths: [{place / 'code.jsonl'}], text_column: content, weight: 0.75}}"
    prose = f"{{source: files, paths: [{place / 'prose.jsonl'}], weight: 0.25}}"
    return [
        f"data.sources={{code: {code}, prose: {prose}}}",
        *(f"data.cache_dir={place / 'cache'}", "data.vocab_size=400", "data.heldout_fraction=0.1"),
        *("model=tiny", "model.vocab_size=512", "seq_len=64", f"global_batch_size={BATCH}"),
        *(f"steps={STEPS}", "optim.warmup_steps=5", "log_interval=1", "precision=fp32"),
        *("eval.sequences=4", "eval.interval=1000", "checkpoint.interval=4"),
        *("wandb.mode=disabled", "run.report=false", f"run.dir={run}", *more),
    ]


@pytest.fixture(scope="module")
def straight(place: Path) -> Path:
    """An undisturbed run on one rank, along a slope of weights."""
    run = place / "straight"
    ForkedRun(words(place, run, RAMP, "data.between=linear"), 1, run).finish()
    return run


def test_a_mixture_is_told_source_by_source(place, straight):
    lines = metric_lines(straight)
    last = lines[-1]
    assert {"eval/loss", "eval/loss/code", "eval/loss/prose"} <= last.keys()
    read = [line["data/tokens/code"] + line["data/tokens/prose"] for line in lines]
    assert read == [line["tokens"] for line in lines]
    shares = [line["data/tokens/prose"] / line["tokens"] for line in lines]
    assert shares[-1] == pytest.approx(0.25 * 0.1 + 0.8 * 0.625 + 0.1, abs=0.02)
    assert shares[2] == pytest.approx(0.25, abs=0.04)
    summary = json.loads((straight / "summary.json").read_text())
    losses = [summary[f"heldout_loss/{name}"] for name in ("code", "prose")]
    assert min(losses) <= summary["heldout_loss"] <= max(losses)
    page, _ = write_report([straight])
    text = page.read_text()
    assert "Held-out loss, code" in text
    assert "Epochs of prose" in text


def forget(run: Path) -> None:
    """Take away what a killed run noted of samples behind its last checkpoint."""
    step = read_state(list_checkpoints(run / "checkpoints")[-1])["step"]
    for file in run.glob("samples-*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


@pytest.mark.slow
def test_killed_on_a_slope_it_reads_the_same_samples_on_other_ranks(place, straight, tmp_path):
    """Two ranks are killed, one of them alone goes on, then three."""
    run = tmp_path / "run"
    sloping = words(place, run, RAMP, "data.between=linear")
    gate = Gate(run, 10)
    killed = ForkedRun(sloping, 2, run)
    killed.wait_for(gate.reached, "gate")
    killed.signal(signal.SIGKILL)
    gate.open()
    killed.codes()
    forget(run)
    gate = Gate(run, 15)
    stopped = ForkedRun([*sloping, "data.num_workers=2"], 1, run)
    stopped.wait_for(gate.reached, "gate")
    stopped.signal(signal.SIGTERM)
    gate.open()
    stopped.finish()
    ForkedRun([*sloping, "data.num_workers=0"], 3, run).finish()
    assert samples(run) == samples(straight)
    for mine, other in zip(metric_lines(run), metric_lines(straight), strict=True):
        assert mine["step"] == other["step"]
        assert mine["data/tokens/code"] == other["data/tokens/code"]
        assert mine["train/loss"] == pytest.approx(other["train/loss"], abs=2e-4), mine["step"]


@pytest.mark.slow
def test_other_weights_are_refused_or_noted_and_hold_from_there(place, tmp_path):
    run = tmp_path / "run"
    short = [*words(place, run), "steps=4", "optim.warmup_steps=1"]
    ForkedRun(short, 1, run).finish()
    longer = [*short, "steps=8", "data.sources.code.weight=0", "run.allow_changes=[steps]"]
    refused = ForkedRun(longer, 1, tmp_path / "refused")
    assert refused.codes() == [2]
    assert "data.sources.code.weight" in refused.text()
    longer[-1] = "run.allow_changes=[steps,data.sources]"
    ForkedRun(longer, 1, run).finish()
    (note,) = map(json.loads, (run / "changes.jsonl").read_text().splitlines())
    assert note["step"] == 4
    assert note["changes"]["data.sources.code.weight"] == [0.75, 0.0]
    lines = metric_lines(run)
    assert lines[3]["data/tokens/code"] == lines[-1]["data/tokens/code"] > 0
    first, later = (samples(run)[step] for step in (4, 5))
    assert not set(first) & set(later)
