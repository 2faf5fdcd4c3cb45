"""`diffllm timing` with real runs."""

import json
import re
import sys

import pytest
from runs.command import command, refusal_of, success_of, tool
from runs.json_files import read_json, write_json

from diffllm.compare.timing_profile import read_profile

TURNS = ["rounds=2", "warmup_steps=2", "timed_steps=10"]


@pytest.mark.slow
def test_timing_of_study_writes_profile_and_no_other_file(tmp_path, tiny, environment):
    base = [word for word in tiny if not word.startswith("run.")]
    study = {
        "claim": "v2 is better", "base": base, "baseline": "standard", "seeds": [0, 1],
        "arms": {"standard": ["attention=standard"], "v2": ["attention=diff_v2"]},
        "rule": {"kind": "difference", "arm": "v2", "against": "standard", "below": 0.0},
    }  # fmt: skip
    write_json(tmp_path / "study.yaml", study)
    words = ["timing", "study.yaml", "out=timing.json", *TURNS, "--json"]
    done = success_of(tool(words, tmp_path, environment))
    assert {path.name for path in tmp_path.iterdir()} == {"study.yaml", "timing.json"}
    content = read_json(tmp_path / "timing.json")
    assert json.loads(done.out) == content
    profile = read_profile(tmp_path / "timing.json")
    assert list(profile.arms) == ["standard", "v2"]
    assert [arm.variant for arm in profile.arms.values()] == ["standard", "diff_v2"]
    for arm in profile.arms.values():
        assert [len(blocks) for blocks in arm.block_seconds] == [2, 2]
        assert arm.tokens_per_step == 4 * 32
        assert (arm.facts.device, arm.facts.ranks, arm.facts.compiled) == ("CPU", 1, False)
    # Turns alternate, so the second round begins with the last arm.
    order = ["standard, round 1", "v2, round 1", "v2, round 2", "standard, round 2"]
    lines = done.err.splitlines()
    assert len(lines) == len(order), done.err
    for number, (line, turn) in enumerate(zip(lines, order, strict=True), start=1):
        assert re.fullmatch(rf"turn {number} of 4: {turn}: [\d.]+ ms per step", line)


@pytest.mark.slow
def test_timing_on_two_ranks_writes_one_profile(tmp_path, tiny, environment):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "diffllm", "timing", "--compare", "standard,gated", "out=timing.json"]
    done = success_of(command([*launcher, *words, *tiny, *TURNS], tmp_path, environment))
    assert [path.name for path in tmp_path.iterdir()] == ["timing.json"]
    profile = read_profile(tmp_path / "timing.json")
    assert [arm.facts.ranks for arm in profile.arms.values()] == [2, 2]
    assert done.out.count("CPU, 2 ranks, 1 CPU thread per rank") == 1


@pytest.mark.slow
def test_failed_turn_ends_timing_with_one_error_and_no_file(tmp_path, environment):
    words = ["timing", "model=tiny", "data=files", "data.paths=[missing.txt]", "out=timing.json"]
    done = tool([*words, *TURNS], tmp_path, environment)
    assert done.code == 2
    lines = done.err.splitlines()
    error = "data.paths: missing.txt"
    # The complete output of the failed turn, then the error of the command.
    assert any(line.startswith(f"error: {error}") for line in lines[:-1])
    assert lines[-1].startswith(f"error: diff_v2, round 1: failed, exit status 2: {error}")
    assert list(tmp_path.iterdir()) == []


def test_timing_refuses_overrides_next_to_study_and_unusable_output(tmp_path, environment):
    for words, part in (
        (["study.yaml", "model=tiny", "out=a.json"], "cannot be combined with study.yaml"),
        (["model=tiny"], "missing out=FILE"),
        (["model=tiny", "--fast", "out=a.json"], "unknown argument '--fast'"),
        (["model=tiny", "out=missing/a.json"], "out=missing/a.json cannot be written"),
        (["model=tiny", "out=."], "out=. is a directory"),
        (["model=tiny", "timed_steps=0", "out=a.json"], "timed_steps=0 must be at least 1"),
        (["model=tiny", "rounds=1", "out=a.json"], "rounds=1 must be at least 2"),
    ):
        done = tool(["timing", *words], tmp_path, environment)
        assert part in refusal_of(done)
    assert list(tmp_path.iterdir()) == []
