"""A failed print never stops a run; a command that cannot print its result prints one error."""

import os
import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE_S
from runs.command import (
    FAULTS,
    ForkedRun,
    Gate,
    forked_call,
    metric_lines,
    metrics,
    overrides_of,
    refusal_of,
    success_of,
    tool_command,
    train_command,
    with_faults,
)
from runs.json_files import read_json
from tiers import slow_but

PROMPT = "data.sample_prompt='naïve ∑ 雪'"
NAME = "größe-雪"
BOTH = [(fault, fault) for fault in FAULTS]
STREAMS = [*BOTH, *((fault, "") for fault in FAULTS), *(("", fault) for fault in FAULTS)]
"""Faults of stdout and stderr: the same fault in both, or a fault in one of them."""
SHOWN = [("full", "full"), ("ascii", "ascii")]
"""Faults of stdout and stderr in fast tests."""


def assert_whole(run: Path, steps: int) -> None:
    assert read_json(run / "summary.json")["steps"] == steps
    assert metrics(run)[-1]["step"] == steps
    assert (run / "run.log").read_text(encoding="utf-8").count(f"step {steps}/{steps}") == 1


@pytest.mark.parametrize(("stdout", "stderr"), slow_but(SHOWN, STREAMS))
def test_training_succeeds_if_stdout_or_stderr_fails(tmp_path, environment, tiny, stdout, stderr):
    """Name and prompt of the run contain characters that an encoding may lack."""
    words = [*tiny, PROMPT, f"run.dir='outputs/{NAME}'"]
    ended = forked_call(with_faults("train", stdout, stderr), words, tmp_path, environment)
    assert ended.code == 0, ended
    assert "Traceback" not in ended.err
    assert_whole(tmp_path / "outputs" / NAME, 4)
    if stdout == "ascii":
        assert "gr\\xf6\\xdfe" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", "closed"])
def test_training_on_two_ranks_succeeds_if_stdout_or_stderr_fails(corpus, tmp_path, fault):
    run = tmp_path / "run"
    words = overrides_of(corpus, run)
    main = with_faults("planted", fault, fault)
    ForkedRun([*words, "steps=6", PROMPT], ranks=2, main=main).finish()
    assert_whole(run, 6)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no reader", "no terminal"])
def test_sweep_finishes_valid_run_if_stdout_or_stderr_fails(tmp_path, environment, tiny, fault):
    words = ["-m", *tiny, "seq_len=32,99999", "run.sweep=both", "steps=2"]
    ended = forked_call(with_faults("train", fault, fault), words, tmp_path, environment)
    assert ended.code == 1, ended
    sweep = tmp_path / "outputs" / "both"
    assert read_json(sweep / "seq_len32" / "summary.json")["steps"] == 2
    log = (sweep / "seq_len99999.log").read_text(encoding="utf-8")
    assert "\nerror: the train split has " in log


@pytest.mark.parametrize("fault", slow_but(["full"], ["full", "ascii"]))
def test_prepare_succeeds_if_stdout_or_stderr_fails(tmp_path, environment, code_corpus, fault):
    words = [
        *("prepare", "data=files", f"data.paths=[{code_corpus}]", "data.vocab_size=400"),
        *("model=tiny", "model.vocab_size=512", f"data.cache_dir='{tmp_path / NAME}'"),
        *("prepare.processes=2", "data.packing=best_fit"),
    ]
    success_of(forked_call(with_faults("tool", fault, fault), words, tmp_path, environment))
    assert list((tmp_path / NAME / "tokens").glob("*/manifest.json"))


@pytest.mark.slow
def test_training_continues_after_terminal_is_closed(corpus, tmp_path):
    run = tmp_path / "run"
    words = overrides_of(corpus, run, "steps=8", "log_interval=1")
    reader, terminal = os.openpty()
    gate = Gate(run, 4)
    process = ForkedRun(words, said=[os.ttyname(terminal)])
    process.wait_for(gate.reached, "step 4")
    assert b"loss" in os.read(reader, 1 << 16)
    os.close(reader)
    os.close(terminal)
    gate.open()
    assert process.codes() == [0]
    assert [line["step"] for line in metric_lines(run)] == list(range(1, 9))
    assert_whole(run, 8)


RESULTS = {
    "count": ["count", "model=tiny"],
    "usage": ["--help"],
    "report": ["report", "{run}", "out={out}"],
    "generate": ["generate", "run={run}", "prompt=∑", "max_new_tokens=2"],
    "checkpoints": ["checkpoints", "run={run}"],
    "train --help": ["train", "--help"],
    "train --cfg": ["train", "--cfg", "job", "model=tiny"],
}
"""Commands that print their result."""
CASES = [
    *(("count", fault) for fault in FAULTS),
    ("usage", "no reader"), ("usage", "no terminal"), ("report", "closed"), ("report", "ascii"),
    ("generate", "full"), ("generate", "ascii"), ("checkpoints", "no reader"),
    ("checkpoints", "full"), ("train --help", "closed"), ("train --help", "no reader"),
    ("train --cfg", "no terminal"), ("train --cfg", "ascii"),
]  # fmt: skip
"""All faults of one command; for other commands, a fault that fails and a fault that does not."""


@pytest.mark.parametrize(
    ("name", "fault"),
    slow_but([("count", "full"), ("train --help", "closed"), ("count", "no reader")], CASES),
)
def test_command_fails_if_write_to_stdout_fails(name, fault, finished_run, tmp_path, environment):
    """A reader that exits early is no error; any other fault prints one error line."""
    words = [word.format(run=finished_run, out=tmp_path / "out") for word in RESULTS[name]]
    ended = forked_call(with_faults("tool", fault, ""), words, tmp_path, environment)
    assert "Traceback" not in ended.err
    if fault in ("no reader", "ascii"):
        assert ended.code == 0, ended
        assert not [line for line in ended.err.splitlines() if line.startswith("error")]
    else:
        assert refusal_of(ended).startswith("error: cannot write to standard output: ")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(lambda tiny: train_command([*tiny, "run.name=a"]), 0, marks=pytest.mark.slow),
        pytest.param(lambda tiny: tool_command(["--help"]), 2),
    ],
)
def test_command_keeps_exit_code_if_flush_of_stdout_fails(tmp_path, environment, tiny, words, code):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            words(tiny), cwd=tmp_path, env=environment, stdout=full, stderr=full, timeout=PATIENCE_S
        )
    assert done.returncode == code


@pytest.mark.parametrize("fault", slow_but(["full"], ["full", "closed"]))
def test_invalid_command_exits_with_2_if_stdout_or_stderr_fails(fault, tmp_path, environment, tiny):
    for command, words in (("train", [*tiny, "steps=-1"]), ("tool", ["nonsense"])):
        ended = forked_call(with_faults(command, fault, fault), words, tmp_path, environment)
        assert ended.code == 2
        assert list(tmp_path.iterdir()) == []
