"""Drawn damage to files of a run, a sweep and a checkpoint: commands read on or say why not."""

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from cli_helpers import Result
from forked_runs import tool, train
from hostile.damage import SECRET, damage, take_away
from tiers import slow_but

FILES = (
    "config.yaml", "metrics.jsonl", "run.json", "summary.json", "saved.json", "changes.jsonl",
    "diverged.json", "run.log", "requeue", "tokenizer.model", "report.html", "../sweep.json",
    "heldout/step-00000004.npz", "checkpoints", "heldout", "traces", ".lock",
    *(f"checkpoints/step-{step:08d}/{name}"
      for step in (2, 4) for name in ("manifest.json", "state.json", ".metadata", "__0_0.distcp")),
    "evaluation", "evaluation/step-00000004/mqar.jsonl",
    "checkpoints/step-00000004", "checkpoints/.step-00000006.incomplete",
    "checkpoints/step-00000006",
)  # fmt: skip
"""The files that are damaged; those that the run does not have are made first."""
COMMANDS = {
    "train": [],
    "checkpoints": ["run={run}"],
    "consolidate": ["run={run}", "out={run}/../../../out"],
    "generate": ["run={run}", "prompt=a", "max_new_tokens=2"],
    "attention-map": ["run={run}", "prompt=def a"],
    "outliers": ["run={run}", "tokens=32"],
    "report": ["{run}/.."],
    "power": ["pilot={run}/..", "gap=0.1"],
}
FORGED = {
    "changes.jsonl": '{"step": 0, "changes": {"log_interval": [1, 2]}}\n',
    "diverged.json": '{"step": 3, "reason": "too many skips"}\n',
    "requeue": '{"signal": "SIGTERM", "step": 2}\n',
    "../sweep.json": '{"keys": ["seed"], "runs": {"seed0": ["seed=0"]}, "jobs": {}}\n',
}


RESULT = json.dumps(
    {
        "key": {"evaluation": "mqar"},
        "unit": "share of right answers",
        "scores": [
            {
                "of": f"pairs {n}",
                "value": 0.5,
                "chance": 0.25,
                "level": {"pairs": n},
                "by_place": {"0": 0.5},
            }
            for n in (2, 4, 8)
        ],
    }
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def copy_of(run: Path, place: Path) -> Path:
    """A copy of a run as the only one of a sweep, with a secret outside."""
    shutil.rmtree(place, ignore_errors=True)
    copy = place / "outputs" / "sweep" / "seed0"
    shutil.copytree(run, copy)
    for name, text in FORGED.items():
        if name != "diverged.json":
            (copy / name).write_text(text)
    (copy / "traces").mkdir()
    (copy / "evaluation" / "step-00000004").mkdir(parents=True)
    (copy / "evaluation" / "step-00000004" / "mqar.jsonl").write_text(RESULT)
    return copy


def break_it(rng: random.Random, run: Path) -> str:
    """Damage one or two files of a run, which may be finished or not."""
    said = []
    if rng.random() < 0.5:
        (run / "summary.json").unlink()
        (run / "saved.json").write_text('{"step": 2}\n')
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        said.append("unfinished")
    for name in rng.sample(FILES, rng.choice([1, 1, 1, 2])):
        file = run / name
        if not file.parent.is_dir():
            continue
        if not os.path.lexists(file):
            file.write_text(FORGED.get(name, "{}\n"))
        if file.is_dir():
            said.append(take_away(rng, file, run.parents[2]))
        elif not file.is_symlink():
            said.append(damage(rng, file))
    return ", ".join(said)


def started(
    name: str, run: Path, tiny: list[str], place: Path, environment: Mapping[str, str]
) -> Result:
    if name == "train":
        more = ["attention=standard", f"run.dir={run}", "run.report=true"]
        return train([*tiny, *more], place, environment)
    return tool([name, *(word.format(run=run) for word in COMMANDS[name])], place, environment)


def contents(place: Path) -> dict[str, bytes]:
    """Every file outside of the run's directory that a link may lead to."""
    return {
        str(path): path.read_bytes()
        for path in place.glob("outside-*")
        if path.is_file() and not path.is_symlink()
    }


def assert_one_line_or_success(name: str, result: Result, case: str) -> None:
    everything = f"{case}\n{result.out}\n{result.err}"
    assert result.code in ((0, 1, 2) if name == "checkpoints" else (0, 2)), everything
    assert "Traceback" not in result.out + result.err, everything
    assert SECRET not in result.out + result.err, everything
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (result.code == 2), everything
    others = [
        line for line in result.err.splitlines() if not line.startswith(("error: ", "warning: "))
    ]
    assert not others, everything


@pytest.mark.parametrize(
    ("name", "number"),
    slow_but(
        [(name, 0) for name in ("train", "generate")],
        [(n, i) for n in COMMANDS for i in range(12)],
    ),
)
def test_damage_ends_in_one_line_or_is_read_around(
    name, number, finished_run, tiny, place, environment, rng
):
    for _ in range(3):
        run = copy_of(finished_run, place)
        case = break_it(rng, run)
        metrics, before = run / "metrics.jsonl", contents(place)
        was = metrics.read_bytes() if metrics.is_file() and metrics.stat().st_size < 2**20 else b""
        result = started(name, run, tiny, place, environment)
        assert_one_line_or_success(name, result, f"{name}: {case}")
        assert contents(place) == before, f"{name}: {case}"
        if was and result.code:
            assert metrics.read_bytes() == was, f"{name}: {case}"
        for file in (place / "out").glob("*"):
            assert SECRET.encode() not in file.read_bytes(), f"{name}: {case}"
