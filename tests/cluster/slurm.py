"""A SLURM cluster of two nodes, with a controller and munge; its state is in one directory."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nodes import Node
from runs.command import ROOT

CONFIG = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={here}/munge.socket,cred_expire=5
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
NodeName=node[1-2] CPUs=2 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")


class Slurm:
    """Runs SLURM commands on node1."""

    def __init__(self, nodes: tuple[Node, Node], here: Path):
        self.nodes, self.here = nodes, here
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        self.env = {
            **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "SLURM_CONF": str(here / "slurm.conf"),
        }  # fmt: skip

    def start(self, number: int, *words: str, log: str = "out") -> subprocess.Popen:
        with open(self.here / log, "a", encoding="utf-8") as output:
            return self.nodes[number].start(list(words), self.env, output)

    def __call__(self, *words: str, timeout: int = 120) -> str:
        inside = ["ip", "netns", "exec", self.nodes[0].namespace]
        done = subprocess.run(
            [*inside, *words], env=self.env, cwd=ROOT, capture_output=True, encoding="utf-8",
            timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        words = self("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, f"no {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        files = sorted(self.here.glob("*.log")) + sorted(self.here.glob("*.out"))
        return "\n".join(f"{file}:\n{file.read_text(encoding='utf-8')[-4000:]}" for file in files)


@contextmanager
def slurm(nodes: tuple[Node, Node], here: Path) -> Iterator[Slurm]:
    """Start SLURM; the removal of the nodes ends its processes."""
    (here / "slurm.conf").write_text(CONFIG.format(here=here), encoding="utf-8")
    gpus = [f"NodeName=node[1-2] Name=gpu File={file}\n" for file in ("/dev/null", "/dev/zero")]
    (here / "gres.conf").write_text(
        "".join(gpus), encoding="utf-8"
    )  # Any device works: no process opens it.
    # SLURM does not use cgroups here, but requires the file.
    (here / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    (here / "state").mkdir()
    key = here / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster = Slurm(nodes, here)
    cluster.start(
        0, "munged", "--foreground", "--force", f"--socket={here}/munge.socket",
        f"--key-file={key}", f"--pid-file={here}/munged.pid", f"--log-file={here}/munged.log",
        f"--seed-file={here}/munged.seed",
    )  # fmt: skip
    cluster.wait_for((here / "munge.socket").exists, "munge")
    cluster.start(0, "slurmctld", "-D")
    for number, node in enumerate(nodes):
        cluster.start(number, "slurmd", "-D", "-N", node.name)
    idle = ["sinfo", "--noheader", "--Node", "--partition=low", "--states=idle", "--format=%N"]
    cluster.wait_for(
        lambda: subprocess.run(
            ["ip", "netns", "exec", nodes[0].namespace, *idle],
            env=cluster.env, capture_output=True, encoding="utf-8",
        ).stdout.split() == ["node1", "node2"],
        "idle nodes",
    )  # fmt: skip
    yield cluster
