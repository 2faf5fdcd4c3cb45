"""Gaps over tokens in a wandb run."""

import pytest
from test_report_budgets import TOKENS, written
from wandb_file import OfflineRun

from diffllm.cli import main
from diffllm.compare.report.comparison import read
from diffllm.compare.report.page import record_gaps


@pytest.fixture
def swept(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variant in ("standard", "gated"):
        for seed in (0, 1):
            written(tmp_path / "swept" / f"{variant}{seed}", variant, seed)
    return tmp_path / "swept"


def test_record_gaps_logs_loss_gaps_and_noise_floor_to_wandb(swept):
    assert record_gaps(read([swept])[0], swept)
    run = OfflineRun(swept)
    assert (run.header.run_group, run.header.display_name) == ("comparison", "swept")
    assert run.metrics["gap/*"].step_metric == "tokens"
    assert [line["tokens"] for line in run.history] == [step * TOKENS for step in (5, 10, 15, 20)]
    for line in run.history:
        assert line["gap/gated"] == pytest.approx(-0.1)
        assert line["gap/gated/low"] == pytest.approx(line["gap/gated/high"])
        assert line["gap/noise_floor"] > 0
    assert run.config["baseline"] == "standard"


@pytest.mark.slow
def test_report_command_logs_loss_gaps_to_wandb_only_if_requested(swept, capsys):
    assert main(["report", str(swept)]) == 0
    assert not (swept / "wandb").exists()
    assert main(["report", str(swept), "wandb=true"]) == 0
    assert f"gaps over tokens: {swept / 'wandb'}" in capsys.readouterr().out
    assert OfflineRun(swept).history


def test_record_gaps_returns_false_if_wandb_is_disabled_or_no_gap_exists(swept, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert not record_gaps(read([swept])[0], swept)
    assert not (swept / "wandb").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    single = swept / "standard0"
    assert not record_gaps(read([single])[0], single), "there is no gap"
