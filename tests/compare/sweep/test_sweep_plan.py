"""Plans of sweeps into directories with existing runs, without training."""

import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from runs.command import clean_environment, snapshot, tool
from runs.json_files import write_json
from runs.written import LOWER, edit_json, edit_text, study_file, write_run

from diffllm.compare.study.running import next_jobs
from diffllm.compare.sweep.cluster import ClusterLauncher, first_failed, in_queue
from diffllm.compare.sweep.command import Pace, print_outcomes
from diffllm.compare.sweep.job import Ending, Job, JobProcess, last_error
from diffllm.compare.sweep.runs import plan_sweep, split_overrides
from diffllm.compare.sweep.sweep_directory import SweepDirectory
from diffllm.config import load_config
from diffllm.config.matching import totals
from diffllm.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("workplace")
RECORD = Path("outputs/mine/sweep.json")


def planned(*words: str, model: str = "model=tiny") -> list[dict[str, Any]]:
    """Plan the sweep "mine" in the current directory, and release its lock."""
    overrides, _ = split_overrides([model, "run.sweep=mine", *words])
    directory, runs = plan_sweep(overrides, 1)
    directory.lock.release()
    return runs


def pretend(runs: list[dict[str, Any]], finished: bool = True) -> None:
    """Write the files of begun or finished runs."""
    for run in runs:
        path = Path(run["path"])
        path.mkdir()
        cfg = OmegaConf.structured(load_config(run["words"]))
        (path / "config.yaml").write_text(OmegaConf.to_yaml(cfg), encoding="utf-8")
        if finished:
            write_summary(path, heldout_loss=1.5, steps=run["steps"])


def write_summary(path: Path, **values: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "summary.json", values)


def write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def states(runs: list[dict[str, Any]]) -> dict[str, bool]:
    return {run["name"]: run["finished"] for run in runs}


def test_resumed_sweep_runs_only_new_combinations_if_values_are_added():
    pretend(planned("attention=gated,standard", "seed=0,1"))
    runs = planned("seed=0,2", "attention=standard,gated")  # Names keep the recorded order of keys.
    assert states(runs) == {
        "standard-seed0": True,
        "gated-seed0": True,
        "standard-seed2": False,
        "gated-seed2": False,
    }
    assert [run["number"] for run in runs] == [1, 2, 3, 4]


@pytest.mark.parametrize(("words", "tokens"), [([], None), (["eval.tokens=2e4"], 2e4)])
def test_new_runs_of_sweep_measure_whole_heldout_split_if_its_begun_runs_do(words, tokens):
    pretend(planned("seed=0,1", "eval.tokens=null"))
    new = [run for run in planned("seed=0,1,2", *words) if not run["finished"]]
    assert [load_config(run["words"]).eval.tokens for run in new] == [tokens]


def test_sweep_refuses_changed_steps_unless_change_is_allowed():
    pretend(planned("seed=0,1", "steps=200"))
    before = RECORD.read_bytes()
    message = (
        r"outputs/mine .*steps: 200 in the run, 300 in this command"
        r".*run\.allow_changes=\[optim\.warmup_steps,steps\]"
    )
    for values in ("0,1", "2,3"):  # The same runs, and different runs.
        with pytest.raises(ConfigError, match=message):
            planned(f"seed={values}", "steps=300")
    assert RECORD.read_bytes() == before
    planned("seed=0,1", "steps=200", "wandb.mode=disabled", "checkpoint.interval=7")
    runs = planned("seed=0,1", "steps=300", "run.allow_changes=[optim.warmup_steps,steps]")
    assert states(runs) == {"seed0": False, "seed1": False}


def test_error_about_changed_steps_names_the_changed_budget():
    pretend(planned("seed=0,1", "train.budget.flops=1e12"), finished=False)
    expected = (
        r"train\.budget\.flops: 1000000000000\.0 in the run, 2000000000000\.0 in this command.*"
        r"steps: \d+ in the run, \d+ in this command\)"
    )
    with pytest.raises(ConfigError, match=expected):
        planned("seed=0,1", "train.budget.flops=2e12")


def test_sweep_refuses_changed_plugin_code_unless_change_is_allowed():
    pretend(planned("seed=0,1"))
    write_json(Path("outputs/mine/seed1/run.json"), {"plugin_code": {"own": "1a2b"}})
    with pytest.raises(ConfigError, match=r"other plugin code \(plugins: own@1a2b in the run"):
        planned("seed=0,2")
    runs = planned("seed=1,2", "run.allow_changes=[plugins]")
    assert states(runs) == {"seed1": True, "seed2": False}


