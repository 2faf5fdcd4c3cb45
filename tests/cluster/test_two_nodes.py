"""launch/torchrun.sh on two nodes with different names and addresses, and loss of a node."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nodes import Node, lacking, node_overrides, two_nodes
from runs.command import ROOT, descendants, metrics
from runs.json_files import read_json

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TOLERANCE = 2e-4
"""Maximum difference of float32 losses: the order of sums differs, and differences grow."""


@pytest.fixture
def nodes():
    if reason := lacking("ip", "unshare", "hostname"):
        pytest.skip(reason)
    with two_nodes() as both:
        yield both


class Cluster:
    def __init__(self, nodes: tuple[Node, Node], host: int, run: Path, overrides: list[str]):
        self.nodes, self.host, self.run, self.overrides = nodes, host, run, overrides
        self.agents: dict[int, subprocess.Popen] = {}

    def start(self, number: int, nnodes: str = "2", restarts: int = 0, ranks: int = 1) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {
            **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "NNODES": nnodes, "NPROC_PER_NODE": str(ranks), "MAX_RESTARTS": str(restarts),
            "RDZV_ENDPOINT": f"{self.nodes[self.host].name}:29400",
        }  # fmt: skip
        words = [str(ROOT / "launch" / "torchrun.sh"), *self.overrides]
        with open(self.log(number), "a", encoding="utf-8") as log:
            os.chdir(ROOT)
            self.agents[number] = self.nodes[number].start(words, env, log)

    def log(self, number: int) -> Path:
        return self.run.with_name(f"node{number + 1}.log")

    def logs(self) -> str:
        return "\n".join(
            f"{self.log(i)}:\n{self.log(i).read_text(encoding='utf-8')[-6000:]}" for i in (0, 1)
        )

    def finish(self) -> None:
        for agent in self.agents.values():
            assert agent.wait(timeout=300) == 0, self.logs()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < deadline, f"no {what}\n{self.logs()}"
            alive = [i for i, agent in self.agents.items() if agent.poll() is None]
            assert self.host in alive, f"ended before {what}\n{self.logs()}"
            time.sleep(0.05)

    def losses(self) -> dict[int, float]:
        return losses(self.run)

    def ranks(self) -> int:
        return read_json(self.run / "run.json")["ranks"]

    def steps(self) -> int:
        return max(self.losses(), default=0)

    def grown(self, ranks: int, steps: int) -> bool:
        file = self.run / "run.json"
        return file.exists() and self.ranks() == ranks and self.steps() >= steps


def losses(run: Path) -> dict[int, float]:
    """Return the losses by step; assert that no step is logged twice."""
    logged = metrics(run)
    steps = [line["step"] for line in logged]
    assert len(set(steps)) == len(steps), steps
    return {line["step"]: line["train/loss"] for line in logged if "train/loss" in line}


def losses_on_one_machine(words: list[str], run: Path, ranks: int) -> dict[int, float]:
    """Return the losses of the same training on one machine."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={ranks}"]  # fmt: skip
    done = subprocess.run(
        [*launcher, ROOT / "train.py", *words, f"run.dir={run}"],
        env=env, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(run)


def test_losses_on_two_nodes_match_losses_on_single_node(nodes, cluster_corpus, tmp_path):
    words = node_overrides(cluster_corpus, tmp_path / "run", "precision=fp32", "steps=12")
    cluster = Cluster(nodes, 0, tmp_path / "run", words)
    cluster.start(1)
    cluster.start(0)
    cluster.finish()
    assert cluster.ranks() == 2
    assert cluster.losses() == losses_on_one_machine(words, tmp_path / "alone", ranks=2)


LONG = [
    "precision=fp32",
    "steps=240",
    "optim.lr=1e-3",  # With a larger rate, rounding differences grow over 240 steps.
    "global_batch_size=32",
    "checkpoint.interval=5",
    "distributed.timeout=20",
]


@pytest.mark.parametrize(
    ("host", "cut"),
    [
        pytest.param(0, False, id="agent of rank 1 killed"),
        pytest.param(1, True, id="node of rank 0 lost"),
    ],
)
def test_elastic_run_continues_after_failure_and_restart_of_node(
    nodes, cluster_corpus, tmp_path, host, cut
):
    """Ranks are ordered by node name; the lost node does not host the rendezvous."""
    words = node_overrides(cluster_corpus, tmp_path / "run", *LONG)
    cluster = Cluster(nodes, host, tmp_path / "run", words)
    lost = 1 - host
    for number in (0, 1):
        cluster.start(number, nnodes="1:2", restarts=3)
    cluster.wait_for(lambda: cluster.grown(2, 12), "step 12 on both nodes")

    if cut:
        nodes[lost].link("down")  # The kernel cannot send a TCP reset either.
        nodes[lost].kill()
    else:
        torchrun = [p for p in descendants(cluster.agents[lost].pid) if is_torchrun(p)]
        os.kill(torchrun[0], 9)
    cluster.agents.pop(lost).wait(timeout=60)
    cluster.wait_for(lambda: not nodes[lost].pids(), "end of the agent's workers")
    cluster.wait_for(lambda: cluster.ranks() == 1, "start on one node")
    shrunk = cluster.steps()
    cluster.wait_for(lambda: cluster.grown(1, shrunk + 5), "training on one node")

    if cut:
        nodes[lost].link("up")
    cluster.start(lost, nnodes="1:2", restarts=3)
    cluster.wait_for(lambda: cluster.ranks() == 2, "start on both nodes")
    assert cluster.steps() < 240, "the run finished before it could grow"
    cluster.finish()
    assert cluster.ranks() == 2
    assert list(cluster.losses()) == list(range(1, 241))
    expected = losses_on_one_machine(words, tmp_path / "alone", ranks=1)
    assert cluster.losses() == pytest.approx(expected, abs=TOLERANCE)


def is_torchrun(pid: int) -> bool:
    return any(
        word.endswith(b"torchrun")
        for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    )
