"""wandb in complete runs: content of an offline run, and a killed service."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from runs.command import Gate, descendants, finish, metrics, start, success_of, train, unfinish
from runs.json_files import read_json, write_json
from wandb.proto.wandb_internal_pb2 import RunRecord
from wandb_file import OfflineRun, covers

from diffllm.compare.report.comparison import read
from diffllm.metrics.table import COST_AXES, METRICS

SMALL = ("wandb.mode=offline", "seq_len=32", "global_batch_size=2", "data.num_workers=0")
KEY = "0123456789" * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def said_of_wandb(output: str) -> list[str]:
    """Return the lines about wandb after the first, which names wandb's directory."""
    head, *others = [line for line in output.splitlines() if "wandb" in line]
    assert head.startswith("wandb: offline; `wandb sync ")
    return others


def test_offline_wandb_run_matches_saved_config_and_metrics(directory, corpus, monkeypatch):
    monkeypatch.setenv("DIFFLLM_WANDB_TAGS", "out,study")
    run = directory / "whole"
    overrides = ("steps=6", "log_interval=2", "diagnostics.interval=3", "eval.interval=3")
    tags = ("run.sweep=a-sweep", "wandb.tags=[mine]")
    words = (*SMALL, *overrides, *tags, "checkpoint.interval=3")
    output = start(corpus, run, *words).finish()
    assert said_of_wandb(output) == []
    found = OfflineRun(run)
    pattern = f"offline-run-*-{found.header.run_id}"
    assert f"wandb sync {run}/wandb/{pattern}` uploads it" in output

    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6]
    steps = {line["step"]: line for line in found.history}
    assert [*steps] == [1, 2, 3, 4, 5, 6]
    assert all(line.items() <= steps[line["step"]].items() for line in lines)
    names = {name for line in steps.values() for name in line} - {*COST_AXES}
    assert len(names) > 25
    for name in names:
        (pattern,) = [metric.name for metric in METRICS if covers(metric.name, name)]
        assert found.metrics[pattern].step_metric == "tokens"
    final = read_json(run / "summary.json")
    for name in ("loss", "bits_per_byte", "tokens", "documents"):
        assert found.summary[f"heldout_{name}"] == final[f"heldout_{name}"]

    header, config = found.header, found.config
    facts = read_json(run / "run.json")
    assert {name: config[name] for name in facts} == facts
    assert config["parameters"] > 1000
    saved = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    del saved["resolved"]["defaults"]  # depends on the command, not only on the config
    assert {name: config[name] for name in saved} == saved
    assert config["resolved"]["choices"]["attention"] == header.run_group == "diff_v2"
    assert config["resolved"]["choices"]["model"] == header.job_type == "tiny"
    assert list(header.tags) == ["mine", "out", "study", "a-sweep"]
    assert header.display_name == "whole"

    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def service_of(parent: int) -> int:
    for pid in descendants(parent):
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith("wandb-core"):
            return pid
    raise AssertionError("wandb has no service")


@pytest.mark.slow
def test_training_continues_after_wandb_service_is_killed(directory, corpus):
    run = directory / "killed"
    gate = Gate(run, 6)
    overrides = (*SMALL, "steps=12", "log_interval=1", "eval.interval=10")
    process = start(corpus, run, *overrides)
    process.wait_for(gate.reached, "step 6")
    os.kill(service_of(process.pid()), signal.SIGKILL)
    gate.open()
    output = process.finish()
    said = said_of_wandb(output)
    assert "Traceback" not in output
    assert len(said) == 1, output
    assert "wandb stopped working, training continues" in said[0]
    assert [line["step"] for line in metrics(run)] == list(range(1, 13))
    assert read_json(run / "summary.json")["steps"] == 12


SHARED = {"WANDB_NAME": "one-name", "WANDB_RUN_ID": "one-id", "WANDB_RUN_GROUP": "one-group"}


def headers(*runs: Path) -> list[RunRecord]:
    return [OfflineRun(run).header for run in runs]


