"""Runs, sweeps, studies and caches of version 0.1.0 can still be read and resumed.

tests/data_files/made_before/README.md describes the commands that wrote the files.
"""

import contextlib
import csv
import json
import shlex
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from runs.command import ForkedRun, changes, metrics, snapshot, tool, train
from runs.json_files import read_json, read_jsonl
from safetensors.torch import load_file

MADE = Path(__file__).parents[1] / "data_files" / "made_before"
EXPECTED = MADE / "expected"
MARKS = (".lock", ".verified", "file_index.json")
"""Endings of the names of files that a cache may rewrite."""

GREEDY = ("prompt=Document 3: 3 times", "temperature=0", "max_new_tokens=12")


@pytest.fixture
def moved_files(workplace: Path) -> Path:
    """Copy the files to the current directory, as if a user had moved them."""
    shutil.copytree(MADE, workplace, dirs_exist_ok=True)
    (workplace / "runs").rename(workplace / "outputs")
    return workplace


@pytest.fixture
def run_command(moved_files: Path, environment: dict[str, str]) -> Any:
    """Return a function that runs a command, which must succeed, and returns its stdout."""

    def run(*words: str) -> str:
        result = (train if words[0] == "-m" else tool)(list(words), moved_files, environment)
        assert result.code == 0, result.out + result.err
        assert "warning: " not in result.err
        return result.out

    return run


def command_words(run: Path) -> list[str]:
    """Return the overrides of the command line in run.json."""
    words = shlex.split(read_json(run / "run.json")["command"])
    return words[words.index("data=files") :]


def expected_content(name: str) -> Any:
    return read_json(EXPECTED / name)


ROUNDING = 5e-8
"""Tolerance of a difference of losses, a tenth of float32's spacing at 6 nats: kernels of another
CPU round both losses differently."""


def approximately(value: Any) -> Any:
    """Return a value that compares equal to values with the same numbers except for rounding."""
    if isinstance(value, dict):
        return {key: approximately(part) for key, part in value.items()}
    if isinstance(value, list):
        return [approximately(part) for part in value]
    return pytest.approx(value, rel=1e-3, abs=ROUNDING) if isinstance(value, float) else value


def cached(place: Path) -> dict[str, str]:
    """Return the snapshot of tokenizer, tokens and packing in the cache."""
    files = snapshot(place / "cache").items()
    return {name: seen for name, seen in files if seen != "directory" and not name.endswith(MARKS)}


def sampled(files: list[Path]) -> dict[int, tuple[list[str], float]]:
    """Return the samples of all ranks and the loss, by step."""
    samples, losses = defaultdict(list), {}
    for file in files:
        for line in read_jsonl(file):
            samples[line["step"]] += line["samples"]
            losses[line["step"]] = line["loss"]
    return {step: (sorted(samples[step]), losses[step]) for step in samples}


@pytest.mark.parametrize(
    ("name", "stopped", "words", "ranks"),
    [
        ("run", 6, [], 1),
        ("ranks", 4, ["parallel.expert=1"], 1),
        pytest.param("ranks", 4, [], 2, marks=pytest.mark.slow),
        pytest.param("run", 6, [], 2, marks=pytest.mark.slow),
    ],
)
def test_resumed_older_run_matches_uninterrupted_run(moved_files, name, stopped, words, ranks):
    run = moved_files / "outputs" / name
    logged, cache = (run / "metrics.jsonl").read_text(encoding="utf-8"), cached(moved_files)
    output = ForkedRun([*command_words(run), *words], ranks, moved_files).finish()
    assert "warning: " not in output
    assert changes(cache, cached(moved_files)) == []

    whole = sampled([EXPECTED / f"{name}.jsonl"])
    resumed = sampled(list(run.glob("samples-*.jsonl")))
    assert list(resumed) == list(whole)[stopped:]
    for step, (samples, loss) in resumed.items():
        assert samples == whole[step][0], step
        assert loss == pytest.approx(whole[step][1], abs=2e-5), step
    summary, undisturbed = (read_json(run / "summary.json"), expected_content(f"{name}.json"))
    for key in ("steps", "tokens", "train_loss", "heldout_loss", "heldout_tokens"):
        assert summary[key] == pytest.approx(undisturbed[key], abs=2e-5), key
    assert (run / "metrics.jsonl").read_text(encoding="utf-8").startswith(logged)
    assert metrics(run)[-1]["step"] == len(whole)
    assert not (run / "changes.jsonl").exists()


def test_checkpoints_command_accepts_checkpoints_of_older_version(run_command):
    found = {
        name: [
            (each["step"], each["state"], each["ranks"])
            for each in json.loads(run_command("checkpoints", f"run=outputs/{name}", "--json"))
        ]
        for name in ("run", "ranks", "sweep/diff_v2-seed0")
    }
    assert found == {
        "run": [(4, "good", 1), (6, "good", 1)],
        "ranks": [(4, "good", 2)],
        "sweep/diff_v2-seed0": [(4, "good", 1)],
    }


def test_consolidated_weights_of_older_run_match_stored_export(run_command):
    run_command("consolidate", "run=outputs/run", "out=whole")
    assert sorted_parameters("whole") == sorted_parameters("exported")


@pytest.mark.slow
def test_export_and_import_of_older_run_match_stored_results(run_command):
    run_command("export", "run=outputs/run", "out=again")
    assert sorted_parameters("again") == sorted_parameters("exported")
    before, after = (read_json(Path(p, "config.json")) for p in ("exported", "again"))
    assert before == after
    run_command("import", "hf=exported", "out=outputs/imported")
    text = (EXPECTED / "generated.txt").read_text(encoding="utf-8")
    assert run_command("generate", "run=outputs/imported", *GREEDY) == text


