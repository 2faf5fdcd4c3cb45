"""CPUs that this process may use (affinity, cores, cgroup quotas), and its variables."""

import math
import os
from collections.abc import Collection, MutableMapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of logical CPUs that affinity and quota allow, at least 1."""
    return within_quota(len(allowed_cpus()), root)


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores that affinity and quota allow, at least 1.

    Two hyperthreads of a core share its arithmetic units, so torch starts one thread per core. If
    the machine does not describe its cores, count logical CPUs.
    """
    cores = set()
    for cpu in allowed_cpus():
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text(encoding="utf-8").strip())
        except OSError:
            return usable_cpus(root)
    return within_quota(len(cores), root)


def allowed_cpus() -> Collection[int]:
    """Return the indices of the logical CPUs in this process's affinity, or of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    # macOS has no affinity.
    return range(os.cpu_count() or 1)


def within_quota(count: int, root: Path) -> int:
    """Return `count`, reduced to the CPUs of the quota; at least 1.

    Round the quota up: with a quota of 1.5 cores, two threads that sleep when they wait are faster
    than one (`benchmarks/threads.py --only quota`).
    """
    quota = cpu_quota(root)
    if quota is not None:
        count = min(count, math.ceil(quota))
    return max(1, count)


def control_groups(controller: str, root: Path = ROOT) -> list[Path]:
    """Return the directories of this process's cgroup and of the groups that contain this group.

    `controller` is a name of cgroups v1, such as "cpu". Directories of both versions are listed,
    and some may not exist: in a container, /proc names the groups as the host sees them. The list
    is empty on other systems than Linux.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    directories = []
    for line in lines:
        # "4:cpu,cpuacct:/a/b" in version 1; "0::/a/b" in version 2, which has no controller names.
        _, controllers, group = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            mount = mount / controller
        path = PurePosixPath(group)
        for part in (path, *path.parents):
            directories.append(mount / str(part).lstrip("/"))
    return directories


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU seconds per second that cgroups grant this process; None without a limit.

    `docker run --cpus=2` and a CPU limit of Kubernetes are such quotas.
    """
    quotas = []
    for directory in control_groups("cpu", root):
        # The group may be missing, or contain "max" instead of a number.
        with suppress(OSError, ValueError):
            quotas.append(quota_of(directory))
    # Each group limits all groups inside it, so the smallest quota counts.
    return min((quota for quota in quotas if quota > 0), default=None)


def quota_of(directory: Path) -> float:
    """Return the quota of a control group, negative without a limit (version 1)."""
    quota_file = directory / "cpu.max"  # version 2
    if quota_file.exists():
        quota, period = quota_file.read_text(encoding="utf-8").split()
    else:
        quota = (directory / "cpu.cfs_quota_us").read_text(encoding="utf-8")
        period = (directory / "cpu.cfs_period_us").read_text(encoding="utf-8")
    return int(quota) / int(period)


def set_if_ours(env: MutableMapping[str, str], name: str, value: str) -> None:
    """Set an environment variable unless the user has set it.

    A second variable, with the prefix DIFFLLM_, has the same value if the first one is ours. A job
    of a cluster inherits the variables of the process that submitted the job.
    """
    mark = f"DIFFLLM_{name}"
    if env.get(name) in (None, env.get(mark)):
        env[name] = env[mark] = value
