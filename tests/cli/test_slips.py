"""Errors after common typing mistakes name the fix; similar legal input is accepted."""

import os
import sys
from pathlib import Path

import pytest
from runs.command import TRAIN, command, refusal_of
from runs.written import write_run

from diffllm.config import load_config
from diffllm.core.errors import hint

LONGEST = 500
MOE = ["model=moe_tiny", "data.paths=t.txt"]


@pytest.fixture(scope="module")
def slips_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a working directory with a text, a study file, a run and a sweep."""
    place = tmp_path_factory.mktemp("slips")
    for name in ("c04", "sweep/seed0"):
        write_run(place / "outputs" / name, "model=tiny")
    for name in ("t.txt", "study.yaml"):
        (place / name).write_text("text\n", encoding="utf-8")
    return place


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["train", "-m", "seed=0,", "1"], "quote a value that contains spaces: 'seed=0, 1'"),
        (["train", "-m", "attention=gated,", "diff_v2"], "spaces: 'attention=gated, diff_v2'"),
        (["train", "data.paths=[a.txt,", "b.txt]"], "spaces: 'data.paths=[a.txt, b.txt]'"),
        (["train", "plugins=[a,", "b]"], "spaces: 'plugins=[a, b]'"),
        (["train", "data.sample_prompt=Once", "upon"], "quote a value if it contains spaces"),
        (["generate", "prompt=One,", "two", "run=c04"], "spaces: 'prompt=One, two'"),
        (["train", "seed", "=1"], "write seed=1 without spaces"),
        (["train", "seed", "=", "1", "steps=2"], "write seed=1 without spaces"),
        (["train", "steps=1", "000"], "write steps=1000 without spaces"),
        (["count", "seed=", "1"], "write seed=1 without spaces"),
        (["train", "--max-tokens", "10"], "write max_tokens=... without dashes"),
        (["count", "--steps=10"], "write steps=... without dashes"),
        (["train", "steps=1,000"], "a text with commas needs quotes; write one"),
        (["train", "steps=1,000"], "write one number as steps=1000"),
        (["train", "optim.lr=0,001"], "write one number as optim.lr=0.001"),
        (["train", "steps=10k"], "write steps=10000"),
        (["train", "steps=1e4"], "write steps=10000"),
        (["train", "++max_tokens=2.5B"], "write max_tokens=2.5e9"),
        (
            ["plan", "tokens=1T"],
            "tokens='1T' must be a number, such as 0.5 or 1e6; write tokens=1e",
        ),
        (["plan", "gpus=1k"], "gpus='1k' must be an integer; write gpus=1000"),
        (["plan", "gpus=1e30"], f"gpus='1e30' must be an integer; write gpus={10**30}"),
        (["generate", "run=c04", "prompt=a", "temperature=0,8"], "write temperature=0.8"),
        (["train", "seed=0,1"], "seed=0,1: several values need -m (a sweep); a list needs"),
        (["train", *MOE, "parallel.expert=8"], "8 processes, not 1; torchrun --nproc-per-node=8"),
        (["plan", *MOE, "gpus=3", "parallel.expert=2"], "needs a multiple of 2 processes, not 3"),
        (["generate", "run=c04", "prompt=a"], "did you mean outputs/c04?"),
        (["checkpoints", "run=c04"], "did you mean outputs/c04?"),
        (["evaluate", "run=outputs/c4"], "did you mean outputs/c04?"),
        (["evaluate", "run=sweep"], "did you mean outputs/sweep?"),
        (["consolidate", "run=C04"], "did you mean outputs/c04?"),
        (["train", "resume=weights:c04"], "did you mean outputs/c04?"),
        (["report", "c04"], "did you mean outputs/c04?"),
        (["generate", "c04", "prompt=a"], "did you mean run=outputs/c04?"),
        (["study", "verdict", "studie.yaml", "out=o"], "did you mean study.yaml?"),
        (["prepare", "data.paths=tt.txt"], "did you mean t.txt?"),
        (["train", "data=t.txt"], "use data.paths=t.txt for files, data.dataset=t.txt for"),
        (["train", *MOE, "eval.suites=[nedle]"], "did you mean needle?"),
        (["evaluate", "run=outputs/c04", "suite=claim"], "did you mean claims?"),
        (["train", "model=TINY"], "did you mean tiny?"),
        (["train", "wandb=false"], "set its keys, such as wandb.mode=disabled"),
        (["trian"], "did you mean train?"),
    ],
)
def test_error_for_mistyped_command_line_suggests_correction(
    slips_directory, monkeypatch, error_of, words, fix
):
    monkeypatch.chdir(slips_directory)
    line = error_of(*words)
    assert fix in line
    assert len(line) <= LONGEST


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["seed=0,1"], "seed=0,1: several values need -m (a sweep)"),
        (["seed=1,0"], "seed=1,0: several values need -m (a sweep)"),
        (["--quick", "model=tiny"], "unknown argument '--quick'"),
        (["steps=1.5"], "steps=1.5: '1.5' is not an integer"),
        (["--config-name", "mine"], "unknown argument '--config-name'"),
        (["--multirun", "foo"], "'foo' is not of the form key=value"),
        (["seed==5", "steps=3"], "seed==5: '=5' is not an integer"),
        (["data.paths=[a,", "seed=1"], "'data.paths=[a,' is ambiguous"),
        (["checkpoint.interval=10M"], "checkpoint.interval=10M must be steps or a time"),
        (["report", "baseline=gated", "runs"], "baseline=gated is no variant"),
        (["--stepz=1"], "unknown argument '--stepz=1'; did you mean steps=?"),
        (["seed=1,000", "steps=10"], "steps=10 must be at least 20"),
        (["steps=" + "[" * 2**17], "has too many nested brackets"),
    ],
)
def test_hint_returns_empty_text_if_error_is_not_a_typing_mistake(words, error):
    assert hint(words, error) == ""


def test_valid_override_that_resembles_typing_mistake_is_accepted():
    words = ["data.paths=[a.txt, b.txt]", "data.sample_prompt='a, b'", "max_tokens=1_000_000"]
    cfg = load_config(words)
    assert cfg.data.paths == ["a.txt", "b.txt"]
    assert (cfg.data.sample_prompt, cfg.max_tokens) == ("a, b", 1e6)


def test_train_command_prints_single_error_line_if_packages_are_missing(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = command([sys.executable, "-S", str(TRAIN)], tmp_path, environment)
    line = refusal_of(done)
    assert done.out == ""
    assert line.startswith(f"error: {sys.executable} has no module ")
    assert "activate the environment: source .venv/bin/activate" in line
