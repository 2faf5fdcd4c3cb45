"""Conditions in which the arms of a study must agree, before its runs and in its verdict."""

from dataclasses import replace

import pytest
from runs.json_files import write_json
from runs.written import LOWER, study_file, write_arms

from diffllm.compare.arms.comparability import Comparand, Terms, differences, role
from diffllm.compare.study.declared_differences import settings_of, undeclared
from diffllm.compare.study.running import check_study_runs
from diffllm.compare.study.verdict import judge
from diffllm.compare.study.verdict_page import verdict_page
from diffllm.config import load_config
from diffllm.config.compose import LENGTHS
from diffllm.core.errors import ConfigError
from diffllm.core.keys import declarations

HALF, BETTER = [4.40, 4.41, 4.39], [4.30, 4.312, 4.289]
IN_CONFIG = {
    "tokens": ("steps=10 optim.warmup_steps=2", "tokens: 5,120 in half; 2,560 in v2"),
    "batch": (
        "global_batch_size=4 steps=40 optim.warmup_steps=2",
        "global_batch_size: 8 in half; 4 in v2",
    ),
    "schedule": ("optim.schedule=wsd", "optim.schedule: cosine in half; wsd in v2"),
    "warmup": ("optim.warmup_steps=5", "optim.warmup_steps: 2 in half; 5 in v2"),
    "weight_decay": ("optim.weight_decay=0.2", "optim.weight_decay: 0.1 in half; 0.2 in v2"),
    "optimizer": ("optim.beta2=0.99", "optim.beta2: 0.95 in half; 0.99 in v2"),
    "data": ("data.mask_documents=true", "data.mask_documents: false in half; true in v2"),
    "parameters": ("model.ffn_dim=512", "parameters: "),
    "flops": ("model.n_layers=3", "training FLOPs per token: "),
    "model.init_seed": ("model.init_seed=0", "model.init_seed: as seed in half"),
    "lr": ("optim.lr=0.005", "optim.lr: 0.002 in half; 0.005 in v2"),
}
"""By entry of `unequal`: overrides of one arm, and the sentence about the difference."""
IN_FACTS = {
    "parameters": ({"parameters": 10_051}, "parameters: 10k in half; 10.05k in v2 (largest 0.51%"),
    "flops": (
        {"flops_per_token": 61_300.0},
        "training FLOPs per token: 60k in half; 61.3k in v2 (largest",
    ),
    "data": (
        {"corpus": "d1" * 32, "tokenizer": "9f" * 32},
        "corpus: c0c0c0c0 in half; d1d1d1d1 in v2; tokenizer: t0t0t0t0 in half; 9f9f9f9f in v2",
    ),
    "precision": ({"compute_dtype": "bfloat16"}, "compute_dtype: float32 in half; bfloat16 in v2"),
    "torch": ({"torch": "2.11.0"}, "torch: 2.13.0 in half; 2.11.0 in v2"),
}
WITHOUT_VALUE = {
    "seed": "equal in the runs of a seed",
    **dict.fromkeys(
        ("prepare", "parallel", "distributed", "checkpoint", "diagnostics", "metrics", "wandb",
         "profile", "run", "resolved"),
        "a section",
    ),
}  # fmt: skip
"""Names of conditions that have no compared value, and the reasons."""
SIZES = {"parameters": 10_000, "flops_per_token": 60_000.0}


def comparands(*values):
    """Return the runs of two arms with these values of keys and facts."""
    return [Comparand(arm, 0, settings) for arm, settings in zip("ab", values, strict=True)]


def pair_of_configs(*configs):
    return comparands(*(settings_of(cfg, chosen_rates=False) for cfg in configs))


def undeclared_in(runs, allowed, **terms):
    return undeclared(differences(runs, Terms("study", allowed, **terms)))


def two_arms(v2: str = "") -> str:
    return (
        "{half: [attention=standard_half_context], "
        f"v2: [attention=diff_v2{''.join(f', {word}' for word in v2.split())}]}}"
    )


def others(word: str) -> str:
    """The conditions in which standard attention and V2 differ, without one."""
    return f"[{', '.join({'parameters', 'flops'} - {word})}]"


