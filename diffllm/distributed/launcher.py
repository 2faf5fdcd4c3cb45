"""Read variables of torchrun and SLURM; configure OpenMP, MKL and the memory of glibc."""

import ctypes
import functools
import os
import re
import signal
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from diffllm.core.errors import LaunchError, printable
from diffllm.core.machine import ROOT, allowed_cpus, set_if_ours, usable_cores

FIRST_PORT, PORTS = 12000, 20000
"""Range of ports derived from job ids; lower than the ports that Linux assigns to clients."""
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
SWEEP_JOB = "DIFFLLM_SWEEP_JOB"
"""Variable with the number of a run in its sweep or study."""
MKL_MODE = "MKL_CBWR"
OLDER_MODE = "AVX2,STRICT"
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
"""CPU flags in /proc/cpuinfo that MKL's AVX-512 code needs."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user chooses how OpenMP threads wait."""
SPINS = 1000
"""Iterations that a waiting OpenMP thread spins before it sleeps. `benchmarks/threads.py` compares
values: GNU's default takes the CPU time of other processes, 0 is slower on an idle machine."""


def environment(env: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Return (rank, world size, local rank) from the variables of torchrun or srun in `env`.

    Return (0, 1, 0) if `env` has no such variables. Also return (0, 1, 0) in an interactive shell
    or batch script of SLURM, because such a shell or script runs as a single process. Raises
    LaunchError if the variables are inconsistent.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        rank, size, local = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PTY_PORT" not in env:
        rank, size, local = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    else:
        return 0, 1, 0
    for one, other in ((rank, size), (size, rank)):
        if one not in env:
            raise LaunchError(
                f"{other}={env[other]} is set, but {one} is not; start with torchrun or srun, "
                f"or unset {other} to train in one process"
            )
    rank_number = whole_number(env, rank, 0)
    world_size = whole_number(env, size, 1)
    if rank_number >= world_size:
        raise LaunchError(f"{rank}={rank_number} must be below {size}={world_size}")
    local_rank = whole_number(env, local, 0) if local in env else 0
    return rank_number, world_size, local_rank


def ranks_on_first_node(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on the node of rank 0, from the variables of torchrun or srun.

    Call this on rank 0. Return 1 if no variable contains the number.
    """
    _, size, _ = environment(env)
    count = 1
    if "LOCAL_WORLD_SIZE" in env:
        count = whole_number(env, "LOCAL_WORLD_SIZE", 1)
    elif "RANK" not in env:
        # Such as "4(x2),3" for two nodes with 4 tasks and one with 3.
        first = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        count = int(first[0]) if first else 1
    return min(size, count)


def own_rank() -> int:
    try:
        return environment()[0]
    except LaunchError:
        return 0


def report_signal(text: str) -> None:
    """Write `text` to stderr on rank 0 only; signal handlers may call this at any time."""
    with suppress(OSError):
        if own_rank() == 0:
            # The terminal has printed ^C in this line.
            after_echo = "\n" if os.isatty(2) else ""
            os.write(2, f"{after_echo}{printable(text)}\n".encode(errors="replace"))


def whole_number(env: Mapping[str, str], name: str, least: int) -> int:
    text = env[name].strip()
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise LaunchError(f"{name}={env[name]!r} must be a whole number, {least} or more")
    return int(text)


def meeting_point(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the address and port of rank 0, to which all ranks connect.

    Read MASTER_ADDR and MASTER_PORT; under srun, derive missing values from SLURM variables. The
    derived port depends on job id and step id, so that two jobs do not connect to each other.

    Raises LaunchError if the address is missing, or if the port is missing or invalid.
    """
    address = env.get("MASTER_ADDR")
    port = None
    if "MASTER_PORT" in env:
        port = whole_number(env, "MASTER_PORT", 1)
        if port > 65535:
            raise LaunchError(f"MASTER_PORT={port} must be below 65536")
    if "RANK" not in env and "SLURM_STEP_NODELIST" in env:
        address = address or first_host(env["SLURM_STEP_NODELIST"])
        job = whole_number(env, "SLURM_JOB_ID", 0)
        step = whole_number(env, "SLURM_STEP_ID", 0)
        port = port or FIRST_PORT + (16 * job + step) % PORTS
    if not address or not port:
        values = {"MASTER_ADDR": address, "MASTER_PORT": port}
        missing = [name for name, value in values.items() if not value]
        raise LaunchError(
            f"the address and port of rank 0 must be set; missing: {' and '.join(missing)}; start "
            "with torchrun, which sets these variables, or unset RANK and WORLD_SIZE to train in "
            "one process"
        )
    return address, port


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: "gpu003-ib" for "gpu[003-006,9]-ib,login1"."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def in_sweep(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether `env` is the environment of a run that a sweep or study has started."""
    return SWEEP_JOB in env


def is_torchrun_worker() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and not in_sweep()


def stopped_status(number: int) -> int:
    """Return the exit code of a command after signal `number` has stopped it: 128 + `number`.

    Return 0 on ranks other than rank 0, which ends last: srun --kill-on-bad-exit kills the other
    ranks when one rank fails. Also return 0 after SIGINT in a worker of torchrun, which would print
    a traceback and could restart the run. launch/torchrun.sh exits with 130 in this case.
    """
    if own_rank() or (number == signal.SIGINT and is_torchrun_worker()):
        return 0
    return 128 + number


def end_with_torchrun() -> None:
    """Ask Linux to kill this process when torchrun exits; do nothing without torchrun.

    Otherwise this process would keep its GPU and the lock of the run directory.
    """
    if is_torchrun_worker() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_variables() -> None:
    """Set environment variables that torch and its libraries read when they are loaded.

    OMP_NUM_THREADS and GOMP_SPINCOUNT limit the CPU time of OpenMP's threads, MKL_CBWR is set to
    `strict_mode()`, and TORCH_CPP_LOG_LEVEL to "ERROR". Variables of the user are not changed.
    """
    choose_threads()
    # By default MKL selects one of two code paths for small products in each process, so a resumed
    # run would differ from an undisturbed run in the last bits.
    choose_mode(strict_mode())
    # Our messages name a missing rank; torch would add a C++ stack trace for every socket.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def choose_threads(env: MutableMapping[str, str] = os.environ, root: Path = ROOT) -> None:
    """Set the number of OpenMP threads and how they wait in `env`.

    torch alone would start one thread per physical core of this process's affinity, in each process
    of a launch, and also in a container with a smaller CPU quota. The number of threads changes
    results only by rounding, in float32; how they wait does not change results.
    """
    threads = max(1, usable_cores(root) // processes_on_cpus(env))
    set_if_ours(env, "OMP_NUM_THREADS", str(threads))
    if not any(name in env for name in WAITING):
        env["GOMP_SPINCOUNT"] = str(SPINS)


def processes_on_cpus(env: Mapping[str, str]) -> int:
    """Return how many processes of this launch share the CPUs of this process's affinity."""
    on_node = env.get("SLURM_CPUS_ON_NODE", "")
    by_torchrun = "TORCHELASTIC_RUN_ID" in env  # its workers share the CPUs of one task
    if not by_torchrun and on_node.isdigit() and len(allowed_cpus()) < int(on_node):
        return 1  # srun has bound each task to separate CPUs
    with suppress(LaunchError):  # a run raises this error later; other commands ignore ranks
        return ranks_on_first_node(env)
    return 1


def choose_mode(mode: str) -> None:
    """Set the variable MKL_CBWR, the reproducibility mode of MKL, to `mode`.

    Do nothing if the user has set MKL_CBWR, or if `mode_in_force` has been called.
    """
    if not mode_in_force.cache_info().currsize:
        set_if_ours(os.environ, MKL_MODE, mode)


def strict_mode(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return "AVX512,STRICT" if this CPU supports AVX-512, else "AVX2,STRICT".

    If the CPU does not support a mode, MKL uses the mode AUTO, whose results are not reproducible.
    """
    try:
        flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # Not Linux.
        flags = None
    cpu_flags = set(flags[1].split()) if flags else set()
    return "AVX512,STRICT" if cpu_flags >= AVX512 else OLDER_MODE


@functools.cache
def mode_in_force() -> str:
    """Return the value of MKL_CBWR at the first call, or "" if unset; MKL ignores later changes."""
    return os.environ.get(MKL_MODE, "")


def keep_mode(recorded: str) -> str:
    """Set MKL_CBWR to `recorded`, the mode that a checkpoint contains; return the mode in use.

    Ignore `recorded` if it is "", if this CPU does not support it, or if the user set MKL_CBWR.
    """
    if recorded and (strict_mode() != OLDER_MODE or not recorded.startswith("AVX512")):
        choose_mode(recorded)
    return mode_in_force()


def keep_memory() -> None:
    """Configure glibc to keep freed memory, so that the kernel need not zero new pages per step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Missing in musl and macOS.
    # Older versions of glibc accept at most 32 MiB.
    if mallopt and (mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)):
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
