"""A run that diverges ends as one that has diverged: an outcome like others, in every table."""

import json
import math
from pathlib import Path

import pytest
from runs.command import Result, checkpoint_tensors, finish, prepared_corpus, tool, train
from tiers import slow_but

DIVERGES = ["optim.lr=100", "optim.clip_norm=0", "train.skip_step=off"]
"""The first update is so large that no later loss is finite."""
SHAPES = ["standard", "diff_v1", "gated", "moe", "2 ranks"]


def run(shape: str, steps: int, corpus: Path, path: Path) -> str:
    model = ["model=moe_tiny", "model.vocab_size=512"] if shape == "moe" else []
    attention = [f"attention={shape}"] if shape in ("standard", "diff_v1", "gated") else []
    words = [*DIVERGES, *model, *attention, f"steps={steps}", "run.report=true"]
    return finish(corpus, path, *words, ranks=2 if shape == "2 ranks" else 1)


def strict(file: Path) -> dict:
    """The object of a file that every JSON reader takes: NaN is none of JSON's."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(file.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("shape", slow_but(["moe"], SHAPES))
def test_a_diverged_run_ends_as_one(shape, tmp_path):
    """With a sample of its text, a summary and a report; started again, it is finished."""
    path, corpus = tmp_path / "run", prepared_corpus(tmp_path)
    output = run(shape, 8, corpus, path)
    assert "held-out loss not finite: the run diverged" in output
    assert "not written" not in output
    summary = strict(path / "summary.json")
    assert summary["diverged"] is True
    assert summary["heldout_loss"] is None
    assert summary["sample"]
    assert "is finished: 8 steps, it diverged" in run(shape, 8, corpus, path)


@pytest.mark.slow
def test_a_sweep_and_a_report_say_it(tmp_path, environment, tiny):
    words = ["-m", *tiny, "optim.lr=1e-3,100", *DIVERGES[1:], "run.sweep=rates", "steps=6"]
    swept = train(words, tmp_path, environment)
    assert swept.code == 0, swept
    assert lines(swept, "diverged: no finite held-out loss") == ["outputs/rates/lr100.0"]
    assert lines(swept, "  held-out loss ") == ["outputs/rates/lr0.001"]
    reported = tool(["report", "outputs/rates", "out=page"], tmp_path, environment)
    assert reported.code == 0, reported
    assert "1 of 1 seeds diverged" in reported.out
    assert "outputs/rates/lr100.0 diverged: it ended with a held-out loss" in reported.out


def lines(result: Result, text: str) -> list[str]:
    """The runs at the beginning of the lines with a text."""
    found = [line for line in result.out.splitlines() if text in line]
    return [line.split()[0] for line in found if line.startswith("outputs/")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "decay", "warmup"),
    slow_but([(1e20, 1e30, 0)], [(1e20, 1e30, 0), (1, 100, 0), (1e20, 0, 5), (100, 1, 5)]),
)
def test_parameters_stay_finite_whatever_the_learning_rate(tmp_path, lr, decay, warmup):
    """Where updates that are not finite are skipped, as they are unless that is turned off."""
    words = [
        *(f"optim.lr={lr}", f"optim.weight_decay={decay}", f"optim.warmup_steps={warmup}"),
        *("steps=60", "precision=fp32", "train.max_consecutive_skips=1000", "log_interval=60"),
    ]
    finish(prepared_corpus(tmp_path), tmp_path / "run", *words)
    for name, value in checkpoint_tensors(tmp_path / "run", 60).items():
        assert math.isfinite(value.abs().max()), name
