"""Training from Python, in processes that import only the package diffllm."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from runs.command import assert_same_weights, command, forked_call, reached, success_of, train
from runs.json_files import read_json

import diffllm
from diffllm.core.errors import ConfigError, UserError
from diffllm.training import memory

SESSION = """
import json, os, sys
import diffllm

summary = diffllm.train(diffllm.load_config(sys.argv[1:]))
with open(f"answer{os.environ['RANK']}.json", "x") as file:
    json.dump(summary, file)
"""


@pytest.fixture(scope="module")
def trained_run_directory(tiny, environment, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("straight")
    assert train([*tiny, "run.dir=run"], cwd, environment).code == 0
    return cwd / "run"


def session(words: list[str]) -> int:
    cfg = diffllm.load_config([*words, "run.dir=run"])
    summary = diffllm.train(cfg)
    assert summary == read_json(Path("run/summary.json"))
    assert diffllm.train(cfg) == summary  # the run is finished

    with pytest.raises(ConfigError, match="seed: 0 in the run, 1 in this command"):
        diffllm.train(diffllm.load_config([*words, "run.dir=run", "seed=1"]))
    cfg.seq_len = 16
    with pytest.raises(ConfigError, match="seq_len=16 must be equal"):
        diffllm.train(cfg)
    for name, value, said in (
        ("precision", "bf15", "precision: Invalid value 'bf15'"),
        ("steps", "many", "steps: 'many' is not an integer"),
        ("stepz", 3, "unknown key stepz; did you mean steps?"),
    ):
        other = diffllm.load_config(words)
        setattr(other, name, value)
        with pytest.raises(ConfigError, match=said):
            diffllm.train(other)

    answers = []
    other = diffllm.load_config([*words, "run.dir=other"])
    thread = threading.Thread(target=lambda: answers.append(diffllm.train(other)))
    thread.start()
    thread.join()
    assert answers[0]["heldout_loss"] == summary["heldout_loss"]

    model, tokenizer = diffllm.load_model("run")
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("def f")) == "def f"
    logits = model(torch.tensor([tokenizer.encode("def f")]))
    assert logits.shape[-1] == cfg.model.vocab_size == tokenizer.vocab_size
    (earlier, _), (last, _) = (diffllm.load_model(Path("run"), step) for step in (2, 4))
    assert torch.equal(last.norm.weight, model.norm.weight)
    assert not torch.equal(earlier.norm.weight, model.norm.weight)
    return 0


@pytest.mark.fast_cases(1)
def test_train_function_and_train_command_produce_equal_weights(
    tmp_path, tiny, environment, trained_run_directory
):
    success_of(forked_call(session, tiny, tmp_path, environment))
    assert_same_weights(trained_run_directory, tmp_path / "run", 4)
    assert_same_weights(trained_run_directory, tmp_path / "other", 4)


def session_without_memory(words: list[str]) -> int:
    memory.machine_memory = lambda: 1
    cfg = diffllm.load_config([*words, "run.dir=run", "run.allow_changes=[steps]"])
    with pytest.raises(ConfigError, match="does not fit into memory"):
        diffllm.train(cfg)
    assert not Path("run").exists()
    cfg.force = True
    summary = diffllm.train(cfg)
    cfg.force = False
    assert diffllm.train(cfg) == summary  # A finished run needs no memory.
    cfg.steps += 1
    with pytest.raises(ConfigError, match="does not fit into memory"):
        diffllm.train(cfg)
    assert summary == read_json(Path("run/summary.json"))
    cfg.force = True
    assert diffllm.train(cfg)["steps"] == cfg.steps
    return 0


def test_run_too_large_for_memory_starts_and_resumes_only_with_force(tmp_path, tiny, environment):
    success_of(forked_call(session_without_memory, tiny, tmp_path, environment))


def interrupted(words: list[str]) -> int:
    before = signal.getsignal(signal.SIGINT)
    cfg = diffllm.load_config([*words, "steps=5000", "run.dir=run", "checkpoint.keep_last=5"])
    for step in (2, 20):

        def press(step: int = step) -> None:
            while not reached(Path("run"), step):
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT; the same config resumes"):
            diffllm.train(cfg)
        assert signal.getsignal(signal.SIGINT) is before
    return 0


@pytest.mark.slow
def test_train_function_saves_checkpoint_after_ctrl_c(tmp_path, tiny, environment):
    done = success_of(forked_call(interrupted, tiny, tmp_path, environment))
    assert "outputs" not in os.listdir(tmp_path)
    assert "run resumes from step " in done.out
    saved = {int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").iterdir()}
    stops = [int(line.split()[5].strip(",")) for line in done.out.splitlines() if "stopped" in line]
    assert len(stops) == 2
    assert stops[1] in saved


def notebook(words: list[str]) -> int:
    from dataclasses import dataclass

    from diffllm.core.registry import schema
    from diffllm.model.attention.standard import StandardConfig

    Path("mine/attention").mkdir(parents=True)
    Path("mine/attention/cell.yaml").write_text(
        "# @package model.attention\ndefaults: [cell_schema, _self_]\n", encoding="utf-8"
    )
    for cell in range(2):

        @schema(group="attention", name="cell", package="model.attention")
        @dataclass
        class CellConfig(StandardConfig):
            """A class that is defined again with an equal name."""

        words = [*words, "attention=cell", "steps=1", f"run.dir=run{cell}"]
        cfg = diffllm.load_config(words, config_dir="mine")
        assert type(cfg.model.attention) is CellConfig
        assert diffllm.train(cfg)["variant"] == "cell"
        assert diffllm.load_model(f"run{cell}")
    cfg = diffllm.load_config([*words, "attention=standard"])
    cfg.model.attention = CellConfig()
    with pytest.raises(ConfigError, match="attention=standard needs StandardConfig"):
        diffllm.train(cfg)
    return 0


def test_notebook_can_define_same_variant_twice(tmp_path, tiny, environment):
    success_of(forked_call(notebook, tiny, tmp_path, environment))
    with pytest.raises(UserError, match=r"attention=cell.*add plugins=\[MODULE\]"):
        diffllm.load_model(tmp_path / "run0")


@pytest.mark.slow
def test_train_function_returns_summary_on_every_rank(tmp_path, tiny, environment):
    (tmp_path / "session.py").write_text(SESSION, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [sys.executable, *launcher, "session.py", *tiny, "run.dir=run"]
    for _ in range(2):  # the second time, the run is finished
        success_of(command(words, tmp_path, environment))
        answers = sorted(tmp_path.glob("answer*.json"))
        assert [answer.name for answer in answers] == ["answer0.json", "answer1.json"]
        summaries = [read_json(answer) for answer in answers]
        assert summaries[0] == summaries[1] == read_json(tmp_path / "run/summary.json")
        for answer in answers:
            answer.unlink()
