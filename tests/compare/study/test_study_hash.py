"""The hash of a study in its runs, and the edits that it detects."""

import re

import pytest
from runs.written import LOWER, TWO_ARMS, edit_json, edit_text, study_file, write_arms, write_lines

from diffllm.compare.study.file import load_study
from diffllm.compare.study.study_hash import planned_digests, study_hash
from diffllm.compare.study.verdict import judge
from diffllm.config.plugins import config_directory
from diffllm.config.saved import load_run_config
from diffllm.core.errors import ConfigError

LOSSES = {"half": [4.40, 4.41, 4.39], "v2": [4.30, 4.312, 4.289]}


@pytest.fixture
def finished_study(tmp_path):
    """A study whose runs have ended, and their directory."""
    study = study_file(tmp_path / "study.yaml", LOWER, **TWO_ARMS)
    write_arms(study, tmp_path / "out", LOSSES)
    return study, tmp_path / "out"


def edit_configs(out, old, new, names="*"):
    for file in out.glob(f"{names}/config.yaml"):
        edit_text(file, old, new)


def test_all_runs_and_verdict_store_same_study_hash(finished_study):
    study, out = finished_study
    numbers = judge(study, out).numbers()
    marks = {load_run_config(path).run.study for path in out.iterdir()}
    assert {mark.partition("/")[0] for mark in marks} == {numbers["study_hash"]}
    assert numbers["study_hash"] != numbers["hash"] == study.hash


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("damping_2", "0c4a712121f1"),
        ("large_lr", "33440c17de2c"),
        ("loss_30m", "f0525f4e4f5b"),
        ("retrieval_mqar", "af1a8435fd3e"),
    ],
)
def test_planned_hash_of_committed_study_keeps_its_value(name, prefix):
    study = load_study(config_directory() / "study" / f"{name}.yaml")
    assert study_hash(study, planned_digests(study)).startswith(prefix)


def test_verdict_is_exploratory_if_runs_have_only_hash_of_study_file(finished_study):
    study, out = finished_study
    edit_configs(out, judge(study, out).numbers()["study_hash"], study.hash)
    verdict = judge(study, out)
    assert (verdict.verdict, verdict.would_be) == ("exploratory", "shown")


def test_new_config_key_with_default_value_does_not_change_study_hash(finished_study):
    study, out = finished_study
    before = judge(study, out).numbers()["study_hash"]
    edit_configs(
        out, "  clip_norm: 1.0\n", ""
    )  # as if an older version without the key had written it
    verdict = judge(study, out)
    assert verdict.verdict == "shown", verdict.reasons
    assert verdict.numbers()["study_hash"] == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sequences: 64", "sequences: 8", "eval.sequences is 8, not 64"),
        ("clip_norm: 1.0", "clip_norm: 2.0", "optim.clip_norm is 2.0, not 1.0"),
    ],
)
def test_verdict_is_exploratory_if_config_of_run_differs_from_study(
    finished_study, old, new, message
):
    study, out = finished_study
    edit_configs(out, old, new, "v2-seed[12]")
    verdict = judge(study, out)
    assert (verdict.verdict, verdict.would_be) == ("exploratory", "not comparable")
    reason = f"v2-seed1 is not the run of the study: {message}; runs that differ from the study: 2"
    assert reason in verdict.reasons


@pytest.mark.parametrize(
    ("metric", "file"), [("heldout_bits_per_byte", "summary.json"), ("tasks/mqar", "metrics.jsonl")]
)
def test_error_about_missing_metric_mentions_the_run_and_the_file(tmp_path, metric, file):
    study = study_file(tmp_path / "study.yaml", LOWER, **TWO_ARMS, metric=metric)
    out = tmp_path / "out"
    write_arms(study, out, LOSSES)
    for path in out.iterdir():
        if path.name != "v2-seed1":
            write_lines(path, [{"step": 30, "tokens": 7680, "tasks/mqar": 0.5}])
            edit_json(path / "summary.json", **{metric: 1.0})
    message = f"arm v2, seed 1: {out}/v2-seed1/{file} has no {metric}; choose another metric"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        judge(study, out)
