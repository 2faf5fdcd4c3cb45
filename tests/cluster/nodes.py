"""Simulated machines of a cluster: network namespaces with host names and addresses."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runs.command import overrides_of

NAMED = Path("/etc/netns")
"""Directory in which `ip netns exec` finds the /etc/hosts of a namespace."""
START = 'hostname "$0"; exec "$@"'


def lacking(*programs: str) -> str | None:
    """Return the reason why cluster tests cannot run on this machine; None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [p for p in programs if not shutil.which(p, path=f"{os.environ['PATH']}:/usr/sbin")]
    return f"needs {', '.join(missing)}" if missing else None


def node_overrides(corpus: Path, run: Path, *more: str) -> list[str]:
    """Return overrides of a training with steps of some milliseconds."""
    small = ("seq_len=128", "model.n_layers=1", "log_interval=1")
    return overrides_of(corpus, run, *small, *more)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, encoding="utf-8").stdout


@dataclass
class Node:
    """One machine; all machines share one file system."""

    name: str
    namespace: str

    def start(self, words: list[str], env: dict[str, str], output: IO[str]) -> subprocess.Popen:
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--"]
        return subprocess.Popen(
            [*inside, "sh", "-c", START, self.name, *words],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def link(self, state: str) -> None:
        """Pull the cable ("down"), or plug it in ("up")."""
        ip("-n", self.namespace, "link", "set", "eth0", state)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Create node1 and node2 with a network link; remove all traces at the end."""
    unique = Path(tempfile.mktemp(prefix="", dir="")).name
    nodes = tuple(Node(f"node{i}", f"diffllm-{unique}-{i}") for i in (1, 2))
    hosts = "127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n"
    try:
        for node in nodes:
            ip("netns", "add", node.namespace)
            (NAMED / node.namespace).mkdir(parents=True)
            (NAMED / node.namespace / "hosts").write_text(hosts, encoding="utf-8")
        one, two = nodes
        ip("-n", one.namespace, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0",
           "netns", two.namespace)  # fmt: skip
        for i, node in enumerate(nodes, 1):
            ip("-n", node.namespace, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            node.link("up")
            ip("-n", node.namespace, "link", "set", "lo", "up")
        yield one, two
    finally:
        for node in nodes:
            with contextlib.suppress(subprocess.CalledProcessError):
                node.kill()
                ip("netns", "del", node.namespace)
            (NAMED / node.namespace / "hosts").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (NAMED / node.namespace).rmdir()
        with contextlib.suppress(OSError):
            NAMED.rmdir()
