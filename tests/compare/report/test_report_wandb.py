"""Gaps over tokens in a wandb run."""

import json
import re
import shutil
import subprocess

import pytest
from report_pages import without_drawing
from runs.written import edit_json
from test_report_budgets import TOKENS, loss, write_budget_run, write_budgeted
from wandb_file import OfflineRun

from diffllm.cli import main
from diffllm.compare.report.comparison import read
from diffllm.compare.sweep.command import print_upload
from diffllm.compare.wandb_runs import Destination, comparison_id, record_gaps, write_gaps
from diffllm.core.errors import ConfigError
from diffllm.core.run_files import SweepFile
from diffllm.metrics.wandb_config import WandbMode


def curve(variant, tokens, seed):
    """The gap of `gated` differs between seeds."""
    return loss(variant, tokens, seed) + 0.02 * seed * (variant == "gated")


@pytest.fixture
def offline_sweep(tmp_path, monkeypatch):
    """Write a sweep of two variants and two seeds; reports draw no figures."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variant in ("standard", "gated"):
        for seed in (0, 1):
            write_budget_run(tmp_path / "swept" / f"{variant}{seed}", variant, seed, curve)
    with without_drawing():
        yield tmp_path / "swept"


def recorded_gaps(swept):
    """Record the gaps of a sweep, and return their wandb run."""
    assert record_gaps(read([swept])[0], swept)
    return OfflineRun(swept)


def gap_and_bounds(values):
    return [values[f"gap/gated{end}"] for end in ("", "/low", "/high")]


def test_record_gaps_logs_gaps_with_interval_of_report_to_wandb(offline_sweep):
    comparison, _ = read([offline_sweep])
    run = recorded_gaps(offline_sweep)
    assert (run.header.run_group, run.header.display_name) == ("comparison", "swept")
    assert run.metrics["gap/*"].step_metric == "tokens"
    assert [line["tokens"] for line in run.history] == [step * TOKENS for step in (5, 10, 15, 20)]
    values = comparison.rows[1].values
    reported = [values[name] for name in ("gap", "gap_low", "gap_high")]
    assert gap_and_bounds(run.summary) == pytest.approx(reported)
    assert reported[1] < reported[0] - 0.01, "wider than the range over seeds"
    for line in run.history:  # These runs have the same gap at every step and at the end.
        assert gap_and_bounds(line) == pytest.approx(reported)
        assert line["gap/noise_floor"] > 0
    assert run.config["baseline"] == "standard"


def test_record_gaps_at_equal_flops_stores_final_gap_without_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    swept = tmp_path / "swept"
    for variant in ("standard", "diff_v2"):
        for seed in (0, 1):
            final_loss = 4.0 + 0.1 * seed - (0.1 + 0.02 * seed) * (variant == "diff_v2")
            write_budgeted(swept / f"{variant}{seed}", variant, seed, final_loss)
    run = recorded_gaps(swept)
    assert run.history == []
    assert run.summary["gap/diff_v2"] == pytest.approx(-0.11)
    (swept / SweepFile.COMPARISON_ID).unlink()
    result = write_gaps(swept, Destination(WandbMode.offline, None, None))
    assert result["lines"] == 0


def test_record_gaps_uses_wandb_variables_that_runs_recorded(offline_sweep, monkeypatch):
    """The command may run in another shell than the runs; keys of the config come first."""
    monkeypatch.setenv("WANDB_PROJECT", "of-this-shell")
    variables = {"WANDB_PROJECT": "of-the-runs", "WANDB_RUN_GROUP": "their-group"}
    for file in offline_sweep.glob("*/run.json"):
        edit_json(file, environment={"variables": variables})
    header = recorded_gaps(offline_sweep).header
    assert (header.project, header.run_group) == ("of-the-runs", "their-group")


def test_record_gaps_ignores_wandb_variables_that_runs_did_not_record(offline_sweep, monkeypatch):
    for name in ("WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.setenv(name, "of-this-shell")
    header = recorded_gaps(offline_sweep).header
    assert (header.entity, header.run_group, [*header.tags]) == ("", "comparison", ["swept"])


def test_printed_upload_command_selects_only_runs_of_sweep_in_shared_wandb_dir(
    offline_sweep, tmp_path, monkeypatch, capsys
):
    shared = tmp_path / "shared dir"
    monkeypatch.setenv("WANDB_DIR", str(shared))
    run_ids = {"standard0": "abc", "gated1": "a-1", "standard1": "*"}
    for name, run_id in run_ids.items():
        edit_json(offline_sweep / name / "run.json", wandb_id=run_id)
    names_of_runs = {f"20260101_000000-{run_id}" for run_id in ("abc", "a-1")}
    names_of_runs.add("20260101_000001-abc")
    for name in (*names_of_runs, "20260101_000000-unrelated", "20260101_000000-seed-abc"):
        (shared / "wandb" / f"offline-run-{name}").mkdir(parents=True)
    assert record_gaps(read([offline_sweep])[0], offline_sweep)
    print_upload(offline_sweep)
    command = re.search("`wandb sync (.*)`", capsys.readouterr().out)[1]
    listed = subprocess.run(
        f"ls -d {command}", shell=True, capture_output=True, encoding="utf-8", check=True
    )
    names = {line.rpartition("offline-run-")[2] for line in listed.stdout.splitlines()}
    (of_comparison,) = names - names_of_runs
    assert of_comparison.endswith(comparison_id(offline_sweep))
    assert len(names) == 4


def test_record_gaps_replaces_earlier_wandb_run_of_directory(offline_sweep):
    first = recorded_gaps(offline_sweep)
    for variant in ("standard", "gated"):
        write_budget_run(offline_sweep / f"{variant}2", variant, 2, curve)
    second = recorded_gaps(offline_sweep)
    assert second.header.run_id == first.header.run_id
    assert not second.header.resumed
    assert gap_and_bounds(second.summary) != gap_and_bounds(first.summary)


def test_wandb_command_writes_runs_and_same_gaps_as_report(offline_sweep, output_of):
    for file in offline_sweep.glob("*/run.json"):
        edit_json(file, wandb_id=file.parent.name)
    first = recorded_gaps(offline_sweep)
    content = json.loads(output_of("wandb", f"sweep={offline_sweep}", "project=moved", "--json"))
    assert [written["id"] for written in content["runs"]] == [
        "gated0", "gated1", "standard0", "standard1",
    ]  # fmt: skip
    second = OfflineRun(offline_sweep)
    assert first.header.project == "diffllm"
    assert second.header.project == OfflineRun(offline_sweep / "gated1").header.project == "moved"
    assert second.header.run_id == first.header.run_id
    assert second.header.run_group == first.header.run_group == "comparison"
    assert second.history == first.history
    assert gap_and_bounds(second.summary) == gap_and_bounds(first.summary)
    assert second.config["rows"] == first.config["rows"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("command", ["report", "wandb"])
def test_gaps_after_wandb_sync_are_in_new_wandb_run(offline_sweep, command):
    words = {"report": [str(offline_sweep), "wandb=true"], "wandb": [f"sweep={offline_sweep}"]}
    first = recorded_gaps(offline_sweep)
    first.path.with_name(f"{first.path.name}.synced").touch()  # as `wandb sync` does
    for _ in range(2):
        assert main([command, *words[command]]) == 0
        second = OfflineRun(offline_sweep)
        assert second.header.run_id == comparison_id(offline_sweep) != first.header.run_id
        assert second.history == first.history
    assert list(offline_sweep.glob(f"wandb/replaced/*-{first.header.run_id}/*.synced"))


def test_failed_online_command_keeps_offline_gaps(offline_sweep, monkeypatch):
    first = recorded_gaps(offline_sweep)
    monkeypatch.setenv("HOME", str(offline_sweep))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"wandb cannot store the run swept: .*API key"):
        write_gaps(offline_sweep, Destination(WandbMode.online, None, None))
    assert OfflineRun(offline_sweep).path == first.path


def test_gaps_are_written_with_warning_if_sweep_cannot_store_their_id(offline_sweep, capsys):
    file = offline_sweep / SweepFile.COMPARISON_ID
    # Not a directory without write permission, because root may write there.
    file.mkdir()
    assert main(["report", str(offline_sweep)]) == 0
    assert not (offline_sweep / "wandb").exists()
    assert main(["report", str(offline_sweep), "wandb=true"]) == 0
    assert main(["wandb", f"sweep={offline_sweep}"]) == 0
    assert len(list(offline_sweep.glob("wandb/offline-run-*"))) == 2
    output, errors = capsys.readouterr()
    assert f"gaps over tokens: {offline_sweep / 'wandb'}" in output
    warnings = [line for line in errors.splitlines() if "warning: later" in line]
    message = f"will write another wandb run with the gaps: cannot write {file}: "
    assert [message in line for line in warnings] == [True, True]


def test_wandb_command_writes_gaps_of_each_sweep_of_glob_once(offline_sweep, output_of):
    shutil.copytree(offline_sweep, offline_sweep.parent / "swept2")
    (offline_sweep.parent / "swept3").mkdir()
    words = [f"sweep={offline_sweep}*", f"sweep={offline_sweep.parent}/./swept", "--json"]
    gaps = json.loads(output_of("wandb", *words))["gaps"]
    assert [upload["run"] for upload in gaps] == [str(offline_sweep), f"{offline_sweep}2"]


def test_record_gaps_of_single_seed_has_no_interval(offline_sweep):
    for variant in ("standard", "gated"):
        shutil.rmtree(offline_sweep / f"{variant}1")
    run = recorded_gaps(offline_sweep)
    for values in (*run.history, run.summary):
        assert values["gap/gated"] == pytest.approx(-0.1)
        assert not {"gap/gated/low", "gap/gated/high"} & {*values}


def test_record_gaps_returns_false_without_wandb_or_gaps(offline_sweep, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert not record_gaps(read([offline_sweep])[0], offline_sweep)
    assert not (offline_sweep / "wandb").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    single = offline_sweep / "standard0"
    assert not record_gaps(read([single])[0], single), "there is no gap"
