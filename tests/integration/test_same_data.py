"""A run that resumes on other ranks and meshes reads the same samples in each step."""

import json
from pathlib import Path

import pytest
from runs.command import ForkedRun, Gate, metric_lines, overrides_of, step_samples, the_error
from runs.json_files import read_jsonl, write_jsonl
from runs.planted_train import Fault

STEPS = 24
BATCH = 12
SETTINGS = (
    *(f"global_batch_size={BATCH}", f"steps={STEPS}", "log_interval=1", "precision=fp32"),
    *("seq_len=256", "checkpoint.interval=1000", "eval.interval=1000"),
)


def same_data_words(corpus: Path, run: Path, *more: str) -> list[str]:
    return overrides_of(corpus, run, *SETTINGS, *more)


@pytest.fixture(scope="module")
def dense_run(corpus, tmp_path_factory):
    run = tmp_path_factory.mktemp("straight") / "dense"
    ForkedRun(same_data_words(corpus, run), 1, run).finish()
    return run


LAYOUTS = {
    "1, 2, 4, 3": [
        (1, ()),
        (2, ("micro_batch_size=3",)),
        (4, ("parallel=hsdp", "parallel.replicate=2", "parallel.shard=2")),
        (3, ("data.num_workers=0",)),
    ],
    "experts": [
        (2, ("parallel.expert=2",)),
        (1, ("micro_batch_size=4",)),
        (4, ("parallel.expert=2", "parallel.shard=2")),
        (2, ("parallel.replicate=2", "parallel.shard=1")),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1, 2, 4, 3", "experts"])
def test_resume_on_different_mesh_reads_same_batches(corpus, dense_run, tmp_path, kind):
    model = ["model=moe_tiny"] if kind == "experts" else []
    undisturbed = dense_run
    if model:
        undisturbed = tmp_path / "undisturbed"
        ForkedRun(same_data_words(corpus, undisturbed, *model), 1, undisturbed).finish()
    run, made = tmp_path / "run", 0
    for i, (ranks, more) in enumerate(LAYOUTS[kind]):
        if i < len(LAYOUTS[kind]) - 1:
            gate = Gate(run, made + 4)
            ForkedRun(same_data_words(corpus, run, *model, *more), ranks, run).stop_at(gate)
            made = metric_lines(run)[-1]["step"]
            assert made < STEPS - 3, "stopped too late"
        else:
            ForkedRun(same_data_words(corpus, run, *model, *more), ranks, run).finish()
    assert step_samples(run) == step_samples(undisturbed)
    for mine, other in zip(metric_lines(run), metric_lines(undisturbed), strict=True):
        assert mine["step"] == other["step"]
        assert mine["train/loss"] == pytest.approx(other["train/loss"], abs=2e-4), mine["step"]


# Changes of data, batch size and model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ("seq_len=128", ["seq_len"]),
        ("data.vocab_size=290", ["data.vocab_size", "tokenizer"]),
        ("data.paths=[OTHER]", ["corpus", "tokenizer"]),
    ],
)
def test_resume_refuses_changed_data_key_without_allow_changes(corpus, tmp_path, change, allowed):
    other = tmp_path / "other.jsonl"
    write_jsonl(other, reversed(read_jsonl(corpus)[:300]))
    change = change.replace("OTHER", str(other))
    run = tmp_path / "run"
    short = [*same_data_words(corpus, run), "steps=4", "optim.warmup_steps=1"]
    ForkedRun(short, 1, run).finish()
    files = [path for path in run.iterdir() if path.suffix in (".yaml", ".jsonl")]
    before = {path: path.read_bytes() for path in files}

    longer = [*short, "steps=6", change]
    passed = ["steps"]
    for key in allowed:  # keys of the config are refused first, then keys of the content
        refused = ForkedRun([*longer, f"run.allow_changes=[{','.join(passed)}]"], 1, tmp_path / key)
        assert refused.codes() == [2]
        error = the_error(refused.text())
        assert f"{key}: " in error
        passed.append(key)
    assert f"run.allow_changes=[{','.join(passed)}]" in error
    assert before == {path: path.read_bytes() for path in before}

    said = ForkedRun([*longer, f"run.allow_changes=[{','.join(passed)}]"], 1, run).finish()
    assert "resumes from step 4" in said
    assert "changed: " in said
    assert "warning: the learning rate changes from " in said
    (line,) = (run / "changes.jsonl").read_text(encoding="utf-8").splitlines()
    note = json.loads(line)
    assert note["step"] == 4
    assert note["changes"].keys() == {"steps", *allowed}
    assert note["changes"]["steps"] == [4, 6]
    assert [line["step"] for line in metric_lines(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_resume_continues_sample_order_if_batch_size_is_halved(corpus, dense_run, tmp_path):
    """With half of the global batch, each step reads the next six samples of the same order."""
    run = tmp_path / "run"
    short = [*same_data_words(corpus, run), "steps=4", "optim.warmup_steps=1"]
    ForkedRun(short, 1, run).finish()
    more = ["steps=8", "global_batch_size=6", "run.allow_changes=[steps,global_batch_size]"]
    ForkedRun([*short, *more], 1, run).finish()
    mine, undisturbed = step_samples(run), step_samples(dense_run)
    for step in (5, 6):
        halves = mine[2 * step - 5] + mine[2 * step - 4]
        assert sorted(halves) == undisturbed[step]


@pytest.mark.slow
def test_run_files_stay_unchanged_if_resume_refuses_new_model_config(corpus, tmp_path):
    run = tmp_path / "run"
    short = [*same_data_words(corpus, run), "steps=2", "optim.warmup_steps=1"]
    ForkedRun(short, 1, run).finish()
    kept = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: path.read_bytes() for path in kept}
    wider = ["steps=4", "model.ffn_dim=256", "run.allow_changes=[steps,model]"]
    refused = ForkedRun([*short, *wider], 2, tmp_path / "refused")
    assert refused.codes() == [2, 2]
    assert "is a checkpoint of a different model" in refused.text()
    assert {path: path.read_bytes() for path in kept} == before
    assert not (run / "changes.jsonl").exists()


def test_allowed_config_change_is_recorded_before_model_is_built(corpus, tmp_path):
    """If a start fails, changes.jsonl must match config.yaml, which contains the change."""
    run = tmp_path / "run"
    short = [*same_data_words(corpus, run), "steps=2", "optim.warmup_steps=1"]
    ForkedRun(short, 1, run).finish()
    more = ["steps=4", "optim.lr=0.01", "run.allow_changes=[steps,optim.lr]"]
    broken = ForkedRun([*short, *more], 1, run, Fault("broken build"))
    assert broken.codes() == [1]
    (line,) = (run / "changes.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["changes"]["optim.lr"][1] == 0.01