@pytest.mark.parametrize(
    ("words", "experiment"),
    [(["seed=0,1"], "quickstart"), (["seed=0,1", "optim.lr=1e-3,2e-3"], "none")],
)
def test_runs_of_sweep_over_seeds_have_defaults_of_quickstart(words, experiment):
    for run in planned(*words[1:], model=words[0]):
        assert load_config(run["words"]).resolved.choices["experiment"] == experiment


def test_resumed_sweep_raises_error_if_command_does_not_set_all_swept_keys():
    planned("seed=0,1")
    with pytest.raises(ConfigError, match="outputs/mine is a sweep over seed; set each of these"):
        planned("attention=gated,standard")


VARIANTS = "attention=standard,gated"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("first", "more", "expected"),
    [
        (["seed=0"], ["seed=0,1"], {"run": True, "seed1": False}),
        (
            [VARIANTS],
            [VARIANTS, "seed=0,1"],
            {"standard": True, "standard-seed1": False, "gated": True, "gated-seed1": False},
        ),
        (
            ["seed=0,1", "attention=gated", "optim=adamw"],
            ["seed=1,2", VARIANTS, "optim=adamw"],
            {"seed1-standard": False, "seed1": True, "seed2-standard": False, "seed2-gated": False},
        ),
    ],
)
def test_finished_runs_keep_names_if_values_are_added_to_sweep(first, more, expected):
    pretend(planned(*first))
    for _ in range(2):  # The second plan reads the record of the first plan.
        assert states(planned(*more)) == expected
    with pytest.raises(ConfigError, match=r"weight_decay: 0\.1 in the run, 0\.2 in this command"):
        planned(*more, "optim.weight_decay=0.2")
    pretend([run for run in planned(*more) if not run["finished"]])
    assert states(planned(*more)) == dict.fromkeys(expected, True)


STUDY = ["study", "run", "s.yaml", "out=outputs/mine"]
OTHER_KINDS = [
    ("run", ["train", "-m", "seed=0,1", "run.sweep=mine"], "sweep; choose another run.sweep"),
    ("run", STUDY, "study; choose another out"),
    ("sweep", ["train", "run.name=mine"], "run; choose another run.name"),
    ("sweep", ["train", "run.dir=outputs/mine"], "run; choose another run.dir"),
    ("sweep", STUDY, "study; choose another out"),
    ("study", ["train", "run.name=mine"], "run; choose another run.name"),
    ("study", ["train", "-m", "run.sweep=mine"], "sweep; choose another run.sweep"),
]


@pytest.mark.parametrize(("existing", "words", "expected"), OTHER_KINDS)
def test_command_refuses_directory_of_another_command(workplace, existing, words, expected):
    study = study_file(workplace / "s.yaml", LOWER)
    if existing == "run":
        write_run(Path("outputs/mine"))
    elif existing == "sweep":
        pretend(planned("seed=0,1"))
    else:
        directory = SweepDirectory(Path("outputs/mine"), "study")
        directory.hold()
        next_jobs(study, directory, [])
        directory.lock.release()
    before = snapshot(workplace)
    added = [] if words == STUDY else ["model=tiny"]
    result = tool([*words, *added], workplace, clean_environment(workplace / "cache"))
    assert result.code == 2, result
    assert result.err == f"error: outputs/mine is a {existing}, not a {expected}\n"
    assert snapshot(workplace) == before


def test_sweep_raises_error_if_run_exists_and_resume_is_never():
    pretend(planned("seed=0,1")[:1])
    with pytest.raises(ConfigError, match="mine/seed0 contains a run, but resume=never"):
        planned("seed=0,1", "resume=never")


def test_sweep_plans_all_runs_again_if_a_run_config_is_damaged():
    pretend(planned("seed=0,1"), finished=False)
    Path("outputs/mine/seed0/config.yaml").write_text("nonsense: [", encoding="utf-8")
    assert states(planned("seed=0,1")) == {"seed0": False, "seed1": False}


def test_second_sweep_in_same_directory_raises_error():
    overrides, _ = split_overrides(["model=tiny", "run.sweep=mine", "seed=0,1"])
    directory, _ = plan_sweep(overrides, 1)
    with pytest.raises(ConfigError, match="outputs/mine is in use by process "):
        planned("seed=0,1")
    directory.lock.release()
    planned("seed=0,1")


# Groups in wandb


