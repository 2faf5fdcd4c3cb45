"""Gaps over tokens in a wandb run."""

import json
import re
import shutil
import subprocess

import pytest
from report_pages import without_drawing
from runs.written import edit_json
from test_report_budgets import TOKENS, loss, write_budgeted, written
from wandb_file import OfflineRun

from diffllm.cli import main
from diffllm.compare.report.comparison import read
from diffllm.compare.sweep.command import print_upload
from diffllm.compare.wandb_runs import (
    Destination,
    comparison_id,
    record_gaps,
    write_gaps,
)
from diffllm.core.errors import ConfigError
from diffllm.core.run_files import SweepFile
from diffllm.metrics.wandb_config import WandbMode


def curve(variant, tokens, seed):
    """The gap of `gated` differs between seeds."""
    return loss(variant, tokens, seed) + 0.02 * seed * (variant == "gated")


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Write a sweep of two variants and two seeds; reports draw no figures."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variant in ("standard", "gated"):
        for seed in (0, 1):
            written(tmp_path / "swept" / f"{variant}{seed}", variant, seed, curve)
    with without_drawing():
        yield tmp_path / "swept"


def recorded(swept):
    """Record the gaps of a sweep, and return their wandb run."""
    assert record_gaps(read([swept])[0], swept)
    return OfflineRun(swept)


def gap_of(values):
    return [values[f"gap/gated{end}"] for end in ("", "/low", "/high")]


def test_record_gaps_logs_gaps_with_interval_of_report_to_wandb(swept):
    comparison, _ = read([swept])
    run = recorded(swept)
    assert (run.header.run_group, run.header.display_name) == ("comparison", "swept")
    assert run.metrics["gap/*"].step_metric == "tokens"
    assert [line["tokens"] for line in run.history] == [step * TOKENS for step in (5, 10, 15, 20)]
    values = comparison.rows[1].values
    reported = [values[name] for name in ("gap", "gap_low", "gap_high")]
    assert gap_of(run.summary) == pytest.approx(reported)
    assert reported[1] < reported[0] - 0.01, "wider than the range over seeds"
    for line in run.history:  # These runs have the same gap at every step and at the end.
        assert gap_of(line) == pytest.approx(reported)
        assert line["gap/noise_floor"] > 0
    assert run.config["baseline"] == "standard"


def test_record_gaps_at_equal_flops_stores_final_gap_without_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    swept = tmp_path / "swept"
    for variant in ("standard", "diff_v2"):
        for seed in (0, 1):
            final_loss = 4.0 + 0.1 * seed - (0.1 + 0.02 * seed) * (variant == "diff_v2")
            write_budgeted(swept / f"{variant}{seed}", variant, seed, final_loss)
    run = recorded(swept)
    assert run.history == []
    assert run.summary["gap/diff_v2"] == pytest.approx(-0.11)
    (swept / SweepFile.COMPARISON_ID).unlink()
    result = write_gaps(swept, Destination(WandbMode.offline, None, None))
    assert result["lines"] == 0


def test_record_gaps_uses_wandb_variables_that_runs_recorded(swept, monkeypatch):
    """The command may run in another shell than the runs; keys of the config come first."""
    monkeypatch.setenv("WANDB_PROJECT", "of-this-shell")
    variables = {"WANDB_PROJECT": "of-the-runs", "WANDB_RUN_GROUP": "their-group"}
    for file in swept.glob("*/run.json"):
        edit_json(file, environment={"variables": variables})
    header = recorded(swept).header
    assert (header.project, header.run_group) == ("of-the-runs", "their-group")


