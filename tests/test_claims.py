"""Commands, verdicts and counts of docs/claims.md."""

import re
from pathlib import Path

import pytest
from runs.command import ROOT

from diffllm.cli.count import count
from diffllm.compare.study.file import load_study
from diffllm.compare.sweep.runs import combinations, experiment_words, split_overrides
from diffllm.config import load_config
from diffllm.evaluation.suite import chosen

PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
TEXT = PAGE.replace("\n", " ")


def commands(start: str) -> list[list[str]]:
    """Return the words after `start` of each command on the page."""
    found = [text.split() for text in re.findall(f"`{start} ([^`]*)`", TEXT)]
    assert found
    return found


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("words", commands("train"), ids=" ".join)
def test_every_training_command_on_claims_page_has_valid_configs(words):
    given = [word for word in words if word != "-m" and not word.startswith("resume=")]
    swept = experiment_words(given) if "-m" in words else []
    jobs = combinations(split_overrides([*swept, *given])[0])
    assert jobs
    for job in jobs:
        load_config(job)


def test_claims_page_names_every_study_and_every_experiment_of_a_paper():
    named = {Path(words[0]).name for words in commands("study run")}
    studies = {file.name for file in (ROOT / "conf" / "study").glob("*.yaml")}
    assert studies == named
    assert all(load_study(ROOT / "conf" / "study" / name) for name in studies)
    experiments = {file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml")}
    own = {"none", "quickstart", "compare_small", "large_lr"}
    own |= {name for name in experiments if name.startswith("long_")}
    assert experiments - own == set(re.findall(r"experiment=(\w+)", PAGE))


def test_verdict_on_claims_page_equals_verdict_in_title_of_linked_page():
    links = re.findall(r"\[([\w ]+)\]\(\.\./(benchmarks/results/\w+/verdict\.md)\)", PAGE)
    pages = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/results/*/verdict.md")
    }
    assert {file for _, file in links} == pages
    for verdict, file in links:
        title = (ROOT / file).read_text(encoding="utf-8").splitlines()[0]
        # A correction can follow the verdict after a comma.
        assert title.rpartition(": ")[2].split(", ")[0] == verdict


def test_every_evaluation_command_on_claims_page_names_existing_evaluations():
    for words in commands("evaluate"):
        keys = dict(word.split("=", 1) for word in words)
        names = [name for name in keys.get("tasks", "").strip("[]").split(",") if name]
        found, _ = chosen(keys.get("suite", "claims"), names, [])
        assert found


def test_parameter_counts_on_claims_page_equal_counts_of_configs():
    def counted(variant: str) -> dict[str, int]:
        return count(load_config(["model=dense_7b", f"attention={variant}"]))

    more = counted("diff_v1")["total_params"] - counted("standard")["total_params"]
    share = 100 * more / counted("standard")["total_params"]
    assert f"true: +{more:,} ({share:.4f}%)" in PAGE
    heads, v2 = (counted(name)["attention_params"] for name in ("standard_2x_heads", "diff_v2"))
    assert f"{100 * (1 - v2 / heads):.0f}% at 32 and 8 heads" in PAGE