@pytest.mark.parametrize("word", IN_CONFIG)
def test_study_does_not_start_if_arms_have_undeclared_config_difference(tmp_path, error_of, word):
    override, difference_text = IN_CONFIG[word]
    arms = {"arms": two_arms(override), "baseline": "half", "unequal": others(word)}
    study = study_file(tmp_path / "study.yaml", LOWER, **arms)
    error = error_of("study", "run", study.path, f"out={tmp_path / 'out'}")
    assert "the verdict would be not comparable: arms differ in " in error
    assert difference_text in error
    assert f"add {word} to unequal" in error
    assert error.count("add ") == 1
    assert not (tmp_path / "out").exists()
    declared = {**arms, "unequal": arms["unequal"].replace("]", f", {word}]")}
    check_study_runs(study_file(tmp_path / "declared.yaml", LOWER, **declared), tmp_path / "out", 1)


def verdict_of_arms(tmp_path, unequal, override="", half=None, v2=None):
    arms = {"arms": two_arms(override), "baseline": "half", "unequal": f"[{', '.join(unequal)}]"}
    study, out = study_file(tmp_path / "study.yaml", LOWER, **arms), tmp_path / "out"
    write_arms(study, out, {"half": HALF}, **SIZES, **(half or {}))
    write_arms(study, out, {"v2": BETTER}, **{**SIZES, **(v2 or {})})
    return judge(study, out)


