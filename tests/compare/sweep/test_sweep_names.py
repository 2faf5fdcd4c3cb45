"""Overrides of a sweep to runs: names, values, order, and refused overrides."""

import re

import pytest
from processes import call_together

from diffllm.compare.sweep.command import plan_runs
from diffllm.compare.sweep.names import name_run, short_labels
from diffllm.compare.sweep.runs import combinations, keys_of_sweep, split_overrides
from diffllm.config import load_config
from diffllm.core.errors import ConfigError
from diffllm.core.files import read_json
from diffllm.training.run_directory import RUN_NAME

pytestmark = pytest.mark.usefixtures("workplace")


def run_names_of(*words: str) -> list[str]:
    overrides, _ = split_overrides(["model=tiny", *words])
    keys = keys_of_sweep(overrides)
    run_names = [name_run(load_config(job), keys) for job in combinations(overrides)]
    assert all(RUN_NAME.fullmatch(name) for name in run_names)
    return run_names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["attention=diff_v1,standard", "optim.lr=6e-4,1e-3"],  # The last key varies fastest.
            ["diff_v1-lr0.0006", "diff_v1-lr0.001", "standard-lr0.0006", "standard-lr0.001"],
        ),
        (["optim.lr=6e-4,0.0006,6.0E-4"], ["lr0.0006"] * 3),
        (["optim.lr=1,1.0,1e20"], ["lr1.0", "lr1.0", "lr1e+20"]),
        (["seed=-1,1_000"], ["seed-1", "seed1000"]),
        (["compile=null,true,False"], ["compile_null", "compile_true", "compile_false"]),
        (["optim=adamw,wsd"], ["adamw", "wsd"]),
        (["attention=glob(gated*)"], ["gated", "gated_headwise", "gated_init_one"]),
        (["data.sample_prompt='a b',\"a b\""], ["sample_prompt_a_b-c8687a"] * 2),
    ],
)
def test_run_names_depend_on_values_and_not_on_their_spelling(words, expected):
    assert run_names_of(*words) == expected


def test_run_names_differ_for_different_data_paths():
    run_names = run_names_of("data=files", "data.paths=[/a/b.txt],[/a_b.txt],[b.txt],[b.txt,c.txt]")
    assert len(set(run_names)) == 4
    assert re.fullmatch(r"paths_a_b.txt-\w{6}", run_names[0])
    assert run_names[2] == "paths_b.txt"


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        (["attention", "optim.lr", "seed"], ["", "lr", "seed"]),
        (["data.seed", "seed"], ["data.seed", "seed"]),
        (["model.rope.factor", "x.factor"], ["rope.factor", "x.factor"]),
    ],
)
def test_short_labels_returns_unique_suffix_for_each_config_key(keys, labels):
    assert list(short_labels(keys).values()) == labels


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.name=a", "run.sweep"),
        ("run.dir=a,b", "run.sweep"),
        ("run.sweep=a,b", "one run.sweep"),
        ("run.swept=[seed]", "run.swept"),
        ("hydra.sweep.dir=here", "hydra/launcher and"),
        ("hydra/sweeper=optuna", "hydra/launcher and"),
        ("+hydra.sweeper.params.seed=1", "hydra/launcher and"),
        ("hydra.launcher.partition=a,b", "one value each"),
        ("optim.lr=interval(0,1)", "optim.lr=interval(0,1): a sweep needs a list of values"),
    ],
)
def test_sweep_refuses_reserved_keys_and_intervals(word, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        combinations(split_overrides(["seed=0,1", word])[0])


def test_split_overrides_returns_launcher_overrides_separately():
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"]
    overrides, launcher = split_overrides(["seed=0,1", *words])
    assert launcher == words
    assert combinations(overrides) == [["seed=0"], ["seed=1"]]


def test_truncated_run_names_are_unique():
    """File systems limit names to 255 bytes."""
    words = [f"data.sample_prompt='{'prompt ' * 9}{n}'" for n in (1, 2)]
    keys = ["data.sample_prompt", "optim.lr", "wandb.project", "wandb.entity", "wandb.group"]
    long = [f"{key}={letter * 60}" for key, letter in zip(keys[2:], "abc", strict=True)]
    names = {name_run(load_config(["model=tiny", *long, word]), keys * 2) for word in words}
    assert len(names) == 2
    assert all(len(name) <= 230 for name in names)


def planned_sweep(words: list[str]) -> tuple[str, list[str]]:
    runs, (directory, _) = plan_runs(words, [], 1)
    return directory.path.name, [run["path"] for run in runs]


def test_concurrent_unnamed_sweeps_get_different_directories(workplace, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "now")
    sweeps = dict(call_together(planned_sweep, 4, ["model=tiny", "seed=0,1"]))
    assert sorted(sweeps) == ["sweep-now", "sweep-now-2", "sweep-now-3", "sweep-now-4"]
    for name, paths in sweeps.items():
        assert paths == [f"outputs/{name}/seed0", f"outputs/{name}/seed1"]
        record = read_json(workplace / "outputs" / name / "sweep.json")
        assert list(record["runs"]) == ["seed0", "seed1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.n_heads=7"], "n_heads"),
        (["model.dmi=8"], "dmi"),
        (["global_batch_size=3"], "global_batch_size"),
        (["optim.lr=1e-3,0", "run.sweep=mine"], "positive"),
    ],
)
def test_refused_sweep_leaves_no_directory(workplace, words, message):
    with pytest.raises(ConfigError, match=message):
        plan_runs(["model=tiny", "seed=0,1", *words], [], 2)
    assert list(workplace.iterdir()) == []
