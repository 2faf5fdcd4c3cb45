"""Runs with parallel.context=2: metrics of one process, resume after a kill, and other ranks."""

import numpy as np
import pytest
from runs.command import Gate, assert_same_weights, finish, metric_lines, start, trained_on
from tiers import slow_but

from diffllm.evaluation.heldout import document_losses

STEPS, HALF = 8, 4
WORDS = (
    *(f"steps={STEPS}", "optim.warmup_steps=2", f"checkpoint.interval={HALF}", "precision=fp32"),
    *(f"eval.interval={HALF}", "log_interval=1", "diagnostics.interval=2"),
    *("diagnostics.probe_interval=4", "global_batch_size=4", "attention=diff_v2"),
)
MASKED = {"masked": ("data.mask_documents=true", "data.packing=best_fit"), "causal": ()}


@pytest.fixture(scope="module", params=slow_but(["masked"], MASKED))
def one_process(request, corpus, tmp_path_factory):
    """Return (overrides, run in one process)."""
    run = tmp_path_factory.mktemp("whole") / "run"
    words = (*WORDS, *MASKED[request.param])
    finish(corpus, run, *words)
    return words, run


def samples_by_step(run):
    """Return the samples of each step."""
    steps = {}
    for (_, step), executions in trained_on(run).items():
        steps.setdefault(step, set()).update(executions[0][:-1])
    return steps


def assert_close_metrics(run, other):
    lines, others = metric_lines(run), metric_lines(other)
    assert len(lines) == len(others)
    for line, expected in zip(lines, others, strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            assert line[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_run_on_slices_logs_metrics_of_run_in_one_process(corpus, one_process, tmp_path):
    words, expected = one_process
    run = tmp_path / "run"
    finish(corpus, run, *words, "parallel.context=2", ranks=2)
    assert_close_metrics(run, expected)
    assert samples_by_step(run) == samples_by_step(expected)
    losses = [document_losses(path) for path in (run, expected)]
    assert (losses[0].tokens == losses[1].tokens).all()
    np.testing.assert_allclose(losses[0].nats, losses[1].nats, rtol=1e-4)


@pytest.mark.slow
def test_killed_sliced_run_resumes_bit_identically_and_on_one_rank(corpus, one_process, tmp_path):
    words, expected = one_process
    sliced = (*words, "parallel.context=2")
    straight, broken, single = (tmp_path / name for name in ("straight", "broken", "single"))
    finish(corpus, straight, *sliced, ranks=2)
    for run, rest, ranks in ((broken, sliced, 2), (single, words, 1)):
        gate = Gate(run, HALF + 2)
        killed = start(corpus, run, *sliced, ranks=2)
        killed.kill_at(gate, run / "checkpoints" / f"step-{HALF:08d}")
        assert f"resumes from step {HALF}" in finish(corpus, run, *rest, ranks=ranks)
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(broken, straight, STEPS)
    assert_close_metrics(single, expected)


@pytest.mark.slow
@pytest.mark.parametrize("one_process", ["causal"], indirect=True)
def test_compiled_run_on_slices_logs_metrics_of_run_in_one_process(corpus, one_process, tmp_path):
    words, expected = one_process
    finish(corpus, tmp_path / "run", *words, "parallel.context=2", "compile=true", ranks=2)
    assert_close_metrics(tmp_path / "run", expected)
