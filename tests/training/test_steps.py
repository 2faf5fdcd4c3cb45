"""The length of a run in steps, tokens or epochs, and derived settings such as warm-up."""

import pytest

from diffllm import load_config
from diffllm.config.matching import totals
from diffllm.core.errors import ConfigError
from diffllm.data.preparation.prepare import prepare
from diffllm.data.sequences import sequences_in


@pytest.fixture
def lines_corpus(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(
        "\n".join(f"line {n} of a text, {n * n} words long" for n in range(3000)), encoding="utf-8"
    )
    return [
        "data=files", f"data.paths=[{text}]", f"data.cache_dir={tmp_path}", "data.sample_by=line",
        "data.vocab_size=300", "model=tiny", "seq_len=32", "global_batch_size=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "experiment"),
    [
        ("run.name=x", "quickstart"),
        ("parallel=hsdp", "quickstart"),
        ("experiment=quickstart", "quickstart"),
        ("seed=1", "quickstart"),
        ("model.init_seed=3", "quickstart"),
        ("log_interval=5", "quickstart"),
        ("resume=never", "quickstart"),
        ("optim.lr=1e-3", "none"),
        ("train={skip_step: spike}", "none"),
        ("checkpoint={keep_last: 5}", "quickstart"),
        ("max_tokens=1e6", "none"),
        ("data.tokenizer=a.model", "none"),
    ],
)
def test_quickstart_experiment_is_default_unless_overrides_change_computation(word, experiment):
    cfg = load_config([word])
    assert cfg.resolved.choices["experiment"] == experiment
    assert cfg.seq_len == {"quickstart": 256, "none": 512}[experiment]


def test_max_tokens_setting_determines_number_of_steps():
    cfg = load_config(["model=tiny", "max_tokens=1e6", "seq_len=100", "global_batch_size=7"])
    assert cfg.steps == 1428  # 999,600 tokens
    assert cfg.optim.warmup_steps == 143
    assert load_config(["experiment=quickstart", "max_tokens=20480"]).steps == 5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["steps=15"], 15 * 8 * 512 / 4),
        (["steps=15", "eval.tokens=auto"], 15 * 8 * 512 / 4),
        (["steps=100", "global_batch_size=2", "seq_len=1024"], 100 * 2 * 1024 / 4),
        (["max_tokens=8e6"], 8e6 / 4),
        (["max_tokens=8e6", "global_batch_size=24"], 8e6 / 4),
        (["max_tokens=1e9"], 1e7),
        (["steps=15", "eval.tokens=null"], None),
        (["steps=15", "eval.tokens=2e4"], 2e4),
        (["model=micro", "experiment=compare_small"], None),  # its published runs measured all
    ],
)
def test_heldout_tokens_follow_length_of_run_unless_config_sets_number(words, expected):
    assert load_config(["model=tiny", *words]).eval.tokens == expected


def test_heldout_tokens_other_than_number_null_or_auto_are_refused():
    expected = r"eval\.tokens=most: .* is not a number.* null, or auto \(in a YAML file: \$\{auto_"
    with pytest.raises(ConfigError, match=expected):
        load_config(["model=tiny", "eval.tokens=most"])


BUDGET = ("model=tiny", "seq_len=128", "train.budget.flops=1e12")


@pytest.mark.parametrize(
    "words",
    [
        ["attention=standard"],
        ["attention=diff_v2"],
        ["attention=diff_v2", "model.match_params_to=standard"],
        ["attention=gated", "data.mask_documents=true", "data.visible_keys=20"],
    ],
)
def test_budget_in_flops_determines_steps_that_cost_the_budget(words):
    cfg = load_config([*BUDGET, *words])
    flops_per_step = 8 * 128 * totals(cfg.model, cfg.visible_keys)["flops"]
    assert abs(cfg.steps * flops_per_step - 1e12) <= flops_per_step / 2
    assert cfg.optim.warmup_steps == -(-cfg.steps // 10)


def test_variants_of_one_budget_measure_equal_heldout_tokens():
    runs = [load_config([*BUDGET, f"attention={name}"]) for name in ("standard", "diff_v2")]
    assert runs[0].steps > runs[1].steps
    assert runs[0].eval.tokens == runs[1].eval.tokens
    trained = runs[0].steps * 8 * 128
    assert runs[0].eval.tokens == pytest.approx(trained / 4, rel=0.01)
    assert load_config([*BUDGET, "eval.tokens=5e4"]).eval.tokens == 5e4


def test_override_of_length_replaces_budget_of_yaml_file(tmp_path):
    experiment = tmp_path / "experiment"
    experiment.mkdir()
    (experiment / "budgeted.yaml").write_text(
        "# @package _global_\ntrain: {budget: {flops: 1e12}}\n", encoding="utf-8"
    )
    words = ["model=tiny", "seq_len=128", "experiment=budgeted"]
    assert load_config(words, tmp_path).steps == 216
    assert load_config([*words, "train.skip_step=off"], tmp_path).steps == 216
    assert load_config([*words, "steps=7"], tmp_path).steps == 7
    assert load_config([*words, "train.budget.flops=null", "steps=7"], tmp_path).steps == 7
    assert load_config([*words, "train.budget.flops=null"], tmp_path).steps == 1000
    assert load_config([*words, "max_tokens=null"], tmp_path).steps == 216
    assert load_config([*words, "train={budget: {flops: 5e11}}"], tmp_path).steps == 108


def test_epochs_setting_determines_number_of_steps(lines_corpus):
    cfg = load_config([*lines_corpus, "epochs=2.5"])
    sequences = sequences_in(prepare(cfg.data).split("train"), 32)
    assert 2.5 * sequences - 4 < 4 * cfg.steps <= 2.5 * sequences
    assert cfg.optim.warmup_steps == -(-cfg.steps // 10)
    with pytest.raises(ConfigError, match=r"epochs=1e-06 is less than one step"):
        load_config([*lines_corpus, "epochs=1e-6"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps=10", "epochs=1"], "epochs, steps: only one of these keys can be set; remove"),
        (["model=tiny", "max_tokens=100"], "max_tokens=100 is less than one step of global_batch"),
        (["max_tokens=1e30"], r"max_tokens=1e\+30 must be at most 4\.096e\+15, which is"),
        (["train.budget.flops=1e3"], "train.budget.flops=1000 is less than one step of global_"),
        (["train.budget.flops=1e12", "steps=5"], "steps, train.budget.flops: only one of these"),
        (["train.budget.flops=1e30"], r"train.budget.flops=1e\+30 must be at most .*e\+\d+, which"),
        (
            ["train.budget.flops=1e15", "data.mask_documents=true"],
            r"train.budget.flops=1e\+15 with data.mask_documents=true needs the mean number",
        ),
        (["epochs=-1"], "epochs=-1.0 must be positive"),
        # Checked before the preparation of data, which `epochs` needs.
        (["model=tiny", "epochs=1", "optim.beta1=7"], "optim.beta1"),
    ],
)
def test_invalid_training_length_raises_single_line_error(words, said):
    with pytest.raises(ConfigError, match=said) as error:
        load_config([*words, "data.cache_dir=/nowhere"])
    assert "\n" not in str(error.value)