def groups(*words: str) -> dict[str, str]:
    return {run["name"]: run["group"] for run in planned(*words)}


@pytest.mark.slow
def test_groups_of_sweep_contain_values_of_all_swept_keys_except_seed():
    grid = groups("attention=standard,diff_v2", "optim.lr=1e-3,3e-3", "seed=0,1")
    assert grid == {
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


def test_groups_of_sweep_over_seeds_or_models():
    assert {*groups("attention=gated", "seed=0,1").values()} == {"gated"}
    sizes = {"tiny": "diff_v2 model=tiny", "mini": "diff_v2 model=mini"}
    assert groups("run.sweep=sizes", "model=tiny,mini") == sizes


def test_recorded_run_with_invalid_config_does_not_stop_other_runs():
    groups("model.n_layers=1,2")
    edit_text(RECORD, "model.n_layers=2", "model.n_layers=-2")
    assert groups("model.n_layers=1") == {"n_layers1": "diff_v2"}
    run = RECORD.parent / "n_layers2"
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"model\.n_layers=-2"):
        groups("model.n_layers=1")


# Outcomes


def planned_job(path: Path, number: int = 1) -> Job:
    return Job(number, 2, path.name, str(path), 10, 1e9, [], False)


def test_sweep_output_contains_loss_or_error_of_each_run(workplace, capsys):
    write_summary(Path("s/done"), heldout_loss=1.5)
    write_summary(Path("s/diverged"), heldout_loss=math.nan)
    write_summary(Path("s/stopped"), steps=10, stopped="9 updates in a row were skipped")
    failure = Ending("failed", "exit status 1: OSError: no", 0.0)
    endings = {"stopped": Ending("finished"), "failed": failure}
    names = ("done", "diverged", "stopped", "failed")
    jobs = [planned_job(Path("s", name), number) for number, name in enumerate(names, 1)]
    assert print_outcomes(jobs[:3], endings, SweepDirectory(Path("s"))) == 0
    capsys.readouterr()
    assert print_outcomes(jobs, endings, SweepDirectory(Path("s"))) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "s/done      held-out loss 1.5000",
        "s/diverged  diverged: no finite held-out loss",
        "s/stopped   diverged, stopped after step 10: 9 updates in a row were skipped",
        "s/failed    FAILED, exit status 1: OSError: no",
        "            log s/failed.log",
        "1 of 4 runs did not finish, 1 failed; the same command with run.sweep=s resumes them",
    ]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", ""),
        ("error: no such corpus\nsome cleaning up\n", "no such corpus"),
        ("Traceback\n  line\nOutOfMemoryError: CUDA\nwarning\n", "OutOfMemoryError: CUDA"),
        ("[rank1]: ValueError: x\n[rank1]: more\n", "[rank1]: ValueError: x"),
        ("only words\n", "only words"),
    ],
)
def test_last_error_returns_error_line_of_job_output(output, expected):
    assert last_error(output) == expected


@pytest.mark.parametrize(("code", "state"), [(0, "stopped"), (130, "stopped"), (1, "failed")])
def test_job_without_summary_is_stopped_or_failed_by_exit_code(workplace, monkeypatch, code, state):
    fake = workplace / "python"
    write_script(fake, f"#!/bin/sh\nexit {code}\n")
    monkeypatch.setattr(sys, "executable", str(fake))
    assert JobProcess(planned_job(Path("s/seed0"))).wait().state == state


def test_eta_scales_measured_seconds_by_remaining_training_flops():
    finished, begun = planned_job(Path("s/finished")), planned_job(Path("s/begun"), 2)
    for path, step in ((finished.path, 10), (begun.path, 4)):
        checkpoint = Path(path, "checkpoints", f"step-{step:08d}")
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    write_summary(Path(finished.path), seconds=20.0, steps=10)
    pace = Pace.of_summaries([finished])
    assert (pace.seconds, pace.flops) == (20.0, 10 * finished.flops_of_step)
    other = replace(planned_job(Path("s/other")), flops_of_step=3 * finished.flops_of_step)
    seconds = 2 * 6 + 3 * 2 * 10
    assert pace.eta([begun, other]).startswith(f"2 runs left, ETA 1:{seconds - 60:02d} ")
    assert Pace().eta([other]) == ""


def test_planned_runs_contain_training_flops_of_their_variant():
    for run in planned("attention=standard,diff_v1", "global_batch_size=4", "seq_len=32"):
        flops_per_token = totals(load_config(run["words"]).model)["flops"]
        assert run["flops_of_step"] == 4 * 32 * flops_per_token


