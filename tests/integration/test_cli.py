"""Commands as run by a user, on a tiny corpus."""

import os
import pty
import re
from pathlib import Path

import pytest
from runs.command import (
    ForkedRun,
    Result,
    call,
    changes,
    command,
    metrics,
    run_train,
    snapshot,
    success_of,
    the_error,
    tool,
    train,
    train_command,
)
from runs.json_files import read_json
from runs.planted_train import Fault

from diffllm import cli as tools

SWEPT = ["diff_v1", "standard"]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def assert_run_complete(run: Path) -> None:
    assert [line["step"] for line in metrics(run)][-1] == 4
    assert read_json(run / "summary.json")["steps"] == 4
    assert (run / "config.yaml").is_file()
    assert (run / "tokenizer.model").is_file()
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000004"]
    assert all((run / "checkpoints" / name / "state.json").is_file() for name in saved)


# One run


@pytest.mark.slow
def test_train_changes_no_file_of_finished_run(shared_directory, finished_run, tiny, environment):
    assert_run_complete(finished_run)
    before = snapshot(shared_directory)
    words = [*tiny, "attention=standard", "run.name=finished"]
    again = train(words, shared_directory, environment)
    assert (again.code, again.err) == (0, "")
    assert re.fullmatch(
        r"outputs/finished is finished: 4 steps, held-out loss \d\.\d{3}; to train further, .*\n",
        again.out,
    )
    assert not changes(before, snapshot(shared_directory))


def test_run_log_contains_output_of_every_launch_except_refused_launches(
    tmp_path, tiny, environment, finished_run
):
    words = [*tiny, "run.name=logged", "run.report=false"]
    first = train(words, tmp_path, environment)
    log = tmp_path / "outputs" / "logged" / "run.log"
    header, _, shown = log.read_text(encoding="utf-8").partition("\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d on \S+: \S", header)
    assert shown == first.out + first.err
    assert shown.count("held-out text: only ") == 1
    assert "files (1 file: corpus.jsonl): " in shown
    refused = train([*words, "steps=5"], tmp_path, environment)
    assert refused.code == 2
    assert log.read_text(encoding="utf-8") == f"{header}\n{shown}"
    again = train([*words, "steps=5", "run.allow_changes=[steps]"], tmp_path, environment)
    assert again.code == 0, again.err
    text = log.read_text(encoding="utf-8")
    assert text.startswith(f"{header}\n{shown}2")
    assert text.endswith(again.out)
    assert "resumes from step 4" in text


@pytest.mark.slow
def test_run_without_name_gets_new_directory(tmp_path, tiny, environment, finished_run):
    result = success_of(command(train_command([*tiny, "attention=gated"]), tmp_path, environment))
    assert not CONTROL.search(result.out + result.err)
    assert result.err == "", "stderr must be empty with a prepared corpus"
    (run,) = (tmp_path / "outputs").iterdir()
    assert re.fullmatch(r"tiny-gated-\d{8}-\d{6}", run.name)
    assert_run_complete(run)
    assert f"outputs/{run.name}" in result.out.splitlines()[0]
    for name, choice in read_json(run / "run.json")["choices"].items():
        line = rf"^  {name.replace('_', ' ')} +{re.escape(str(choice['value']))} \("
        assert re.search(line, result.out, re.M), result.out
        assert f"({choice['reason']})" in result.out
    for step in (2, 4):
        line = rf"^step {step}/4  loss \d+\.\d+ \(\d\.\d\d b/B\)  grad"
        assert re.search(line, result.out, re.M), result.out
    summary = read_json(run / "summary.json")
    assert re.search(rf"^held-out loss +{summary['heldout_loss']:.3f},", result.out, re.M)
    assert list(tmp_path.iterdir()) == [tmp_path / "outputs"], "a file is outside of outputs/"


@pytest.mark.slow
def test_train_shows_live_progress_on_a_terminal(workplace, tiny, environment, monkeypatch):
    for name, value in (environment | {"TERM": "xterm-256color", "COLUMNS": "160"}).items():
        monkeypatch.setenv(name, value)
    output = b""

    def read(terminal):
        nonlocal output
        block = os.read(terminal, 65536)
        output += block
        return block

    assert pty.spawn(train_command([*tiny, "run.name=live"]), read) == 0, output
    text = output.decode()
    assert "\x1b[" in text, "nothing was drawn"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"step +4/4", plain), plain
    line = r"loss \d+\.\d+ \(\d\.\d\d b/B\) +grad \d+\.\d+ +lr \S+ +[\d,]+ tok/s"
    assert re.search(line, plain), plain
    assert "ETA" in plain
    assert "held-out loss" in plain


