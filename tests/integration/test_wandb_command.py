"""`diffllm wandb`: content of the wandb runs, repair, runs in training, and errors."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from runs.command import ROOT, changes, metrics, refusal_of, snapshot, success_of, tool, train
from runs.written import write_run
from wandb_file import OfflineRun
from wandb_server import HISTORY, StoredRun

from diffllm.config.saved import load_run_config
from diffllm.metrics.history import history
from diffllm.training.run_directory import RunDirectory


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the environment of commands without variables of wandb."""
    others = {name: value for name, value in environment.items() if not name.startswith("WANDB_")}
    return others | {"HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}


VARIABLES = {
    "WANDB_PROJECT": "its-project", "WANDB_ENTITY": "its-team", "WANDB_JOB_TYPE": "its-type",
    "DIFFLLM_WANDB_GROUP": "its row", "DIFFLLM_WANDB_TAGS": "its-sweep,its-study",
}  # fmt: skip


@pytest.mark.slow
def test_command_writes_same_offline_run_as_training(tmp_path, tiny, environment):
    """The command runs in a shell without the variables of training."""
    words = [*tiny, "wandb.mode=offline", "wandb.tags=[mine]", "run.name=a"]
    assert train(words, tmp_path, environment | VARIABLES).code == 0
    run = tmp_path / "outputs" / "a"
    training = OfflineRun(run)
    before = snapshot(run)
    done = tool(["wandb", "run=outputs/a", "mode=offline", "--json"], tmp_path, environment)
    assert done.code == 0, done.err
    assert "; `wandb sync outputs/a/wandb/offline-run-" in done.err
    for line in changes(before, snapshot(run)):
        assert line.startswith(f"{run}/wandb"), line

    content = OfflineRun(run)
    assert content.path != training.path
    assert len(list(run.glob("wandb/replaced/*"))) == 1
    for field in ("run_id", "project", "entity", "run_group", "job_type", "display_name", "tags"):
        assert getattr(content.header, field) == getattr(training.header, field), field
    assert content.header.run_group == "its row"
    assert [*content.header.tags] == ["mine", "its-sweep", "its-study"]
    configs = [recorded.config for recorded in (training, content)]
    for config in configs:
        del config["_wandb"]  # describes the process
    assert configs[0] == configs[1]
    assert content.metrics == training.metrics
    assert content.history == training.history
    assert [line["step"] for line in content.history] == [1, 2, 3, 4]
    assert wandb_summary(content) == wandb_summary(training)

    (written,) = json.loads(done.out)["runs"]
    assert written["run"] == "outputs/a"
    assert (written["id"], written["lines"]) == (content.header.run_id, 4)
    assert written["replaces"] is None
    assert (tmp_path / written["directory"]) == content.path.parent


def test_command_writes_older_run_with_current_names_of_computed_values(tmp_path, environment):
    run = shutil.copytree(ROOT / "tests/data_files/made_before/runs/run", tmp_path / "run")
    before = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["run"]
    assert tool(["wandb", "run=run", "mode=offline"], tmp_path, environment).code == 0
    config = OfflineRun(run).config
    assert config["resolved"]["choices"] == before["choices"]
    assert "choices" not in config["run"]


def wandb_summary(run: OfflineRun) -> dict[str, object]:
    return {name: value for name, value in run.summary.items() if not name.startswith("_")}


def offline(run: Path, environment: dict[str, str], *words: str) -> OfflineRun:
    """Call `diffllm wandb mode=offline`; return the new offline run."""
    success_of(tool(["wandb", f"run={run}", "mode=offline", *words], run.parent, environment))
    return OfflineRun(run)


@pytest.mark.slow
def test_command_writes_logged_steps_and_same_id_of_run_without_run_json(tmp_path, environment):
    run = write_run(tmp_path / "old", "attention=gated")
    (run / "run.json").unlink()
    first = offline(run, environment)
    assert first.history == metrics(run)
    second = offline(run, environment, "project=moved", "entity=team")
    assert second.header.run_id == first.header.run_id
    assert (second.header.project, second.header.entity) == ("moved", "team")
    assert second.history == first.history


@pytest.mark.slow
def test_command_marks_diverged_run_as_failed_and_unfinished_run_not(tmp_path, environment):
    reason = {"stopped": "too many skipped updates", "diverged": True}
    diverged = offline(write_run(tmp_path / "a", "attention=gated", summary=reason), environment)
    assert diverged.summary["stopped"] == "too many skipped updates"
    assert diverged.of_kind("exit")[0].exit_code == 1
    unfinished = offline(write_run(tmp_path / "b", "attention=gated", loss=None), environment)
    assert unfinished.of_kind("exit")[0].exit_code == 0
    assert "heldout_loss" not in unfinished.summary


def test_command_on_directory_of_runs_skips_unusable_run(tmp_path, environment):
    for name in ("a", "b", "c"):
        write_run(tmp_path / "s" / name, "attention=gated")
    (tmp_path / "s" / "b" / "metrics.jsonl").unlink()
    words = ["wandb", "s", "mode=offline", "--json"]
    done = tool(words, tmp_path, environment)
    assert done.code == 1
    content = json.loads(done.out)
    assert [written["run"] for written in content["runs"]] == ["s/a", "s/c"]
    assert [*content["skipped"]] == ["s/b"]
    assert "warning: s/b is skipped: s/b has no metrics" in done.err


@pytest.mark.slow
def test_command_in_directory_of_sweep_or_run_uses_its_name(tmp_path, environment):
    sweep = tmp_path / "s"
    for name in ("standard", "gated"):
        write_run(sweep / name, f"attention={name}")
    for place, word, tags in ((sweep, "sweep=.", ["s"]), (sweep / "gated", "run=.", [])):
        success_of(tool(["wandb", word, "mode=offline"], place, environment))
        header = OfflineRun(place).header
        assert (header.display_name, [*header.tags]) == (place.name, tags)


REFUSED = [
    (["run=none"], {}, "none: no such directory"),
    ([], {}, "no run directory is given"),
    (["run=foreign"], {}, "is not a run directory and contains none"),
    (["run=empty"], {}, "empty has no metrics: .* train the run first"),
    (["run=a", "mode=disabled"], {}, "mode=disabled must be auto, online or offline"),
    (["run=a"], {"WANDB_MODE": "disabled"}, "WANDB_MODE=disabled writes no run; set mode=online"),
    (["run=a", "project=a/b"], {}, "project=a/b must have 1 to 128 characters"),
    (["run=a", "mode=online"], {}, "No API key .*; run `wandb login`, .* or set mode=offline"),
]


@pytest.mark.parametrize(("words", "variables", "message"), REFUSED)
def test_command_refuses_bad_input_without_writes(tmp_path, environment, words, variables, message):
    for name in ("a", "empty"):
        write_run(tmp_path / name, "attention=gated")
    (tmp_path / "empty" / "metrics.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "foreign").mkdir()
    done = tool(["wandb", *words], tmp_path, environment | variables)
    line = refusal_of(done)
    assert re.search(message, line), line
    assert not list(tmp_path.glob("*/wandb/*run-*"))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("mode", ["online", "shared", "offline", "disabled"])
def test_command_on_run_in_training_depends_on_wandb_mode_of_run(tmp_path, environment, mode):
    facts = {"wandb_id": "x", "environment": {"variables": {"WANDB_MODE": mode}}}
    run = write_run(tmp_path / "a", "attention=gated", facts=facts)
    log = tmp_path / "a" / "wandb" / "offline-run-20260101_000000-x"
    log.mkdir(parents=True)
    directory = RunDirectory(run, load_run_config(run))
    done = tool(["wandb", "run=a", "mode=offline", "--json"], tmp_path, environment)
    directory.lock.release()
    if mode in ("online", "shared"):
        assert "a is in training and logs online; wait until it ends" in refusal_of(done)
        return
    (written,) = json.loads(done.out)["runs"]
    # An offline run in training writes its own files, and must keep its id for `wandb sync`.
    assert (written["id"] == "x") == (mode == "disabled")
    assert written["replaces"] is None
    assert log.exists() == (mode == "offline")
    assert written["lines"] == len(metrics(run))


def history_steps(stored: StoredRun) -> list[int]:
    return [line["_step"] for line in stored.history]


@pytest.mark.slow
def test_online_command_repairs_runs_and_gaps_with_new_runs(tmp_path, environment, wandb_server):
    sweep = tmp_path / "s"
    for name in ("standard", "gated"):
        write_run(sweep / name, f"attention={name}", facts={"wandb_id": name})
    words = ["wandb", "sweep=s", "mode=online", "--json"]
    variables = environment | wandb_server.variables(tmp_path)
    success_of(tool(words, tmp_path, variables))
    gaps = (sweep / ".wandb-id").read_text(encoding="utf-8").strip()
    assert {*wandb_server.runs} == {"standard", "gated", gaps}
    assert wandb_server.runs["gated"].facts["groupName"] == "gated"
    expected = [line["step"] for line in history(sweep / "gated", 10**6)]
    assert history_steps(wandb_server.runs["gated"]) == expected
    assert wandb_server.runs["gated"].summary["heldout_loss"] == 4.0

    lines = wandb_server.runs["gated"].files[HISTORY]
    wandb_server.runs["gated"].files[HISTORY] = damaged = [lines[0], lines[0], lines[2]]
    second = success_of(tool(words, tmp_path, variables))
    content = json.loads(second.out)
    for written in content["runs"] + content["gaps"]:
        former = gaps if written["run"] == "s" else Path(written["run"]).name
        assert written["replaces"] == former
        assert f"; delete the former run {former} in wandb" in second.err
        assert history_steps(wandb_server.runs[written["id"]]) in (expected, [0])
        assert written["url"].endswith(written["id"])
    assert wandb_server.runs["gated"].files[HISTORY] == damaged
    third = json.loads(tool([*words[:1], "run=s/gated", *words[2:]], tmp_path, variables).out)
    newest = {Path(written["run"]).name: written["id"] for written in content["runs"]}
    assert [written["replaces"] for written in third["runs"]] == [newest["gated"]]
    (gaps_run,) = content["gaps"]
    assert (sweep / ".wandb-id").read_text(encoding="utf-8").strip() == gaps_run["id"]
    # `wandb sync` would append to the run on the wandb_server, so an offline run has a new id.
    assert offline(sweep / "gated", variables).header.run_id not in wandb_server.runs


REFUSALS = [
    ("RunResumeStatus", 401, "user is not logged in", "run `wandb login`, or set WANDB_API_KEY"),
    ("UpsertBucket", 200, "permission denied", "check the project and the entity"),
    ("UpsertBucket", 404, "run p/x was previously created and deleted", "choose another project"),
    ("UpsertBucket", 404, "entity nobody not found", "check the project and the entity"),
    ("file_stream", 403, "no", "check the project and the entity"),
    (None, 0, "", "check the network and WANDB_BASE_URL"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "status", "message", "advice"), REFUSALS)
def test_command_with_refusing_server_fails_with_advice(
    tmp_path, environment, wandb_server, operation, status, message, advice
):
    variables = environment | wandb_server.variables(tmp_path) | {"WANDB_INIT_TIMEOUT": "3"}
    if operation:
        wandb_server.refusals[operation] = (status, message)
    else:
        wandb_server.close()
    run = write_run(tmp_path / "a", "attention=gated", facts={"wandb_id": "x"})
    offline_run = run / "wandb" / "offline-run-20260101_000000-x"
    offline_run.mkdir(parents=True)
    line = refusal_of(tool(["wandb", "run=a", "mode=online"], tmp_path, variables))
    assert line.startswith("error: wandb cannot store the run a: ")
    assert message in line
    assert line.endswith(f"; {advice}, or set mode=offline")
    assert offline_run.exists(), "`wandb sync` must still find the offline run"
    if operation == "file_stream":
        return
    assert not list(run.glob("wandb/run-*")), "a later start would take the run for an online run"
