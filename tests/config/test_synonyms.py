"""Errors for key names of other frameworks suggest the key of diffllm."""

import re

import pytest
from runs.written import study_file

from diffllm.config import load_config
from diffllm.config.compose import compose_config
from diffllm.config.overrides import CONFIG_GROUPS, known_keys
from diffllm.config.synonyms import KEY_BY_SYNONYM, NOTES, SYNONYMS
from diffllm.core.errors import ConfigError

RULE = "{kind: difference, arm: v2, against: half, below: 0.0}"


def test_synonyms_lead_to_real_keys_and_are_no_keys():
    keys = {*CONFIG_GROUPS, *known_keys(compose_config(["experiment=none"]))}
    assert SYNONYMS.keys() <= keys
    assert NOTES.keys() <= SYNONYMS.keys()
    assert not KEY_BY_SYNONYM.keys() & keys
    assert len(KEY_BY_SYNONYM) == sum(len(names.split()) for names in SYNONYMS.values())


@pytest.mark.parametrize("key", [key for key, note in NOTES.items() if "such as" in note])
def test_example_in_note_is_a_valid_override(key):
    assert load_config(re.findall(rf"such as ({key}=\w+)", NOTES[key]))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning_rate=1e-3", "optim.lr?"),
        ("optim.learning_rate=1e-3", "optim.lr?"),
        ("+optim.learning_rate=1e-3", "optim.lr?"),
        ("optimizer.lr=1e-3", "optim.lr?"),
        ("lr=1e-3", "optim.lr?"),
        ("batch_size=8", "global_batch_size? (sequences per optimizer step, over all ranks; "),
        ("per_device_train_batch_size=8", "micro_batch_size? (sequences per rank and forward"),
        ("training.steps=5", "steps?"),
        ("max_steps=5", "steps?"),
        ("context_length=64", "seq_len?"),
        ("model.n_head=4", "model.n_heads?"),
        ("hidden-size=64", "model.dim?"),
        ("model.name=tiny", "model? (a YAML file, such as model=tiny)"),
        ("bf16=true", "precision? (such as precision=bf16)"),
        ("warmup_ratio=0.1", "optim.warmup_steps? (steps; a share: "),
        ("weight_decay=0.1", "optim.weight_decay?"),
    ],
)
def test_override_with_name_of_other_framework_suggests_key(word, key):
    with pytest.raises(ConfigError) as caught:
        load_config([word])
    name = word.lstrip("+").partition("=")[0]
    assert str(caught.value).startswith(f"unknown key {name}; did you mean {key}")


def test_synonym_in_any_input_gives_single_line_with_key(workplace, monkeypatch, error_of):
    monkeypatch.setattr("diffllm.config.plugins._DIRECTORIES", [])
    (workplace / "experiment").mkdir()
    yaml = workplace / "experiment" / "mine.yaml"
    yaml.write_text("# @package _global_\noptim: {learning_rate: 0.1}\n", encoding="utf-8")
    study_file(workplace / "study.yaml", RULE, base="[model=tiny, optim.learning_rate=0.1]")
    commands = [
        ["train", "-m", "optim.learning_rate=0.1,0.2"],
        ["train", "--config-dir", ".", "experiment=mine"],
        ["train", "--learning-rate=0.1"],
        ["count", "--learning-rate=0.1"],
        ["plan", "learning_rate=0.1"],
        ["study", "run", "study.yaml", "out=out", "--dry-run"],
    ]
    for command in commands:
        assert error_of(*command).endswith("; did you mean optim.lr?"), command