def assert_condition(tmp_path, entry, text, **runs):
    """Assert that a difference between the arms must be declared by this entry of `unequal`."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    refused = verdict_of_arms(tmp_path / "a", [], **runs)
    assert refused.verdict == "not comparable", refused.reasons
    assert refused.reasons[0].startswith(f"arms differ in {text}")
    assert refused.reasons[0].endswith(f"(if the study intends this, add {entry} to unequal)")
    declared = verdict_of_arms(tmp_path / "b", [entry], **runs)
    assert declared.verdict == "shown", declared.reasons
    return declared


@pytest.mark.parametrize("entry", ["tokens", "lr"])
def test_undeclared_config_difference_makes_verdict_not_comparable(tmp_path, entry):
    override, text = IN_CONFIG[entry]
    verdict = assert_condition(tmp_path, entry, text, override=override)
    page = verdict_page(verdict).markdown()
    assert f"Differences that the study declares: {entry}." in page


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("entry", IN_FACTS)
def test_undeclared_run_json_difference_makes_verdict_not_comparable(tmp_path, entry):
    facts, text = IN_FACTS[entry]
    assert_condition(tmp_path, entry, text, v2=facts)


def test_verdict_ignores_small_differences_of_parameters_and_flops(tmp_path):
    verdict = verdict_of_arms(tmp_path, [], v2={"parameters": 10_050, "flops_per_token": 61_200.0})
    assert verdict.verdict == "shown", verdict.reasons


def test_verdict_on_loss_shows_machine_differences_as_harmless(tmp_path):
    verdict = verdict_of_arms(tmp_path, [], v2={"device": "NVIDIA H100", "ranks": 8})
    assert verdict.verdict == "shown", verdict.reasons
    page = verdict_page(verdict).markdown()
    line = (
        "- Difference in `device` (no influence on the metric): `CPU` in half; `NVIDIA H100` in v2"
    )
    assert line in page
    assert "- Overrides of `v2`: `attention=diff_v2`" in page
    assert "device CPU, NVIDIA H100, ranks `1, 8`" in page


def test_starting_point_is_a_condition():
    new = load_config(["attention=diff_v2", "run.dir=outputs/a"])
    own = ("auto", "never", "outputs/a", "outputs/a/checkpoints/step-00000010")
    for resume in (*own, "outputs/b", "outputs/b@10", "weights:outputs/a", "stage:b"):
        runs = pair_of_configs(new, replace(new, resume=resume))
        problems = undeclared_in(runs, [])
        assert bool(problems) == (resume not in own)
        assert all("add resume to unequal" in problem for problem in problems)
        assert undeclared_in(runs, ["resume"]) == []


def test_code_may_differ_between_seeds_but_not_between_arms(tmp_path):
    half, v2 = ({"diffllm": {"hash": code}} for code in ("a1", "b2"))
    assert_condition(tmp_path, "code", "code: ", half=half, v2=v2)
    runs = []
    for arm in "ab":
        runs += [Comparand(arm, seed, {"code": f"version {seed}"}) for seed in range(3)]
    assert differences(runs, Terms("study")) == []


@pytest.mark.parametrize(("fact", "value"), [("device", "NVIDIA H100"), ("ranks", 8)])
def test_machine_is_a_condition_of_metrics_of_time(fact, value):
    runs = comparands({fact: "other"}, {fact: value})
    assert undeclared_in(runs, []) == []
    assert f"add {fact} to unequal" in undeclared_in(runs, [], measures_time=True)[0]
    assert undeclared_in(runs, [fact], measures_time=True) == []


def test_key_that_only_one_arm_sets_is_a_condition():
    words = ["attention=diff_v2", "eval.suites=[mqar]"]
    configs = [load_config(words), load_config([*words, "eval.levels={mqar: {filler: 64}}"])]
    runs = pair_of_configs(*configs)
    assert "eval.levels.mqar.filler: not set in a; 64 in b" in undeclared_in(runs, [])[0]


def test_hashes_with_equal_start_differ():
    runs = comparands({"corpus": "c0" * 30 + "1"}, {"corpus": "c0" * 30 + "2"})
    assert [difference.key for difference in differences(runs, Terms("study"))] == ["corpus"]


def test_unknown_number_of_parameters_is_a_condition():
    runs = comparands({"parameters": 10_000}, {"parameters": None})
    (problem,) = undeclared_in(runs, [])
    assert problem.startswith("arms differ in parameters: 10k in a; unknown in b (if the study")


def test_metrics_of_time_and_memory_depend_on_machine(tmp_path):
    for metric in ("seconds", "tokens_per_s", "train_seconds", "perf/tokens_per_s", "perf/mfu"):
        assert study_file(tmp_path / "study.yaml", LOWER, metric=metric).measures_time
    assert not study_file(tmp_path / "study.yaml", LOWER).measures_time


def test_difference_in_key_is_refused_if_and_only_if_its_declaration_is_a_condition():
    cfg = load_config(["attention=diff_v2"])
    settings = settings_of(cfg, chosen_rates=False)
    refused = set()
    for name, declaration in declarations(cfg).items():
        value = settings.get(name)
        if value is not None and name != "resume":
            runs = comparands({name: value}, {name: f"{value}0"})
            refused |= {name} if undeclared_in(runs, []) else set()
            assert undeclared_in(runs, [name]) == []
            is_condition = role(name, declaration, Terms("study")) == "condition"
            assert (name in refused) == is_condition, name
        elif role(name, declaration, Terms("study")) == "condition":
            is_section = any(key.startswith(f"{name}.") for key in settings)
            is_length = name in LENGTHS
            is_content = declaration.fact in ("corpus", "tokenizer")
            is_empty = name in ("data.sources", "eval.levels")
            exceptions = (is_section, is_length, is_content, is_empty)
            assert any(exceptions) or name in WITHOUT_VALUE, name
    assert {"model.z_loss", "eval.suites_interval", "train.skip_step"} <= refused


def test_started_study_resumes_despite_undeclared_difference_between_arms(tmp_path, capsys):
    arms = {"arms": two_arms(), "baseline": "half", "unequal": "[]"}
    study, out = study_file(tmp_path / "study.yaml", LOWER, **arms), tmp_path / "out"
    with pytest.raises(ConfigError, match="add flops to unequal"):
        check_study_runs(study, out, 1)
    write_arms(study, out, {"half": HALF[:1]})
    write_json(out / "sweep.json", {"runs": {"half-seed0": ["run.study=1/deciding/half"]}})
    check_study_runs(study, out, 1)
    warning = capsys.readouterr().err
    assert "warning: " in warning
    assert "add flops to unequal" in warning


def test_invalid_entry_of_unequal_key_raises_error_with_allowed_entries(tmp_path):
    with pytest.raises(ConfigError, match=r"unequal\[1\]=size is not one of parameters, flops, "):
        study_file(tmp_path / "study.yaml", LOWER, unequal="[flops, size]")