def sorted_parameters(directory: str) -> list[tuple[list[int], bytes]]:
    """Return shapes and values of all parameters, independent of parameter names."""
    tensors = load_file(f"{directory}/model.safetensors").values()
    return sorted((list(tensor.shape), tensor.numpy().tobytes()) for tensor in tensors)


def test_output_of_generate_and_outliers_commands_matches_older_version(moved_files, run_command):
    text = (EXPECTED / "generated.txt").read_text(encoding="utf-8")
    assert run_command("generate", "run=outputs/run", *GREEDY) == text
    assert approximately(expected_content("outliers.json")) == json.loads(
        run_command("outliers", "run=outputs/run", "--json")
    )
    run_command("attention-map", "run=outputs/run", GREEDY[0], "out=map.png")
    assert (moved_files / "map.png").read_bytes().startswith(b"\x89PNG")


def test_evaluation_scores_of_older_run_match_stored_scores(moved_files, run_command):
    run = moved_files / "outputs" / "sweep" / "diff_v2-seed0"
    before = scores(run)
    shown = json.loads(
        run_command("evaluate", f"run={run}", "suite=checkpoint", "limit=4", "--json")
    )
    assert shown
    for name in shown:
        found = scores(run)[name]
        assert found == approximately({of: before[name][of] for of in found})


def scores(run: Path) -> dict[str, dict[str, Any]]:
    """Return the stored scores of step 4, by evaluation and by name."""
    files = (run / "evaluation" / "step-00000004").glob("*.jsonl")
    first = {
        file.stem: json.loads(file.read_text(encoding="utf-8").splitlines()[0]) for file in files
    }
    return {name: {score["of"]: score for score in line["scores"]} for name, line in first.items()}


@pytest.mark.slow
def test_repeated_sweep_of_older_version_changes_no_run(moved_files, run_command):
    sweep = moved_files / "outputs" / "sweep"
    own = ("attention=", "seed=", "run.sweep=", "run.swept=", "run.name=")
    words = [word for word in command_words(sweep / "standard-seed0") if not word.startswith(own)]
    runs = snapshot(*sweep.glob("*-seed?"))
    run_command("-m", *words, "attention=standard,diff_v2", "seed=0,1", "run.sweep=sweep")
    assert changes(runs, snapshot(*sweep.glob("*-seed?"))) == []

    before = csv_table(MADE / "runs" / "sweep" / "report.csv")
    reported = csv_table(sweep / "report.csv")
    # Gaps at equal FLOPs need planned costs and are not interpolated, so that they have no error.
    # The interval over documents and seeds needs two seeds, not eight.
    changed = {"gap_documents_low", "gap_documents_high"}
    changed |= {key for key in before[0] if key.startswith("gap_at_flops") or "_error" in key}
    for row, row_before in zip(reported, before, strict=True):
        equal = {key: value for key, value in row_before.items() if key not in changed}
        assert {key: row.get(key) for key in equal} == approximately(equal)
    assert reported[1]["gap_documents_low"] < reported[1]["gap"] < reported[1]["gap_documents_high"]
    assert any("phonebook" in key for key in reported[0]), "results of a removed task are missing"


def csv_table(file: Path) -> list[dict[str, Any]]:
    """Read a CSV file, with numbers as float."""
    with open(file, encoding="utf-8") as lines:
        return [{key: number(text) for key, text in row.items()} for row in csv.DictReader(lines)]


def number(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def test_finished_study_of_older_version_keeps_verdict(moved_files, run_command):
    runs = [file.parent for file in (moved_files / "outputs" / "study").rglob("config.yaml")]
    assert len(runs) == 10
    seen = snapshot(*runs)
    run_command("study", "run", "study.yaml", "out=outputs/study")
    assert changes(seen, snapshot(*runs)) == []
    found = json.loads(run_command("study", "verdict", "study.yaml", "out=outputs/study", "--json"))
    before = expected_content("verdict.json")
    for arm in before["arms"].values():
        arm["low"] = max(arm["low"], 0.0)  # Intervals of a loss now end at 0.
    for key in ("hash", "arms", "learning_rates"):
        assert found[key] == approximately(before[key]), key
    assert found["rules"][0]["verdict"] == before["verdict"]
    assert found["would_be"] == "not comparable", "the study does not declare the key unequal"
    # The runs have the hash of the study file alone, without their settings.
    assert found["verdict"] == "exploratory"
    assert found["reasons"][1].startswith("arms differ in parameters: 2.604k in standard; 2.644k")
    assert found["rules"][0]["gap"] == approximately(before["rules"][0]["gap"])


def test_prepare_reuses_tokens_and_packing_plans_of_older_version(moved_files, run_command):
    cache = cached(moved_files)
    assert len(cache) == 9
    for name in ("run", "ranks"):
        words = command_words(moved_files / "outputs" / name)
        run_command("prepare", *(word for word in words if not word.startswith("parallel.")))
    assert changes(cache, cached(moved_files)) == []


@pytest.mark.slow
def test_run_of_older_version_is_accepted_as_weights_source(moved_files):
    new = ["run.dir=outputs/new", "resume=weights:outputs/run"]
    ForkedRun([*command_words(moved_files / "outputs" / "run")[:-1], *new], 1, moved_files).finish()


@pytest.mark.slow
def test_report_and_power_commands_accept_runs_of_older_version(moved_files, run_command):
    run_command(
        "report", "outputs/run", "outputs/ranks", "outputs/sweep", "outputs/study", "out=all"
    )
    assert len(csv_table(moved_files / "all" / "report.csv")) == 12
    assert json.loads(run_command("power", "outputs/sweep", "gap=0.02", "--json"))