@pytest.mark.slow
def test_resumed_run_keeps_wandb_id_of_first_start(tmp_path, corpus, monkeypatch):
    """WANDB_NAME names a run without run.name; the checkpoint decides the id."""
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    finish(corpus, run, *SMALL, "steps=2", "checkpoint.interval=2", "optim.warmup_steps=1")
    (first,) = headers(run)
    shutil.rmtree(run / "wandb")
    monkeypatch.setenv("WANDB_RUN_ID", "another-id")
    words = ("steps=3", "run.allow_changes=[steps]", "run.name=mine", "optim.warmup_steps=1")
    finish(corpus, run, *SMALL, *words)
    (second,) = headers(run)
    assert [first.run_id, second.run_id] == ["one-id", "one-id"]
    assert [first.display_name, second.display_name] == ["one-name", "mine"]
    recorded = read_json(run / "run.json")["environment"]["variables"]
    assert recorded["WANDB_RUN_GROUP"] == second.run_group == "one-group"


def sweep_words(tiny: list[str], variants: str, rates: str, seeds: str) -> list[str]:
    swept = [f"attention={variants}", f"optim.lr={rates}", f"seed={seeds}"]
    return ["-m", *tiny, "wandb.mode=offline", "run.sweep=s", *swept]


@pytest.fixture(scope="module")
def wandb_sweep(tmp_path_factory, tiny, environment):
    """Return the directory of a finished sweep, outputs/s in the directory of its command."""
    place = tmp_path_factory.mktemp("swept")
    words = sweep_words(tiny, "standard,diff_v2", "1e-3,3e-3", "0,1")
    success_of(train(words, place, environment))
    return place / "outputs" / "s"


@pytest.mark.slow
def test_groups_of_sweep_in_wandb_are_rows_of_report(wandb_sweep):
    rows = read([wandb_sweep])[0].rows
    assert [row.label for row in rows] == [
        "standard lr=0.001", "standard lr=0.003", "diff_v2 lr=0.001", "diff_v2 lr=0.003",
    ]  # fmt: skip
    for row in rows:
        assert len(row.runs) == 2
        for run in row.runs:
            (header,) = headers(run.path)
            assert (header.run_group, header.job_type) == (row.label, "tiny")
            assert (header.display_name, [*header.tags]) == (run.path.name, ["s"])
    (comparison,) = headers(wandb_sweep)
    assert (comparison.run_group, comparison.display_name) == ("comparison", "s")


@pytest.mark.slow
def test_resumed_runs_of_extended_sweep_keep_their_groups(wandb_sweep, tmp_path, tiny, environment):
    sweep = shutil.copytree(wandb_sweep, tmp_path / "outputs" / "s")
    first_steps = "diff_v2-lr0.001-seed1"  # killed before its first checkpoint
    recorded = {"diff_v2-lr0.001-seed0": "a group", first_steps: "another group"}
    recorded["diff_v2-lr0.003-seed0"] = None
    for name, group in recorded.items():
        file = sweep / name / "run.json"
        facts = read_json(file)
        assert facts["wandb_group"] == facts["environment"]["variables"]["DIFFLLM_WANDB_GROUP"]
        facts["wandb_group"] = group
        if group is None:  # as in a run of an older version
            del facts["wandb_group"]
        write_json(file, facts)
        shutil.rmtree(sweep / name / "wandb")
        unfinish(sweep / name, 4)
    former_id = read_json(sweep / first_steps / "run.json")["wandb_id"]
    shutil.rmtree(sweep / first_steps / "checkpoints")
    (sweep / first_steps / "saved.json").unlink()
    words = sweep_words(tiny, "diff_v2", "1e-3,3e-3,1e-2", "0,1")
    success_of(train(words, tmp_path, environment))
    runs = [sweep / f"diff_v2-lr{lr}-seed0" for lr in ("0.001", "0.003", "0.01")]
    groups = [header.run_group for header in headers(*runs)]
    assert groups == ["a group", "diff_v2", "diff_v2 lr=0.01"]
    (header,) = headers(sweep / first_steps)
    assert (header.run_group, header.run_id) == ("another group", former_id)


@pytest.mark.slow
def test_runs_of_sweep_share_group_variable_and_differ_in_name_and_id(tmp_path, tiny, environment):
    words = ["-m", *tiny, "attention=standard,gated", "run.sweep=s", "wandb.mode=offline"]
    success_of(train(words, tmp_path, environment | SHARED))
    sweep = tmp_path / "outputs" / "s"
    found = headers(sweep / "standard", sweep / "gated", sweep)
    assert [header.display_name for header in found] == ["standard", "gated", "s"]
    assert {header.run_group for header in found} == {"one-group"}
    assert len({header.run_id for header in found} | {"one-id"}) == 4
