"""Designs that cannot decide: errors of `study run` and notes of its dry run."""

import pytest
from runs.written import ALIKE, LOWER, SOONER, TWO_ARMS, study_file, write_arms

from diffllm.compare.study.running import check_study_runs, next_jobs
from diffllm.compare.sweep.sweep_directory import SweepDirectory

POWER = "{gap: 0.025, sd: 0.014}"
TASKS = {"metric": "tasks/mqar"}


def study_of_seeds(tmp_path, rule, seeds, **more):
    return study_file(tmp_path / "s.yaml", rule, **TWO_ARMS, seeds=f"{[*range(seeds)]}", **more)


def with_keys(rule, **keys):
    """A rule in YAML with further keys."""
    return rule.replace("}", "".join(f", {key}: {value}" for key, value in keys.items()) + "}")


@pytest.mark.parametrize(
    ("rule", "seeds", "more", "message"),
    [
        (
            SOONER, 3, TASKS,
            "rule.alpha=0.05 must be above 0.05, the smallest p of kind=log_rank with 3 seeds per "
            "arm; use 4 seeds or more",
        ),
        (
            SOONER, 4, {**TASKS, "also": f"[{SOONER}, {SOONER}, {SOONER}]"},
            "rule.alpha=0.05 must be above 0.057 (0.014 before Holm's correction for 4 rules), the "
            "smallest p of kind=log_rank with 4 seeds per arm; use 5 seeds or more, or fewer rules "
            "with kind=log_rank",
        ),
        (
            LOWER, 3, {**TASKS, "also": f"[{SOONER}]"},
            "also[0].alpha=0.05 must be above 0.05, the smallest p of kind=log_rank with 3 seeds",
        ),
        (
            with_keys(SOONER, alpha=1e-6), 2, TASKS,
            "must be above 0.17, the smallest p of kind=log_rank with 2 seeds per arm; use a "
            "larger alpha",
        ),
        (
            SOONER, 8, {"metric": "eval/loss"},
            "rule: kind=log_rank needs a metric that rises during training, but metric=eval/loss",
        ),
        (with_keys(LOWER, alpha=0.2), 8, {}, "rule.alpha=0.2 must be at most 0.1"),
        (
            LOWER, 8, {"also": f"[{with_keys(LOWER, alpha=0.1)}]", "power": POWER},
            "also[0].alpha=0.1 must equal rule.alpha=0.05, because the power of the study is "
            "computed for one alpha; use the same alpha",
        ),
        (
            with_keys(LOWER, margin=0.02), 8, {"also": f"[{ALIKE}]"},
            "rule: margin=0.02 has no effect with kind=difference; to test whether arms are "
            "equivalent, add a rule with kind=equivalence to also",
        ),
        (
            LOWER.replace("0.0", "0.1"), 8, {},
            "rule: below=0.1 includes a gap of 0, so the rule shows no difference; use below=0, or "
            "kind=equivalence with margin=0.1",
        ),
        (LOWER.replace("below: 0.0", "above: -0.1"), 8, {}, "rule: above=-0.1 includes a gap of 0"),
        (with_keys(LOWER, at="flops"), 8, {}, "rule: at=flops is removed, because it read losses"),
        (
            SOONER, 8, {**TASKS, "test": "welch", "also": f"[{LOWER}]"},
            "also[0]: test=welch is removed; remove the key",
        ),
    ],
)  # fmt: skip
def test_study_is_refused_if_rules_cannot_decide(tmp_path, error_of, rule, seeds, more, message):
    study, out = study_of_seeds(tmp_path, rule, seeds, **more), tmp_path / "out"
    for words in (["--dry-run"], []):
        assert message in error_of("study", "run", study.path, f"out={out}", *words)
        assert not out.exists()


@pytest.mark.parametrize(
    ("rule", "seeds", "more"),
    [
        (SOONER, 4, TASKS),
        (SOONER, 3, {**TASKS, "rule": with_keys(SOONER, alpha=0.06)}),
        (SOONER, 4, {**TASKS, "also": f"[{', '.join([SOONER] * 2 + [LOWER] * 7)}]"}),
        (LOWER, 8, {"also": f"[{ALIKE}]", "power": POWER}),
        (LOWER.replace("0.0", "-0.1"), 8, {}),
        (with_keys(LOWER, alpha=0.1), 8, {"also": f"[{LOWER}]"}),
        (ALIKE, 10, {"also": f"[{LOWER}, {LOWER}]", "power": POWER}),
    ],
)
def test_check_study_runs_accepts_valid_study_design(tmp_path, rule, seeds, more):
    study = study_of_seeds(tmp_path, **{"rule": rule, "seeds": seeds, **more})
    check_study_runs(study, tmp_path / "o", 1)


def test_started_study_can_resume_if_alpha_is_too_large(tmp_path, output_of, error_of):
    study, out = study_of_seeds(tmp_path, with_keys(LOWER, alpha=0.2), 3), tmp_path / "out"
    write_arms(study, out, {"half": [4.40, 4.41, 4.39], "v2": [4.30, 4.312]})
    next_jobs(study, SweepDirectory(out, "study"), [])
    assert "would be: shown" in output_of("study", "verdict", study.path, f"out={out}")
    words = ["study", "run", str(study.path), "--dry-run"]
    assert "6 runs; 5 finished" in output_of(*words, f"out={out}")
    assert "rule.alpha=0.2" in error_of(*words, f"out={tmp_path / 'new'}")


@pytest.mark.parametrize(
    ("seeds", "more", "message"),
    [
        (
            5, {"also": f"[{LOWER}, {LOWER}, {LOWER}]"},
            "note: the smallest one-sided p of an exact sign-flip test of 5 pairs is 0.031 (0.12 "
            "after Holm's correction for 4 tests), not below alpha 0.05: it cannot confirm",
        ),
        (5, {}, None),
        (
            5,
            {"metric": "hidden_top1",
             "also": "[{kind: log_rank, arm: v2, against: half, reaches: 9}]"},
            None,
        ),
    ],
)  # fmt: skip
def test_dry_run_notes_that_exact_test_cannot_decide(tmp_path, output_of, seeds, more, message):
    study = study_of_seeds(tmp_path, LOWER, seeds, **more)
    output = output_of("study", "run", study.path, f"out={tmp_path / 'out'}", "--dry-run")
    notes = [line for line in output.splitlines() if line.startswith("note:")]
    assert len(notes) == (message is not None)
    assert not message or notes[0].startswith(message)