def test_record_gaps_ignores_wandb_variables_that_runs_did_not_record(swept, monkeypatch):
    for name in ("WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.setenv(name, "of-this-shell")
    header = recorded(swept).header
    assert (header.entity, header.run_group, [*header.tags]) == ("", "comparison", ["swept"])


def test_printed_upload_command_selects_only_runs_of_sweep_in_shared_wandb_dir(
    swept, tmp_path, monkeypatch, capsys
):
    shared = tmp_path / "shared dir"
    monkeypatch.setenv("WANDB_DIR", str(shared))
    run_ids = {"standard0": "abc", "gated1": "a-1", "standard1": "*"}
    for name, run_id in run_ids.items():
        edit_json(swept / name / "run.json", wandb_id=run_id)
    names_of_runs = {f"20260101_000000-{run_id}" for run_id in ("abc", "a-1")}
    names_of_runs.add("20260101_000001-abc")
    for name in (*names_of_runs, "20260101_000000-unrelated", "20260101_000000-seed-abc"):
        (shared / "wandb" / f"offline-run-{name}").mkdir(parents=True)
    assert record_gaps(read([swept])[0], swept)
    print_upload(swept)
    command = re.search("`wandb sync (.*)`", capsys.readouterr().out)[1]
    listed = subprocess.run(
        f"ls -d {command}", shell=True, capture_output=True, encoding="utf-8", check=True
    )
    names = {line.rpartition("offline-run-")[2] for line in listed.stdout.splitlines()}
    (of_comparison,) = names - names_of_runs
    assert of_comparison.endswith(comparison_id(swept))
    assert len(names) == 4


def test_record_gaps_replaces_earlier_wandb_run_of_directory(swept):
    first = recorded(swept)
    for variant in ("standard", "gated"):
        written(swept / f"{variant}2", variant, 2, curve)
    second = recorded(swept)
    assert second.header.run_id == first.header.run_id
    assert not second.header.resumed
    assert gap_of(second.summary) != gap_of(first.summary)


def test_wandb_command_writes_runs_and_same_gaps_as_report(swept, output_of):
    for file in swept.glob("*/run.json"):
        edit_json(file, wandb_id=file.parent.name)
    first = recorded(swept)
    content = json.loads(output_of("wandb", f"sweep={swept}", "project=moved", "--json"))
    assert [written["id"] for written in content["runs"]] == [
        "gated0", "gated1", "standard0", "standard1",
    ]  # fmt: skip
    second = OfflineRun(swept)
    assert first.header.project == "diffllm"
    assert second.header.project == OfflineRun(swept / "gated1").header.project == "moved"
    assert second.header.run_id == first.header.run_id
    assert second.header.run_group == first.header.run_group == "comparison"
    assert second.history == first.history
    assert gap_of(second.summary) == gap_of(first.summary)
    assert second.config["rows"] == first.config["rows"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("command", ["report", "wandb"])
def test_gaps_after_wandb_sync_are_in_new_wandb_run(swept, command):
    words = {"report": [str(swept), "wandb=true"], "wandb": [f"sweep={swept}"]}
    first = recorded(swept)
    first.path.with_name(f"{first.path.name}.synced").touch()  # as `wandb sync` does
    for _ in range(2):
        assert main([command, *words[command]]) == 0
        second = OfflineRun(swept)
        assert second.header.run_id == comparison_id(swept) != first.header.run_id
        assert second.history == first.history
    assert list(swept.glob(f"wandb/replaced/*-{first.header.run_id}/*.synced"))


def test_failed_online_command_keeps_offline_gaps(swept, monkeypatch):
    first = recorded(swept)
    monkeypatch.setenv("HOME", str(swept))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"wandb cannot store the run swept: .*API key"):
        write_gaps(swept, Destination(WandbMode.online, None, None))
    assert OfflineRun(swept).path == first.path


def test_gaps_are_written_with_warning_if_sweep_cannot_store_their_id(swept, capsys):
    file = swept / SweepFile.COMPARISON_ID
    # Not a directory without write permission, because root may write there.
    file.mkdir()
    assert main(["report", str(swept)]) == 0
    assert not (swept / "wandb").exists()
    assert main(["report", str(swept), "wandb=true"]) == 0
    assert main(["wandb", f"sweep={swept}"]) == 0
    assert len(list(swept.glob("wandb/offline-run-*"))) == 2
    output, errors = capsys.readouterr()
    assert f"gaps over tokens: {swept / 'wandb'}" in output
    warnings = [line for line in errors.splitlines() if "warning: later" in line]
    message = f"will write another wandb run with the gaps: cannot write {file}: "
    assert [message in line for line in warnings] == [True, True]


def test_wandb_command_writes_gaps_of_each_sweep_of_glob_once(swept, output_of):
    shutil.copytree(swept, swept.parent / "swept2")
    (swept.parent / "swept3").mkdir()
    words = [f"sweep={swept}*", f"sweep={swept.parent}/./swept", "--json"]
    gaps = json.loads(output_of("wandb", *words))["gaps"]
    assert [upload["run"] for upload in gaps] == [str(swept), f"{swept}2"]


def test_record_gaps_of_single_seed_has_no_interval(swept):
    for variant in ("standard", "gated"):
        shutil.rmtree(swept / f"{variant}1")
    run = recorded(swept)
    for values in (*run.history, run.summary):
        assert values["gap/gated"] == pytest.approx(-0.1)
        assert not {"gap/gated/low", "gap/gated/high"} & {*values}


def test_record_gaps_returns_false_if_wandb_is_disabled_or_no_gap_exists(swept, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert not record_gaps(read([swept])[0], swept)
    assert not (swept / "wandb").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    single = swept / "standard0"
    assert not record_gaps(read([single])[0], single), "there is no gap"
