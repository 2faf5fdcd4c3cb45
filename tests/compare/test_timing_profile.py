"""Turns of `diffllm timing`, and the profile with the measured step times."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs.json_files import read_json, write_json
from runs.written import write_train_seconds

from diffllm.cli.timing import profile_text
from diffllm.compare.sweep.job import Ending, Job
from diffllm.compare.sweep.runs import ConfiguredRun
from diffllm.compare.timing import Turns, arms_of_sweep, measure, plan_turns, turn_words
from diffllm.compare.timing_profile import (
    PROFILE_FORMAT,
    ArmTiming,
    TimingProfile,
    read_profile,
    time_settings,
)
from diffllm.config import load_config
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.run_facts import RunFacts

TINY = ["model=tiny", "seq_len=64", "global_batch_size=4"]
FACTS = RunFacts(
    parameters=9e5, flops_per_token=6e6, compute_dtype="bfloat16", torch="2.13.0", device="CPU",
    ranks=2, compiled=False,
)  # fmt: skip
BLOCK_SECONDS = {
    "standard": [[0.3, 0.1], [0.2, 0.4], [0.11, 0.2]],
    "diff_v2": [[0.12, 0.3], [0.25, 0.25], [0.5, 0.132]],
}
TURNS = Turns(rounds=3, warmup_blocks=1, timed_blocks=2, block_steps=2)


def arm_timing(name: str, block_seconds: list[list[float]]) -> ArmTiming:
    words = [*TINY, f"attention={name}"]
    return ArmTiming(
        name, words, time_settings(load_config(words)), FACTS, tokens_per_step=256,
        block_seconds=block_seconds,
    )  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> TimingProfile:
    arms = {name: arm_timing(name, seconds) for name, seconds in BLOCK_SECONDS.items()}
    return TimingProfile(
        PROFILE_FORMAT, "2026-11-28", 2, TURNS.warmup_steps, TURNS.timed_steps, arms
    )


def read_written(content: dict[str, Any], path: Path) -> TimingProfile:
    """Write the content of a profile, and read the file."""
    write_json(path, content)
    return read_profile(path)


def test_read_profile_returns_written_profile(profile, tmp_path):
    path = tmp_path / "timing.json"
    assert read_written(profile.content(), path) == profile
    content = read_json(path)
    # Readers without diffllm find the statistics in the file.
    arm = content["arms"]["diff_v2"]
    blocks = [seconds for turn in BLOCK_SECONDS["diff_v2"] for seconds in turn]
    assert arm["seconds_per_step"] == profile.arm("diff_v2").seconds_per_step == min(blocks)
    assert arm["median_seconds"] == statistics.median(blocks)
    assert arm["mean_seconds"] == pytest.approx(statistics.mean(blocks))
    assert arm["round_seconds"] == [0.12, 0.25, 0.132]
    assert arm["spread"] == pytest.approx(0.25 / 0.12 - 1)
    assert arm["tokens_per_s"] == pytest.approx(256 / 0.12)
    assert arm["ratio"] == pytest.approx(1.2)
    assert arm["round_ratios"] == pytest.approx([1.2, 1.25, 1.2])


def test_unknown_arm_of_profile_raises_error_with_choices(profile):
    with pytest.raises(ConfigError, match="no arm 'difv2'; did you mean diff_v2"):
        profile.arm("difv2")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 2, "format=2 must be 1"),
        ("arms", {}, "arms is empty"),
        ("arms", [], "arms=[] must be a mapping"),
        ("timed_steps", 0, "timed_steps=0 must be at least 1"),
        ("date", None, "date=None must be text"),
        ("arms.standard.block_seconds", [[0.1], [0.2]], "must have the same number of rounds"),
        ("arms.standard.block_seconds", [[0.1], [-1.0], [0.2]], "must be at least 1e-06 in each"),
        ("arms.standard.block_seconds", [[0.1], [], [0.2]], "must be at least 1e-06 in each"),
        ("arms.standard.block_seconds", [[0.1], [1e-300], [1]], "must be at least 1e-06 in each"),
        ("arms.standard.block_seconds", [["fast"]], "block_seconds[0][0]='fast' must be a number"),
        ("arms.standard.block_seconds", [0.1, 0.2, 0.3], "block_seconds[0]=0.1 must be a list"),
        ("arms.standard.tokens_per_step", 0, "arms.standard.tokens_per_step=0 must be at least 1"),
        ("arms.standard.settings", {}, "arms.standard.settings is empty"),
        ("arms.standard.facts.device", "GPU", "the arms differ in device (CPU, GPU)"),
        ("arms.standard.facts.ranks", 1, "the arms differ in ranks (1.0, 2"),
        ("arms.standard.facts.torch", "2.9.0", "the arms differ in torch (2.13.0, 2.9.0)"),
        ("arms.standard.facts.compiled", True, "the arms differ in compiled (False, True)"),
        ("arms.standard.facts.compute_dtype", "float32", "the arms differ in compute_dtype ("),
        ("arms.standard.facts.parameters", "many", "facts.parameters='many' must be a number"),
    ],
)
def test_damaged_profile_raises_one_error(profile, tmp_path, key, value, message):
    path = tmp_path / "timing.json"
    content = json.loads(json.dumps(profile.content()))
    *sections, name = key.split(".")
    section = content
    for part in sections:
        section = section[part]
    section[name] = value
    start = f"{path} is not a profile of diffllm timing: "
    with pytest.raises(CheckpointError, match=f"^{re.escape(start)}.*{re.escape(message)}"):
        read_written(content, path)


def test_arms_of_profile_may_differ_in_compilation_that_their_settings_choose(profile, tmp_path):
    arm = profile.arms["diff_v2"]
    compiled = replace(
        arm, settings={**arm.settings, "compile": "true"}, facts=replace(arm.facts, compiled=True)
    )
    arms = replace(profile, arms={**profile.arms, "diff_v2": compiled})
    assert read_written(arms.content(), tmp_path / "timing.json") == arms


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"steps": 9, "heldout_loss": 4.5}', "format=None must be 1"),
        ("[1, 2]", "is not a JSON object"),
        ('{"format": 1, "arms"', "is not JSON"),
        (None, "No such file"),
    ],
)
def test_foreign_profile_raises_one_error(tmp_path, text, message):
    path = tmp_path / "timing.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_profile(path)


def test_table_warns_about_arms_whose_rounds_differ_by_more_than_10_percent(profile):
    steady = arm_timing("gated", [[0.1, 0.5], [0.105], [0.109]])
    text = profile_text(replace(profile, arms={**profile.arms, "gated": steady}))
    warned = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert [line.split()[4] for line in warned] == ["standard", "diff_v2"]
    machine = "CPU, 2 ranks, 2 CPU threads per rank, bfloat16, eager, torch 2.13.0"
    assert f"{machine}, 2026-11-28; 3 rounds of 4 steps" in text
    assert "1.200 (1.200 to 1.250)" in text


def test_order_of_arms_alternates_between_rounds(tmp_path):
    words = {name: [f"arm={name}"] for name in "ABC"}
    jobs = [Job(**job) for job in plan_turns(words, 3, tmp_path, ["plugins=[mine]"])]
    assert "".join(job.group for job in jobs) == "ABCCBAABC"
    # Ranks of a launch meet under the number of the job, so numbers must differ.
    assert [job.number for job in jobs] == list(range(1, 10))
    assert len({job.path for job in jobs}) == 9
    for job in jobs:
        assert job.words == ["plugins=[mine]", f"arm={job.group}", f"run.dir={job.path}"]


def test_arms_of_sweep_have_one_arm_per_variant_and_no_arm_per_seed():
    arms = arms_of_sweep([*TINY, "attention=standard,diff_v2", "seed=3,4"])
    assert list(arms) == ["standard", "diff_v2"]
    assert arms["diff_v2"].words == [*TINY, "attention=diff_v2", "seed=3"]
    assert list(arms_of_sweep([*TINY, "attention=gated"])) == ["gated"]
    with pytest.raises(ConfigError, match="hydra/launcher=submitit_slurm: timing measures"):
        arms_of_sweep([*TINY, "hydra/launcher=submitit_slurm"])


@pytest.mark.parametrize("length", ["steps=2000000", "max_tokens=6e8", "steps=50"])
def test_turn_is_compiled_if_the_arm_is_compiled(monkeypatch, length):
    """The length of a CPU run decides whether it is compiled, and turns are short."""
    monkeypatch.setattr("diffllm.training.build.compiler_fault", lambda: "")
    words = [*TINY, length, "run.sweep=mine", "diagnostics.interval=5", "eval.suites=[mqar]"]
    words += ["optim.warmup_steps=40"]
    turn = load_config(turn_words(ConfiguredRun(words, load_config(words)), TURNS, 1))
    assert turn.compile == (length != "steps=50")
    assert turn.steps == TURNS.warmup_steps + TURNS.timed_steps
    assert turn.run == load_config([*TINY, "run.report=false"]).run
    assert (turn.diagnostics.interval, turn.eval.suites) == (0, [])
    settings = time_settings(load_config(words))
    assert time_settings(turn) == {**settings, "compile": json.dumps(turn.compile)}


def turn_run(path: Path, steps: int, summary: dict[str, Any]) -> Job:
    """Write the files of a turn whose steps take 1, 2, 3, ... seconds."""
    path.mkdir()
    write_train_seconds(path, list(range(1, steps + 1)))
    record = {"device": "CPU", "ranks": 1, "environment": {"threads": 2}}
    write_json(path / "run.json", record)
    write_json(path / "summary.json", summary)
    return Job(1, 1, "standard, round 1", str(path), 6, 0.0, [], False)


@pytest.mark.parametrize(
    ("warmup_steps", "timed_steps", "expected"),
    [(5, 25, (5, 25, 5)), (5, 7, (5, 10, 5)), (3, 25, (5, 25, 5)), (20, 3, (21, 3, 3))],
)
def test_steps_of_turn_are_rounded_up_to_whole_blocks(warmup_steps, timed_steps, expected):
    turns = Turns.of(2, warmup_steps, timed_steps)
    assert (turns.warmup_steps, turns.timed_steps, turns.block_steps) == expected


def test_blocks_of_turn_omit_warmup_steps(tmp_path):
    job = turn_run(tmp_path / "turn", 6, {})
    result = measure(job, Ending("finished"), TURNS)
    assert result.blocks == [statistics.mean([3, 4]), statistics.mean([5, 6])]
    assert result.threads == 2
    assert (result.facts.device, result.facts.ranks) == ("CPU", 1)
    assert not (tmp_path / "turn").exists()


@pytest.mark.parametrize(
    ("steps", "ending", "summary", "message"),
    [
        (6, Ending("failed", "exit status 1"), {}, "failed, exit status 1"),
        (6, Ending("finished"), {"stopped": "skips", "steps": 4}, "diverged, stopped after step 4"),
        (5, Ending("finished"), {}, "has 5 of 6 steps"),
    ],
)
def test_unfinished_turn_raises_error_with_arm_and_round(tmp_path, steps, ending, summary, message):
    job = turn_run(tmp_path / "turn", steps, summary)
    with pytest.raises(ConfigError, match=rf"^standard, round 1: .*{message}"):
        measure(job, ending, TURNS)
