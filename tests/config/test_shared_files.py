"""Shared files can neither import plugins nor read environment variables."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs.json_files import read_json, write_json

from diffllm.cli import main
from diffllm.compare.study.file import load_study
from diffllm.compare.study.planned_runs import DECIDING, Planned, config_of_planned
from diffllm.compare.sweep.cluster import ClusterLauncher
from diffllm.compare.sweep.runs import combinations, experiment_words, plan_sweep, split_overrides
from diffllm.config import load_config
from diffllm.config.compose import variant_config
from diffllm.config.origin import Origin, implied
from diffllm.config.overrides import check_shared
from diffllm.config.plugins import config_directory, load_plugins
from diffllm.core.errors import ConfigError

SECRET = "hfSecretOfNobody0123456789"
STUDY = """claim: one
base: [model=tiny, {base}]
arms: {{a: [attention=standard], b: [attention=diff_v2, {arm}]}}
baseline: a
seeds: [0, 1]
rule: {{kind: difference, arm: b, against: a, below: 0.0}}
unequal: [parameters, flops, tokens]
"""
PLUGIN = "plugin_that_no_file_imports"


@pytest.fixture(autouse=True)
def secret_and_plugin(workplace, monkeypatch):
    """Set a secret in the environment, add a plugin to the path, reset added YAML directories."""
    for name in ("HF_TOKEN", "MY_VARIABLE"):
        monkeypatch.setenv(name, SECRET)
    (workplace / f"{PLUGIN}.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(workplace))
    monkeypatch.setattr("diffllm.config.plugins._DIRECTORIES", [])
    return workplace


def of_recipe(key: str, value: object) -> None:
    """Load a recipe with a given value of one data key."""
    write_json(Path("r.yaml"), {"source": "files", "paths": ["x.txt"], key: value})
    load_config(["data=r.yaml", "model=tiny"])


def of_directory(group: str) -> Callable[[str, object], None]:
    """Return a function that loads a YAML of a group from a named directory."""

    def load(key: str, value: object) -> None:
        Path(f"mine/{group}").mkdir(parents=True)
        package = "_global_" if group == "experiment" else group
        content = f"# @package {package}\n{json.dumps({key: value})}"
        Path(f"mine/{group}/x.yaml").write_text(content, encoding="utf-8")
        load_config([f"{group}=x", "model=tiny"], config_dir="mine")

    return load


def of_study(base: str = "steps=1", arm: str = "steps=2") -> None:
    """Load a study with an override for all arms, or for one arm."""
    Path("s.yaml").write_text(
        STUDY.format(base=json.dumps(base), arm=json.dumps(arm)), encoding="utf-8"
    )
    load_study(Path("s.yaml"))


def swept_words(params: dict[str, object]) -> list[str]:
    """Return the sweep of an experiment with the given hydra.sweeper.params, as overrides."""
    Path("mine/experiment").mkdir(parents=True)
    content = json.dumps({"hydra": {"sweeper": {"params": params}}})
    Path("mine/experiment/x.yaml").write_text(f"# @package _global_\n{content}", encoding="utf-8")
    load_plugins([], [Path("mine").resolve()])
    return experiment_words(["experiment=x"])


def of_sweeper(word: str) -> None:
    """Read the sweep of an experiment with one override."""
    key, _, value = word.partition("=")
    swept_words({key: value})


def of_sweep(word: str) -> None:
    """Resume a sweep whose record contains a run with an override."""
    own = split_overrides(["model=tiny", "run.sweep=s", "seed=0,1"])[0]
    plan_sweep(own, 1)[0].lock.release()
    file = Path("outputs/s/sweep.json")
    record = read_json(file)
    record["runs"]["forged"] = [word]
    write_json(file, record)
    Path("outputs/s/forged").mkdir()
    Path("outputs/s/forged/config.yaml").write_text("", encoding="utf-8")
    plan_sweep(own, 1)


def of_word(load: Callable[[str], None]) -> Callable[[str, str], None]:
    """Return a function that passes a key and a value to `load` as one override."""
    return lambda key, value: load(f"data.{key}='{value}'")


SOURCES: dict[str, Callable[[str, str], None]] = {
    "recipe": of_recipe,
    "experiment": of_directory("experiment"),
    "data": of_directory("data"),
    "base": of_word(of_study),
    "arm": of_word(lambda word: of_study(arm=word)),
    "sweeper": of_word(of_sweeper),
    "sweep.json": of_word(of_sweep),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sample_prompt", "${oc.env:HF_TOKEN}"),
        ("cache_dir", "x/${oc.decode:${oc.env:MY_VARIABLE}}"),
        ("text_column", "${oc.${split}:MY_VARIABLE}"),
        ("sample_prompt", r"$\{oc.env\:HF_TOKEN\}"),
    ],
)
def test_config_file_cannot_read_environment_variables(source, key, value):
    with pytest.raises(ConfigError, match="interpolation is not allowed") as caught:
        SOURCES[source](key, value)
    assert (key if source != "sweeper" else "x.yaml: hydra") in str(caught.value)
    assert SECRET not in str(caught.value)


def test_list_in_sweeper_params_keeps_text_with_commas():
    values = ["a, b", "'c, d'", "e(1)", "1.10", None]
    jobs = combinations(split_overrides(swept_words({"data.name": values}))[0])
    names = [load_config([*job, "data.dataset=a/b"]).data.name for job in jobs]
    assert names == ["a, b", "c, d", "e(1)", "1.10", None]


@pytest.mark.parametrize(
    ("load", "key"),
    [
        (of_recipe, "data"),
        (of_directory("data"), "data"),
        (lambda key, value: of_directory("experiment")("data", {key: value}), "data"),
        (lambda key, value: swept_words({f"data.{key}": value}), "params.data"),
        (lambda key, value: swept_words({f"data.{key}": [value, "a"]}), "params.data"),
    ],
    ids=["recipe", "data", "experiment", "sweeper", "list in sweeper"],
)
@pytest.mark.parametrize(
    ("name", "value"), [("name", 1.1), ("revision", False), ("paths", 7), ("paths", ["a", 1.1])]
)
def test_number_for_text_key_in_file_is_refused_with_file_and_key(load, key, name, value):
    with pytest.raises(ConfigError, match=rf"\.yaml: .*{key}\.{name}.* must be text.* in quotes"):
        load(name, value)


def test_number_for_text_key_in_added_built_in_experiment_is_refused(monkeypatch):
    shutil.copytree(config_directory(), "conf")
    conf = Path("conf").resolve()
    for module in ("compose", "plugins"):
        monkeypatch.setattr(f"diffllm.config.{module}.config_directory", lambda: conf)
    file = conf / "experiment/x.yaml"
    file.write_text("# @package _global_\nwandb: {group: 1.10}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.yaml: wandb\.group must be text"):
        load_config(["experiment=x", "model=tiny"])
    file.write_text("# @package _global_\nwandb: {group: '1.10'}\n", encoding="utf-8")
    assert load_config(["experiment=x", "model=tiny"]).wandb.group == "1.10"


def test_interpolation_split_over_two_config_values_is_refused():
    Path("mine/experiment").mkdir(parents=True)
    two = "wandb: {project: $, group: '${wandb.project}{oc.env:HF_TOKEN}'}"
    Path("mine/experiment/x.yaml").write_text(f"# @package _global_\n{two}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^wandb\.group: the value contains \${"):
        load_config(["experiment=x", "model=tiny"], config_dir="mine")


def test_experiment_yaml_can_interpolate_other_config_keys():
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/x.yaml").write_text(
        "# @package _global_\nsteps: 40\noptim: {warmup_steps: '${of_steps:0.1, 200}'}\n"
        "eval: {interval: '${optim.warmup_steps}'}\n",
        encoding="utf-8",
    )
    cfg = load_config(["experiment=x", "model=tiny"], config_dir="mine")
    assert (cfg.optim.warmup_steps, cfg.eval.interval) == (4, 4)


@pytest.mark.parametrize(
    "word",
    [
        r"run.name=$\{oc.env\:HF_TOKEN\}",
        r"wandb.group=\${seed}",
        "steps=${oc.decode:'1'}",
        "run.dir=${hydra:runtime.cwd}",
        "seed=${oc.${a}:MY_VARIABLE}",
    ],
)
def test_override_with_forbidden_interpolation_is_refused(word):
    with pytest.raises(
        ConfigError, match=r"set secrets|value contains \${|interpolation is not allowed"
    ):
        load_config(["model=tiny", word])


@pytest.mark.parametrize("load", [of_study, lambda word: of_study(arm=word), of_sweeper, of_sweep])
@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_study_or_sweep_file_cannot_import_plugins(load, mark):
    with pytest.raises(ConfigError, match=r"a file cannot set plugins"):
        load(f"{mark}plugins=[{PLUGIN}]")
    assert PLUGIN not in sys.modules


@pytest.mark.parametrize(
    "word",
    ["plugins.0=x", "~plugins", "plugins@data=x", " plugins =[x]", "+plugins.x=1", "plugins/x=1",
     "hydra.launcher.setup=[ls]", "hydra/launcher=x", "+hydra.callbacks.x._target_=x"],
)  # fmt: skip
def test_check_shared_refuses_plugins_and_hydra_keys_in_any_syntax(word):
    with pytest.raises(ConfigError, match=r"^f: .*: a file cannot set plugins"):
        check_shared([word], "f")


def test_config_of_planned_does_not_import_plugins():
    words = ("model=tiny", f"plugins=[{PLUGIN}]")
    config_of_planned(Planned(DECIDING, "a", seed=0, lr=None, name="a-seed0", arm_words=words))
    assert PLUGIN not in sys.modules


def test_study_run_command_imports_plugins_named_on_command_line(capsys):
    Path("s.yaml").write_text(STUDY.format(base="steps=1", arm="steps=2"), encoding="utf-8")
    words = ["s.yaml", "out=o", "--dry-run", f"plugins=[{PLUGIN}]"]
    try:
        assert main(["study", "run", *words]) == 0, capsys.readouterr().err
        assert sys.modules.pop(PLUGIN)
    finally:
        sys.modules.pop(PLUGIN, None)


def test_hydra_launcher_yaml_in_config_dir_is_refused():
    """The `setup` lines of a launcher would run as shell commands."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    for file, text in (("hydra/launcher/submitit_local", "setup: [ls]"), ("experiment/x", "")):
        Path(f"mine/{file}.yaml").parent.mkdir(parents=True)
        Path(f"mine/{file}.yaml").write_text(text, encoding="utf-8")
    load_plugins([], [Path("mine").resolve()])
    with pytest.raises(ConfigError, match=r"submitit_local\.yaml: a file cannot set Hydra"):
        ClusterLauncher.of(["hydra/launcher=submitit_local"], 1, "run.sweep=x")


def test_config_with_interpolation_is_refused_as_weights_source():
    model = load_config(["model=tiny"]).model
    model.attention = variant_config("standard")
    model.match_params_to = None
    model.rope.scaling = "${oc.env:HF_TOKEN}"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="interpolation is not allowed"):
        implied(Origin(Path("w"), model, chosen="standard"), {"data": "tokens"})