# Clusters, simulated


@pytest.mark.parametrize(
    ("words", "ranks", "named"),
    [
        (["hydra/launcher=joblib"], 1, "is not one of basic, submitit_slurm, submitit_local"),
        (
            ["hydra.launcher.partition=gpu"],
            1,
            "needs a cluster launcher; add hydra/launcher=submitit_slurm",
        ),
        (["hydra/launcher=submitit_slurm", "hydra.launcher.partitoin=gpu"], 1, "partitoin"),
        (["hydra/launcher=submitit_local"], 2, "do not use torchrun"),
    ],
)
def test_invalid_hydra_launcher_raises_error(words, ranks, named):
    with pytest.raises(ConfigError, match=named):
        ClusterLauncher.of(words, ranks, "run.sweep=mine")


def test_slurm_world_size_equals_total_number_of_tasks():
    words = ["hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=4"]
    launcher = ["hydra/launcher=submitit_slurm", *words]
    cluster = ClusterLauncher.of(launcher, 1, "run.sweep=mine")
    assert cluster
    assert cluster.world_size == 8
    assert cluster.settings["name"] == "mine"
    assert cluster.settings["submitit_folder"].startswith("outputs/mine/")


def test_train_command_prints_single_error_line_if_submitit_folder_is_invalid(workplace, error_of):
    (workplace / "file").touch()
    words = ["-m", "hydra/launcher=submitit_local", "hydra.launcher.submitit_folder=file/logs"]
    error = error_of("train", *words, "model=tiny", "seed=0", "run.sweep=mine")
    assert error.startswith(f"error: {words[-1]} cannot be used: Not a directory")
    assert [path.name for path in workplace.iterdir()] == ["file"]


def test_failed_job_reports_message_of_earliest_failed_rank():
    ended = [Ending("failed", "lost a peer", 2.0), Ending("failed", "out of memory", 1.0)]
    assert first_failed(ended).reason == "out of memory"
    assert first_failed([*ended, Ending("failed", "exit status 2", 0.0, silent=True)]) == ended[1]
    assert first_failed([Ending("finished", "", 2.0)] * 2).state == "finished"


# A fake squeue


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Return a function that puts a squeue with given stdout, stderr and exit code on PATH."""

    def install(out, err, code):
        body = f"sys.stdout.write({out!r}); sys.stderr.write({err!r}); sys.exit({code})"
        write_script(tmp_path / "squeue", f"#!{sys.executable}\nimport sys\n{body}\n")
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_in_queue_returns_answer_of_squeue_or_raises_error_if_squeue_fails(squeue, monkeypatch):
    squeue("7_0\n", "", 0)
    assert in_queue("7_0")
    squeue("", "slurm_load_jobs error: Invalid job id specified\n", 1)
    assert not in_queue("7_0")
    squeue("", "slurm_load_jobs error: Socket timed out\n", 1)
    with pytest.raises(ConfigError, match="Socket timed out"):
        in_queue("7_0")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match=r"squeue cannot be run for job 7_0: No such file.*; start"
    ):
        in_queue("7_0")


def test_sweep_refuses_additional_key_if_runs_are_in_slurm_queue(squeue):
    planned("seed=0,1")
    edit_json(RECORD, jobs={"seed0": "7_0"})
    squeue("7_0\n", "", 0)
    with pytest.raises(ConfigError, match=r"the run seed0 is in SLURM's queue.*; .* scancel 7_0"):
        planned("seed=0,1", VARIANTS)
    planned("seed=0,1,2")
    squeue("", "", 0)
    assert "seed0-gated" in states(planned("seed=0,1", VARIANTS))


@pytest.mark.parametrize(
    ("kind", "message"), [("slurm", "the jobs stay in the queue"), ("local", "stopping")]
)
def test_interrupted_sweep_prints_whether_jobs_stay_in_queue(kind, message, monkeypatch, capfd):
    ended = {"cancel": lambda: None, "done": lambda: True, "results": lambda: [Ending("stopped")]}

    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        return {"seed0": SimpleNamespace(job_id="7_0", **ended)}

    monkeypatch.setattr(ClusterLauncher, "submit", interrupted)
    jobs = [planned_job(Path("s/seed0"))]
    stopped, _ = ClusterLauncher(kind, [], {}).run(jobs, SweepDirectory(Path("s")))
    assert stopped == signal.SIGINT
    assert capfd.readouterr().err.startswith(message)
