"""Overrides of a sweep to runs: names, values, order, and refused overrides."""

import json
import re
from pathlib import Path

import pytest
from processes import call_together

from diffllm.compare.sweep.command import plan_runs
from diffllm.compare.sweep.plan import (
    combinations,
    name_run,
    plan_sweep,
    short_labels,
    split_overrides,
)
from diffllm.config import load_config
from diffllm.core.errors import ConfigError
from diffllm.training.directory import NAME


def names(*words: str) -> list[str]:
    overrides, _ = split_overrides(["model=tiny", *words])
    keys = [o.get_key_element() for o in overrides if o.is_sweep_override()]
    found = [name_run(load_config(job), keys) for job in combinations(overrides)]
    assert all(NAME.fullmatch(name) for name in found)
    return found


def test_sweep_combinations_vary_last_key_fastest() -> None:
    words = ("attention=diff_v1,standard", "optim.lr=6e-4,1e-3")
    assert names(*words) == [
        *("diff_v1-lr0.0006", "diff_v1-lr0.001", "standard-lr0.0006", "standard-lr0.001")
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=6e-4,0.0006,6.0E-4", ["lr0.0006"] * 3),
        ("optim.lr=1,1.0,1e20", ["lr1.0", "lr1.0", "lr1e+20"]),
        ("seed=-1,1_000", ["seed-1", "seed1000"]),
        ("compile=null,true,False", ["compile_null", "compile_true", "compile_false"]),
        ("optim=adamw,wsd", ["adamw", "wsd"]),
        ("attention=glob(gated*)", ["gated", "gated_headwise", "gated_init_one"]),
        ("data.sample_prompt='a b',\"a b\"", ["sample_prompt_a_b-c8687a"] * 2),
    ],
)
def test_equivalent_spellings_of_override_value_give_same_run_name(
    word: str, expected: list[str]
) -> None:
    assert names(word) == expected


def test_run_names_differ_for_different_data_paths() -> None:
    found = names("data=files", "data.paths=[/a/b.txt],[/a_b.txt],[b.txt],[b.txt,c.txt]")
    assert len(set(found)) == 4
    assert re.fullmatch(r"paths_a_b.txt-\w{6}", found[0])
    assert found[2] == "paths_b.txt"


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        (["attention", "optim.lr", "seed"], ["", "lr", "seed"]),
        (["data.seed", "seed"], ["data.seed", "seed"]),
        (["model.rope.factor", "x.factor"], ["rope.factor", "x.factor"]),
    ],
)
def test_short_labels_returns_unique_suffix_for_each_config_key(
    keys: list[str], labels: list[str]
) -> None:
    assert list(short_labels(keys).values()) == labels


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("run.name=a", "run.sweep"),
        ("run.dir=a,b", "run.sweep"),
        ("run.sweep=a,b", "one run.sweep"),
        ("run.swept=[seed]", "run.swept"),
        ("hydra.sweep.dir=here", "hydra/launcher and"),
        ("hydra/sweeper=optuna", "hydra/launcher and"),
        ("+hydra.sweeper.params.seed=1", "hydra/launcher and"),
        ("hydra.launcher.partition=a,b", "one value each"),
    ],
)
def test_sweep_refuses_override_of_reserved_key(word: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        split_overrides(["seed=0,1", word])


def test_sweep_refuses_continuous_interval_of_values() -> None:
    message = r"optim.lr=interval\(0,1\): a sweep needs a list of values"
    with pytest.raises(ConfigError, match=message):
        combinations(split_overrides(["optim.lr=interval(0,1)"])[0])


def test_split_overrides_returns_launcher_overrides_separately() -> None:
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"]
    overrides, launcher = split_overrides(["seed=0,1", *words])
    assert launcher == words
    assert combinations(overrides) == [["seed=0"], ["seed=1"]]


# Groups in wandb


def groups(*words: str) -> dict[str, str]:
    """Plan a sweep in the current directory; return {run name: group}."""
    overrides = split_overrides(["model=tiny", "run.sweep=mine", *words])[0]
    directory, runs = plan_sweep(overrides, 1)
    directory.lock.release()
    return {run["name"]: run["group"] for run in runs}


@pytest.mark.slow
def test_groups_of_sweep_contain_values_of_all_swept_keys_except_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = groups("attention=standard,diff_v2", "optim.lr=1e-3,3e-3", "seed=0,1")
    assert whole == {
        f"{variant}-lr{lr}-seed{seed}": f"{variant} lr={lr}"
        for variant in ("standard", "diff_v2")
        for lr in ("0.001", "0.003")
        for seed in (0, 1)
    }
    # No run has begun, for example because all jobs are in the queue of a cluster.
    added = groups("attention=diff_v2", "optim.lr=1e-2", "seed=0")
    assert added == {"diff_v2-lr0.01-seed0": "diff_v2 lr=0.01"}
    assert groups("attention=diff_v2", "optim.lr=1e-3", "seed=2") == {
        "diff_v2-lr0.001-seed2": "diff_v2 lr=0.001"
    }


def test_groups_of_sweep_over_seeds_or_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {*groups("attention=gated", "seed=0,1").values()} == {"gated"}
    assert groups("run.sweep=sizes", "model=tiny,mini") == {
        "tiny": "diff_v2 model=tiny", "mini": "diff_v2 model=mini",
    }  # fmt: skip


def test_recorded_run_with_invalid_config_does_not_stop_other_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups("model.n_layers=1,2")
    file = tmp_path / "outputs" / "mine" / "sweep.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    record["runs"]["n_layers2"] = ["model.n_layers=-2"]
    file.write_text(json.dumps(record), encoding="utf-8")
    assert groups("model.n_layers=1") == {"n_layers1": "diff_v2"}
    run = file.parent / "n_layers2"
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"model\.n_layers=-2"):
        groups("model.n_layers=1")


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


def test_concurrent_unnamed_sweeps_get_different_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    sweeps = dict(call_together(planned_sweep, 4, ["model=tiny", "seed=0,1"]))
    assert sorted(sweeps) == ["sweep-now", "sweep-now-2", "sweep-now-3", "sweep-now-4"]
    for name, paths in sweeps.items():
        assert paths == [f"outputs/{name}/seed0", f"outputs/{name}/seed1"]
        record = json.loads(
            (tmp_path / "outputs" / name / "sweep.json").read_text(encoding="utf-8")
        )
        assert list(record["runs"]) == ["seed0", "seed1"]


@pytest.mark.parametrize("wrong", ["model.n_heads=7", "model.dmi=8", "global_batch_size=3"])
def test_refused_unnamed_sweep_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        plan_runs(["model=tiny", "seed=0,1", wrong], [], 2)
    assert list(tmp_path.iterdir()) == []
