"""Study files: content, and errors about invalid files."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from diffllm.compare.study.file import load_study
from diffllm.compare.study.planned_runs import deciding_runs, rate_run
from diffllm.compare.study.running import group_of
from diffllm.core.errors import ConfigError

GOOD = """\
claim: V2's advantage is more than damping
source: DIFF V2 writeup
base: [model=tiny, steps=20, seq_len=32]
arms:
  standard: [attention=standard]
  half: [attention=standard, model.attention.context_scale=0.5]
  v2: [attention=diff_v2]
baseline: standard
seeds: [0, 1, 2]
lr: {grid: [1e-3, 2e-3, 4e-3], seeds: [100, 101], steps: 10}
metric: heldout_loss
rule: {kind: difference, arm: v2, against: half, below: 0.0, alpha: 0.05}
"""


def write_study(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_load_study_parses_numbers_in_scientific_notation_without_decimal_point(tmp_path):
    study = load_study(write_study(tmp_path, GOOD))
    assert study.lr.grid == [1e-3, 2e-3, 4e-3]  # text in YAML 1.1
    assert study.rule.statement(study.metric) == (
        "heldout_loss of v2 minus that of half is below 0 (one-sided, alpha 0.05)"
    )
    assert load_study(write_study(tmp_path, GOOD + "\n# later\n")).hash != study.hash


@pytest.mark.parametrize(
    ("metric", "scale", "limits"),
    [
        ("heldout_loss", "linear", (0, math.inf)),
        ("seconds", "linear", (0, math.inf)),
        ("tasks/mqar", "linear", (0, 1)),
        ("tasks/mqar", "log", (-math.inf, 0)),
        ("context_rms", "log", (-math.inf, math.inf)),
        ("spikes/loss_score", "linear", (-math.inf, math.inf)),
    ],
)
def test_limits_of_metric_follow_from_its_unit(tmp_path, metric, scale, limits):
    study = replace(load_study(write_study(tmp_path, GOOD)), metric=metric, scale=scale)
    assert study.limits == limits


RULE = "difference, arm: v2, against: half, below: 0.0"
GRID, SEEDS, METRIC = "grid: [1e-3, 2e-3, 4e-3]", "seeds: [0, 1, 2]", "metric: heldout_loss"
RATE_SEEDS, V2 = "seeds: [100, 101]", "v2: [attention=diff_v2]"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("claim:", "clam:", "unknown key clam; did you mean claim?"),
        ("claim: V2's advantage is more than damping\n", "", "claim is missing"),
        ("kind: difference", "kind: better", "rule.kind=better must be one of difference, equiv"),
        ("arm: v2", "arm: v3", "rule.arm=v3 is not one of the arms half, standard, v2"),
        ("against: half", "against: v2", "rule: v2 cannot be compared with itself"),
        ("below: 0.0, ", "", "rule: kind=difference must set below, or above"),
        ("below: 0.0", "below: 0.0, above: 0.1", "sets below, above"),
        ("below: 0.0", "below: soon", "rule.below='soon' must be a number"),
        ("alpha: 0.05", "alpha: 0.7", "rule.alpha=0.7 must be less than 0.5"),
        ("alpha: 0.05", "margin: -1", "rule.margin=-1.0 must be positive"),
        (RULE, "equivalence, arm: v2, against: half", "kind=equivalence must set margin, but"),
        ("kind: difference", "kind: log_rank", "kind=log_rank must set reaches, but"),
        (
            RULE,
            "log_rank, arm: v2, against: half, reaches: 0.9",
            "kind=log_rank is not supported with metric=heldout_loss; use a metric that is logged",
        ),
        (
            "baseline: standard",
            "baseline: none",
            "baseline=none is not one of the arms half, standard",
        ),
        (SEEDS, "seeds: [0]", "seeds=[0] must list 2 or more seeds"),
        (SEEDS, "seeds: [0, -1]", "seeds[1]=-1 must not be negative"),
        (SEEDS, "seeds: [0, 0]", "seeds=[0, 0] must list 2 or more seeds without repetition"),
        (SEEDS, "seeds: [0, true]", "seeds[1]=True must be a whole number"),
        (SEEDS, f"seeds: {[*range(1001)]}", "entries in seeds is 1,001; the maximum is 1,000"),
        (RATE_SEEDS, f"seeds: {[*range(9, 1010)]}", "entries in lr.seeds is 1,001; the"),
        ("[attention=diff_v2]", f"{['a=1'] * 101}", "entries in arms.v2 is 101; the"),
        ("  v2:", "".join(f"  a{i}: []\n" for i in range(98)) + "  v2:", "entries in arms is 101"),
        (GRID, f"grid: {[*range(1, 102)]}", "entries in lr.grid is 101"),
        (
            f"{GRID}, {RATE_SEEDS}",
            f"grid: {[*range(1, 101)]}, seeds: {[*range(9, 59)]}",
            "runs (arms x seeds x learning rates) is 15,009; the maximum is 10,000",
        ),
        ("steps: 10", "extend: 21", "lr.extend=21 must be at most 20"),
        (RATE_SEEDS, "seeds: [1, 101]", "lr.seeds and seeds both contain [1], but must not"),
        (GRID, "grid: [2e-3, 1e-3]", "two or more increasing learning rates"),
        (GRID, "grid: [0, 1e-3]", "lr.grid[0]=0.0 must be positive"),
        (
            f"lr: {{{GRID}, {RATE_SEEDS}, steps: 10}}",
            "lr_sweep: [1e-3, 2e-3]",
            "metric=heldout_loss and lr_sweep=[0.001, 0.002]: metric=lr_sensitivity needs",
        ),
        (METRIC, "lr_sweep: [1e-3, 2e-3]", "lr and lr_sweep cannot be combined"),
        (METRIC, "metric: lr_sensitivity", "metric=lr_sensitivity and lr_sweep=None: "),
        (METRIC, "metric: loss", "metric=loss is not one of heldout_loss"),
        (METRIC, "test: sign", "test=sign must be one of paired, welch"),
        (METRIC, "power: {gap: 0.02}", "power.sd is missing"),
        (V2, "v2: attention=diff_v2", "arms.v2=attention=diff_v2 must be a"),
        (V2, "v2: [seed=1]", "arms.v2: remove seed=1, because the study itself sets seed"),
        (V2, "v2: [attention]", "'attention' is not of the form key=value"),
        ("  v2:", "  ../v2:", "arms: '../v2' must contain only letters, digits and _ . + -"),
        ("claim: V2's", "claim: [V2's", "is not YAML: "),
    ],
)
def test_error_about_invalid_study_file_mentions_the_invalid_key(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load_study(write_study(tmp_path, GOOD.replace(old, new, 1)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "use diffllm study run or diffllm study verdict"),
        (["ran"], "unknown command 'diffllm study ran'; use diffllm study run"),
        (["run"], "no study file"),
        (["run", "{path}"], "missing out=DIR"),
        (["run", "{path}", "out=o", "steps=3"], "unknown argument 'steps=3'"),
        (["verdict", "{path}", "out=o", "pilot=p"], "unknown argument 'pilot=p'"),
        (["verdict", "nowhere.yaml", "out=o"], "nowhere.yaml cannot be read: No such file"),
        (["verdict", "{path}", "out=o p"], "runs with: diffllm study run {path} 'out=o p'"),
        (["run", "{path}", "out=o", "hydra/launcher=x"], "hydra/launcher=x is not one of basic"),
    ],
)
def test_study_command_prints_one_error_line_for_bad_arguments(workplace, error_of, words, message):
    path = write_study(workplace, GOOD)
    error = error_of("study", *(word.format(path=path) for word in words))
    assert message.format(path=path) in error


def test_error_about_invalid_config_of_arm_mentions_the_arm(tmp_path, error_of):
    path = write_study(tmp_path, GOOD.replace("context_scale=0.5", "context_scale=-1"))
    assert "arm half: model.attention.context_scale=-1" in error_of(
        "study", "run", path, f"out={tmp_path / 'o'}", "--dry-run"
    )


def test_group_of_study_run_is_arm_with_learning_rate_if_arm_has_several(tmp_path):
    study = load_study(write_study(tmp_path, GOOD))
    assert group_of(rate_run(study, "v2", 100, 2e-3), study) == "v2 lr=0.002"
    (chosen,) = deciding_runs(study, "v2", 0, 2e-3)
    assert group_of(chosen, study) == "v2"
    sweep = replace(study, lr=None, lr_sweep=[1e-3, 2e-3])
    runs = deciding_runs(sweep, "v2", 0, None)
    assert [group_of(run, sweep) for run in runs] == ["v2 lr=0.001", "v2 lr=0.002"]
    (usual,) = deciding_runs(replace(study, lr=None), "v2", 0, None)
    assert group_of(usual, replace(study, lr=None)) == "v2"
