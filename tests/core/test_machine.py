"""Usable CPUs under affinity, hyperthreads and cgroup quotas, read from files as Linux has them."""

import pytest

from diffllm.core import machine
from diffllm.core.machine import cpu_quota, usable_cores, usable_cpus

V1 = "9:memory:/box\n1:cpu,cpuacct:/box/job\n0::/\n"
V2 = "0::/box/job\n"


def write_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def version_1(directory, quota, period=100_000):
    place = f"sys/fs/cgroup/cpu{directory}"
    return {f"{place}/cpu.cfs_quota_us": f"{quota}\n", f"{place}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/box/job/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/box/job/cpu.max": "150000 100000\n"}, 1.5),
        # The parent's quota holds for all its groups.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/box/cpu.max": "50000 100000\n",
          "sys/fs/cgroup/box/job/cpu.max": "400000 100000\n"}, 0.5),
        # A container mounts its group as the root, while /proc names the group as on the host.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        ({"proc/self/cgroup": V1, **version_1("/box/job", 250_000)}, 2.5),
        ({"proc/self/cgroup": V1, **version_1("/box/job", -1), **version_1("", 20_000, 10_000)}, 2),
        ({"proc/self/cgroup": V1, **version_1("/box/job", -1)}, None),
    ],
)  # fmt: skip
def test_cpu_quota_is_smallest_quota_of_all_groups_of_process(tmp_path, files, expected):
    assert cpu_quota(write_files(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("quota", "cores", "cpus"), [("max", 2, 4), (30_000, 1, 1), (110_000, 2, 2), (300_000, 2, 3)]
)
def test_hyperthreads_share_cores_and_quota_limits_both(tmp_path, monkeypatch, quota, cores, cpus):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: {0, 1, 4, 5})
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}
    place = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = {place.format(cpu): f"{text}\n" for cpu, text in siblings.items()}
    files |= {"proc/self/cgroup": V2, "sys/fs/cgroup/box/job/cpu.max": f"{quota} 100000\n"}
    root = write_files(tmp_path, files)
    assert usable_cores(root) == cores
    assert usable_cpus(root) == cpus


def test_cores_are_logical_cpus_if_machine_does_not_describe_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: {0, 1, 2})
    assert usable_cores(tmp_path) == usable_cpus(tmp_path) == 3
