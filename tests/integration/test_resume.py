"""Runs that are killed, stopped and resumed, in real processes."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from runs.command import (
    Gate,
    assert_same_weights,
    finish,
    metric_lines,
    overrides_of,
    start,
    success_of,
    train,
    train_command,
    wait_for,
)
from runs.json_files import read_json
from tiers import slow_but

from diffllm.evaluation.load import load_model

STEPS, HALF = 24, 12
INTERVALS = (
    *(f"steps={STEPS}", f"checkpoint.interval={HALF}", "eval.interval=8", "log_interval=5"),
    *("diagnostics.interval=4", "diagnostics.probe_interval=7", "train.skip_step=spike"),
)
HALF_WAY = f"step-{HALF:08d}"
MODELS = {
    "dense": (),
    "mixture": (
        *("model=moe_tiny", "model.vocab_size=512", "model.n_layers=3"),
        *("model.moe.n_dense_layers=1", "model.moe.balance_loss=0.01"),
        *("model.moe.router_z_loss=0.001", "model.moe.bias_update_rate=0.01"),
    ),
}


@pytest.fixture(scope="module")
def uninterrupted_run(corpus, tmp_path_factory):

    @cache
    def made(ranks: int, model: str = "dense") -> Path:
        run = tmp_path_factory.mktemp("straight") / f"{model}-{ranks}"
        finish(corpus, run, *INTERVALS, *MODELS[model], ranks=ranks)
        return run

    return made


@pytest.mark.parametrize(
    ("model", "ranks"), slow_but([("dense", 1)], [("dense", 1), ("dense", 2), ("mixture", 2)])
)
def test_killed_run_resumes_bit_identically(corpus, uninterrupted_run, tmp_path, model, ranks):
    words, broken = (*INTERVALS, *MODELS[model]), tmp_path / "broken"
    gate = Gate(broken, HALF + 4)
    first = start(corpus, broken, *words, ranks=ranks)
    first.kill_at(gate, broken / "checkpoints" / HALF_WAY)
    output = finish(corpus, broken, *words, ranks=ranks)
    assert f"resumes from step {HALF}" in output
    whole = uninterrupted_run(ranks, model)
    assert metric_lines(broken) == metric_lines(whole)
    assert_same_weights(whole, broken, STEPS)
    assert_measured_when_due(whole)
    state, expected_state = (load_model(run)[0].router_state() for run in (broken, whole))
    expected_names = {"bias", "load"} if model == "mixture" else set()
    assert {name.rpartition(".")[2] for name in state} == expected_names
    assert all(torch.equal(value, expected_state[name]) for name, value in state.items())


def assert_measured_when_due(run: Path) -> None:
    """Assert that each family of metrics is logged exactly at its interval."""
    cadence = {
        "hidden_top1/layer_01": set(range(4, STEPS + 1, 4)),
        "lambda_mean/layer_00": set(range(4, STEPS + 1, 4)),
        "attn_entropy/layer_01": set(range(7, STEPS + 1, 7)),
        "lambda_head_03/layer_00": set(range(7, STEPS + 1, 7)),
        "train/update_norm": {1, *range(5, STEPS + 1, 5), STEPS},
        "grad_norm/lambda": {1, *range(5, STEPS + 1, 5), STEPS},
        "eval/loss": {8, 16, 24},
    }
    lines = metric_lines(run)
    for name, steps in cadence.items():
        assert {line["step"] for line in lines if name in line} == steps, name


def test_resume_after_sigterm_matches_uninterrupted_run(corpus, uninterrupted_run, tmp_path):
    stopped = tmp_path / "stopped"
    said = start(corpus, stopped, *INTERVALS).stop_at(Gate(stopped, 6))
    assert "stopped by SIGTERM after step 6" in said
    assert [p.name for p in (stopped / "checkpoints").iterdir()] == ["step-00000006"]
    assert not (stopped / "heldout").exists()
    finish(corpus, stopped, *INTERVALS)
    assert metric_lines(stopped) == metric_lines(uninterrupted_run(1))
    assert_same_weights(uninterrupted_run(1), stopped, STEPS)


@pytest.mark.slow
def test_killed_run_resumes_bit_identically_in_new_interpreter(corpus, uninterrupted_run, tmp_path):
    """Both processes are new interpreters, which share no imports with the undisturbed run."""
    run = tmp_path / "run"
    words = train_command(overrides_of(corpus, run, *INTERVALS))
    first = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for((run / "checkpoints" / HALF_WAY).exists, first, "checkpoint half way")
    first.kill()
    first.wait()
    again = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert again.returncode == 0
    assert metric_lines(run) == metric_lines(uninterrupted_run(1))
    assert_same_weights(uninterrupted_run(1), run, STEPS)


@pytest.mark.slow
def test_resume_uses_mkl_and_compile_settings_of_checkpoint(corpus, tmp_path):
    """The first run has the settings of an older version; its resume is bit-identical."""
    settings = (*INTERVALS, "precision=fp32", "data.num_workers=0")

    def trained(name: str, *words: str, **environment: str) -> Path:
        run = tmp_path / name
        success_of(train(overrides_of(corpus, run, *settings, *words), tmp_path, environment))
        return run

    whole = trained("whole", MKL_CBWR="AVX2,STRICT")
    half_way = whole / "checkpoints" / HALF_WAY
    again = trained("again", f"resume={half_way}")
    state = read_json(again / "checkpoints" / f"step-{STEPS:08d}" / "state.json")
    assert (state["loop"]["mkl_mode"], state["loop"]["compiled"]) == ("AVX2,STRICT", False)
    assert_same_weights(whole, again, STEPS)


AS_A_LONG_RUN = """
import sys
from diffllm.training import build
from diffllm.cli import main
build.WORTH_COMPILING = 1.0
sys.exit(main(command="train"))
"""


@pytest.mark.slow
def test_resume_keeps_compile_setting_of_first_launch(corpus, tmp_path):
    run = tmp_path / "run"
    words = overrides_of(corpus, run, *INTERVALS)
    first = subprocess.Popen([sys.executable, "-c", AS_A_LONG_RUN, *words])
    wait_for((run / "checkpoints" / HALF_WAY).exists, first, "checkpoint half way")
    first.kill()
    first.wait()
    finish(corpus, run, *INTERVALS)  # a new short run would not compile
    log = (run / "run.log").read_text(encoding="utf-8")
    assert log.count("compile         True (long run: ") == 1
    assert log.count("compile         True (as in the checkpoint)") == 1
