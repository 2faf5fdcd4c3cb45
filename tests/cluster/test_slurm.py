"""launch/slurm.sbatch and srun on a real SLURM of two nodes."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from nodes import lacking, node_overrides, two_nodes
from runs.command import steps_logged
from runs.json_files import read_json
from slurm import PROGRAMS, Slurm, slurm

from diffllm.distributed.launcher import first_host

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
TWO = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := lacking("ip", "unshare", "hostname", *PROGRAMS):
        pytest.skip(reason)
    with two_nodes() as nodes, slurm(nodes, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(cluster: Slurm, *words: str) -> str:
    output = f"--output={cluster.here}/%j.out"
    return cluster("sbatch", "--parsable", output, *words).strip()


def job_ended(cluster: Slurm, job: str) -> bool:
    return cluster.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def tasks(cluster: Slurm) -> list[int]:
    """Return the process ids of the job's ranks, without their data loader processes."""
    pids = {pid for node in cluster.nodes for pid in node.pids()}
    words = {pid: status_of(pid, "cmdline").split(b"\0") for pid in pids}
    # srun replaces the program name with its absolute path.
    trainings = {pid for pid in pids if words[pid][1:4] == [b"-m", b"diffllm", b"train"]}
    return [pid for pid in trainings if int(field(pid, "PPid")) not in trainings]


def status_of(pid: int, name: str) -> bytes:
    """Read a file in /proc; return b"" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def field(pid: int, name: str) -> str:
    lines = status_of(pid, "status").decode().splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")


def has_got(pid: int, number: int) -> bool:
    """Whether the signal is pending for a stopped process, or the process is running.

    SLURM may send SIGCONT.
    """
    pending = int(field(pid, "SigPnd"), 16) | int(field(pid, "ShdPnd"), 16)
    return bool(pending >> (number - 1) & 1) or field(pid, "State") != "T"


@pytest.mark.parametrize("how", ["preempted", "out of time"])
def test_stopped_slurm_job_resumes_from_checkpoint_after_requeue(
    cluster, cluster_corpus, tmp_path, how
):
    run = tmp_path / "run"
    last = 60
    words = node_overrides(cluster_corpus, run, f"steps={last}", "global_batch_size=64")
    job = submit(cluster, *TWO, "launch/slurm.sbatch", *words)
    cluster.wait_for(lambda: len(steps_logged(run)) > 5, "training")
    assert read_json(run / "run.json")["ranks"] == 2
    ranks = tasks(cluster)
    assert len(ranks) == 2, cluster.logs()
    number = signal.SIGTERM if how == "preempted" else signal.SIGUSR1
    try:
        for pid in ranks:  # Pause the run, which could finish before the signal arrives.
            os.kill(pid, signal.SIGSTOP)
        if how == "preempted":
            high = submit(cluster, *TWO, "--partition=high", "--wrap=sleep 1")
        else:
            cluster("scontrol", "update", f"JobId={job}", "TimeLimit=5")
        cluster.wait_for(lambda: all(has_got(pid, number) for pid in ranks), "signal")
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    cluster.wait_for((run / "requeue").exists, "marker")
    marker = read_json(run / "requeue")
    assert marker["signal"] == number.name
    assert 5 < marker["step"] < last
    cluster.wait_for(lambda: cluster.job(job).get("Restarts") == "1", "requeue")
    if how == "preempted":
        cluster.wait_for(lambda: cluster.job(high)["JobState"] == "COMPLETED", "end of the other")
    else:
        cluster("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    cluster.wait_for(lambda: job_ended(cluster, job), "end")
    assert cluster.job(job)["JobState"] == "COMPLETED", cluster.logs()
    assert cluster.job(job)["Restarts"] == "1"
    assert steps_logged(run) == list(range(1, last + 1))
    assert not (run / "requeue").exists()
    log = (cluster.here / f"{job}.out").read_text(encoding="utf-8")  # Output of both starts.
    assert f"resumes from step {marker['step']}" in log


def test_cancelled_slurm_job_is_not_requeued(cluster, cluster_corpus, tmp_path):
    """The tasks save and write the file `requeue`: the sender of SIGTERM is unknown to tasks."""
    run = tmp_path / "run"
    words = node_overrides(cluster_corpus, run, "steps=100000")
    job = submit(cluster, *TWO, "launch/slurm.sbatch", *words)
    cluster.wait_for(lambda: len(steps_logged(run)) > 5, "training")
    cluster("scancel", job)
    cluster.wait_for(lambda: job_ended(cluster, job), "end")
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert cluster.job(job)["Restarts"] == "0"
    assert (run / "requeue").exists()
    cluster.wait_for(lambda: not cluster("squeue", "--noheader").split(), "empty queue")


def test_failed_slurm_job_is_not_requeued(cluster, cluster_corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "requeue").write_text("{}", encoding="utf-8")  # As left by an earlier stop.
    words = node_overrides(cluster_corpus, run, "steps=5", "global_batch_size=7")
    job = submit(cluster, *TWO, "launch/slurm.sbatch", *words)
    cluster.wait_for(lambda: job_ended(cluster, job), "end")
    assert cluster.job(job)["JobState"] == "FAILED"
    assert cluster.job(job)["Restarts"] == "0"
    log = (cluster.here / f"{job}.out").read_text(encoding="utf-8")
    assert "error: global_batch_size=7" in log
    assert "Traceback" not in log


def test_two_srun_tasks_join_same_training_run(cluster, cluster_corpus, tmp_path):
    """Two tasks on two nodes, and two tasks on one node."""
    runs = [tmp_path / name for name in ("apart", "together")]
    apart = ["srun", "--nodes=2", "--ntasks-per-node=1"]
    cluster(*apart, "python", "train.py", *node_overrides(cluster_corpus, runs[0], "steps=8"))
    together = ["srun", "--nodes=1", "--ntasks=2"]
    cluster(*together, "python", "train.py", *node_overrides(cluster_corpus, runs[1], "steps=8"))
    ranks = [read_json(run / "run.json")["ranks"] for run in runs]
    assert ranks == [2, 2]
    assert steps_logged(runs[0]) == steps_logged(runs[1]) == list(range(1, 9))


@pytest.mark.parametrize(
    "nodes",
    ["gpu1", "gpu[003-006,9]", "gpu[7,9-12],login1", "a-b[05],c", "rack[0-1]node[10-12]"],
)
def test_first_host_returns_first_node_of_slurm_node_list(cluster, nodes):
    assert first_host(nodes) == cluster("scontrol", "show", "hostnames", nodes).split()[0]