# Tools


def continued(run: Path, capfd: pytest.CaptureFixture[str], prompt: str, *more: str) -> str:
    words = ["generate", f"run={run}", f"prompt={prompt}", "max_new_tokens=6", *more]
    result = call(lambda: tools.main(words), capfd)
    assert (result.code, result.err) == (0, "")
    return result.out


PROMPTS = ["a=b, {c}", "x[1]", "${seed} 'a\"=", "  def f(\n\t", "null", "1e3"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_output_of_generate_command_starts_with_unchanged_prompt(finished_run, capfd, prompt):
    """A prompt is not parsed by Hydra's grammar and loses no character."""
    before = snapshot(finished_run)
    out = continued(finished_run, capfd, prompt)
    assert out.startswith(prompt), out
    assert len(out.rstrip("\n")) > len(prompt.rstrip("\n")), out
    assert not changes(before, snapshot(finished_run))


def test_repeated_prepare_command_reuses_tokens(tmp_path, tiny, environment):
    words = [*tiny, f"data.cache_dir={tmp_path / 'own cache'}"]
    first = success_of(tool(["prepare", *words], tmp_path, environment))
    directory = Path(first.out.splitlines()[0])
    assert directory.parent == tmp_path / "own cache" / "tokens"
    assert re.search(r"^train +[\d,]+ documents, [\d,]+ tokens", first.out, re.M), first.out
    assert re.search(r"^heldout +[\d,]+ documents, [\d,]+ tokens", first.out, re.M), first.out
    assert not CONTROL.search(first.out + first.err)
    assert (first.out + first.err).count("held-out text: only ") == 1
    before = snapshot(tmp_path)
    again = tool(["prepare", *words], tmp_path, environment)
    assert again == Result(0, first.out, "")
    assert not changes(before, snapshot(tmp_path))


# Sweeps


@pytest.fixture(scope="module")
def swept_variants(tmp_path_factory, tiny, environment, finished_run):
    cwd = tmp_path_factory.mktemp("sweep")
    words = ["-m", f"attention={','.join(SWEPT)}", *tiny]
    return cwd, train(words, cwd, environment)


def test_sweep_writes_one_run_directory_per_variant(swept_variants):
    cwd, result = swept_variants
    assert result.code == 0, result.err
    assert list(cwd.iterdir()) == [cwd / "outputs"]
    (directory,) = (cwd / "outputs").iterdir()
    assert re.fullmatch(r"sweep-\d{8}-\d{6}", directory.name)
    runs = [path for path in directory.iterdir() if path.is_dir()]
    assert sorted(run.name for run in runs) == sorted(SWEPT)
    for run in runs:
        assert_run_complete(run)
        summary = read_json(run / "summary.json")
        assert summary["variant"] == run.name
        loss = rf"held-out loss {summary['heldout_loss']:.4f}, \d\.\d{{3}} bits per byte"
        last = rf"^{run.relative_to(cwd)} +{loss}$"
        assert re.search(last, result.out, re.M), result.out
    assert not CONTROL.search(result.out + result.err)
    assert result.err == ""


def test_log_file_of_run_in_sweep_contains_terminal_output(swept_variants):
    (directory,) = (swept_variants[0] / "outputs").iterdir()
    text = (directory / "standard.log").read_text(encoding="utf-8")
    assert re.match(r"\d{4}-\d\d-\d\d .*run.name=standard\n", text)
    assert re.search(r"^step 4/4  loss ", text, re.M)
    assert not (directory / "standard" / "run.log").exists()


# Two ranks


def train_on_rank(fault: Fault, words: list[str]) -> int:
    return run_train(words)


@pytest.mark.slow
def test_command_on_two_ranks_prints_each_message_only_once(tmp_path, tiny, cache_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIFFLLM_CACHE", str(cache_dir))
    refused = ForkedRun([*tiny, "global_batch_size=5"], ranks=2, main=train_on_rank).finish(2)
    error = the_error(refused)
    assert "global_batch_size=5 must be a multiple of 2, the number of ranks" in error
    assert not list(tmp_path.iterdir())
    words = ["-m", "attention=standard,diff_v2", *tiny, "run.sweep=pair"]
    output = ForkedRun(words, ranks=2, main=train_on_rank).finish()
    for variant in ("diff_v2", "standard"):
        assert_run_complete(tmp_path / "outputs" / "pair" / variant)
        assert len(re.findall(rf"^outputs/pair/{variant} +held-out loss", output, re.M)) == 1
