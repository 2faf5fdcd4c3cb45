"""Rank, world size and address from the variables of torchrun or SLURM; connection of ranks."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from processes import PATIENCE_S, wait_until

from diffllm.core import machine
from diffllm.core.errors import AgreedError, ConfigError, LaunchError
from diffllm.distributed import launcher
from diffllm.distributed.launcher import (
    choose_threads,
    environment,
    first_host,
    keep_mode,
    meeting_point,
    ranks_on_first_node,
    set_variables,
    strict_mode,
)
from diffllm.distributed.stop import StoppedEarly, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.world import DistributedConfig, World, agree_on_name, join

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
    "MASTER_ADDR": "here", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
SALLOC = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a[1-2]"}
SBATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = SALLOC | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a[1-2]",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}  # fmt: skip
SUBMITIT = SRUN | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (5, 8, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0)),
        (SALLOC, (0, 1, 0)),
        (SBATCH, (0, 1, 0)),
        (SRUN, (3, 4, 1)),
        (SRUN | {"SLURM_NTASKS": "9"}, (3, 4, 1)),  # The step has fewer tasks than the job.
        (SRUN | {"SLURM_PTY_PORT": "4000", "SLURM_PROCID": "0"}, (0, 1, 0)),  # srun --pty bash
        (SRUN | TORCHRUN, (5, 8, 1)),  # torchrun in a step, or a task of submitit.
        ({"LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, (0, 1, 0)),
    ],
)
def test_environment_returns_expected_rank_and_world_size(env, expected):
    assert environment(env) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 1),
        (TORCHRUN, 1),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 4),
        (SBATCH | {"SLURM_STEP_TASKS_PER_NODE": "2"}, 1),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, 3),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, 2),
        (SRUN | TORCHRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, 1),
    ],
)
def test_ranks_on_first_node_reads_variables_of_torchrun_and_srun(env, expected):
    assert ranks_on_first_node(env) == expected


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK is not"]),
        ({"RANK": "", "WORLD_SIZE": "2"}, ["RANK=''", "whole number"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE='0'", "1 or more"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "below WORLD_SIZE=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1.5"}, ["LOCAL_RANK='1.5'"]),
        (SRUN | {"SLURM_PROCID": "4"}, ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"]),
    ],
)
def test_environment_refuses_inconsistent_launcher_variables(env, named):
    with pytest.raises(LaunchError) as error:
        environment(env)
    assert all(part in str(error.value) for part in named)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, ("here", 29500)),
        (SRUN, ("a1", 12000 + 16 * 77)),
        (SRUN | {"MASTER_ADDR": "ib0"}, ("ib0", 12000 + 16 * 77)),
        (SRUN | {"MASTER_PORT": "5"}, ("a1", 5)),
        (SRUN | TORCHRUN, ("here", 29500)),
        (SRUN | {"SLURM_JOB_ID": "4123456789"}, ("a1", 12000 + 4123456789 * 16 % 20000)),
    ],
)
def test_meeting_point_returns_address_and_port_of_rank_0(env, expected):
    assert meeting_point(env) == expected
    assert 0 < meeting_point(env)[1] < 32768


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"MASTER_ADDR": None}, "missing: MASTER_ADDR; start"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "65536"}, "below 65536"),
    ],
)
def test_meeting_point_raises_error_if_address_or_port_is_invalid(change, named):
    env = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(LaunchError, match=named):
        meeting_point(env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-006,9]", "gpu003"),
        ("gpu[7,9-12],login1", "gpu7"),
        ("gpu[01-02]-ib,x", "gpu01-ib"),
        ("rack[0-1]node[10-12]", "rack0node10"),
    ],
)
def test_first_host_returns_first_name_of_slurm_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.fixture
def store_server():
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Threads of a closed watch may still use the store: the server must not end before them.
    wait_until(lambda: all(thread.name != "watch" for thread in threading.enumerate()), "watches")


def stores(port_of: dist.TCPStore, count: int) -> list[dist.TCPStore]:
    patience = timedelta(seconds=PATIENCE_S)
    return [dist.TCPStore("127.0.0.1", port_of.port, timeout=patience) for _ in range(count)]


def two_worlds(server: dist.TCPStore) -> list[World]:
    return [World(r, 2, r, dist.PrefixStore("m", s)) for r, s in enumerate(stores(server, 2))]


def test_each_launch_uses_a_new_store_prefix_on_all_ranks(store_server):
    """3, 2, 3 and 3 ranks agree in turn through the same store; high ranks arrive first."""
    store_server.set("arrived/2", "a rank that died before rank 0 answered")
    names = []
    with ThreadPoolExecutor(3) as pool:
        for size in (3, 2, 3, 3):
            ranks = [
                pool.submit(agree_on_name, store, rank, size, PATIENCE_S)
                for rank, store in reversed(list(enumerate(stores(store_server, size))))
            ]
            met = {rank.result() for rank in ranks}
            assert len(met) == 1
            names += met
    assert len(set(names)) == 4


def test_rank_0_waits_until_other_ranks_have_read_an_error():
    """The store ends with rank 0. The other rank reads the error only after rank 0 waits."""
    waits = threading.Event()

    class Store(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            if keys == ["what/read/1"]:
                waits.set()
            super().wait(keys, timeout)

    store = Store()

    def choose() -> None:
        raise ConfigError("no such corpus")

    def late() -> None:
        assert waits.wait(PATIENCE_S), "rank 0 does not wait"
        World(1, 2, 1, store).broadcast_from_rank0("what", choose)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(late)
        with pytest.raises(ConfigError, match="no such corpus"):
            World(0, 2, 0, store).broadcast_from_rank0("what", choose)
        assert store.check(["what/read/1"])
        with pytest.raises(AgreedError, match="no such corpus"):
            other.result()


class NoSignal:
    """A stop request without a signal."""

    def has_come(self) -> bool:
        return False


@pytest.mark.parametrize("first", [0, 1])
def test_stop_signal_to_one_rank_stops_all_ranks_before_training(store_server, first):
    """Rank 0, whose process hosts the store, waits until late ranks have closed."""
    worlds = two_worlds(store_server)
    early = Watch(worlds[first], 600, NoSignal())
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(early.blame, StoppedEarly(signal.SIGTERM))
        assert early.closed.wait(PATIENCE_S)
        late = Watch(worlds[1 - first], 600, NoSignal())
        with pytest.raises(StoppedEarly) as stop:
            worlds[1 - first].wait(["what/the/early/one/would/have/written"])
        assert stop.value.args == (signal.SIGTERM,)
        if first:
            leaving.result(PATIENCE_S)
        else:
            assert not leaving.done(), "the store would end with rank 0"
        late.blame(stop.value)
        leaving.result(PATIENCE_S)


def test_communication_failure_after_stop_signal_raises_stopped_early(store_server):
    worlds = two_worlds(store_server)
    watch = Watch(worlds[0], 600, NoSignal())
    worlds[1].stop(signal.SIGUSR1)
    with pytest.raises(StoppedEarly) as stop:
        watch.blame(RuntimeError("[gloo] Connection closed by peer"))
    assert stop.value.args == (signal.SIGUSR1,)
    watch.words = "any text: `close` must not wait for the second rank, which never starts"
    watch.close()


@pytest.fixture
def stop_request():
    request = StopRequest()
    yield request
    request.close()


def test_sigint_after_stop_signal_raises_keyboard_interrupt(stop_request, capfd):
    with pytest.raises(StoppedEarly):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert stop_request.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "stopped immediately; this process has trained no step\n"


def test_first_signal_to_deferred_stop_request_is_only_received(stop_request, capfd):
    stop_request.report_saved(lambda: "step 4 is saved")
    stop_request.defer()
    signal.raise_signal(signal.SIGTERM)
    assert stop_request.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "stopped immediately; step 4 is saved\n"


def test_launch_error_lists_ranks_that_did_not_connect(store_server):
    store_server.set("arrived/2", "from an earlier start")
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(agree_on_name, *stores(store_server, 1), 1, 4, PATIENCE_S)
        wait_until(lambda: store_server.check(["arrived/1"]), "rank 1")
        with pytest.raises(LaunchError, match="timeout=1 seconds; missing ranks: 2, 3"):
            agree_on_name(store_server, 0, 4, 1)
        one.result()


def test_connection_to_missing_rank_0_fails_after_timeout(monkeypatch):
    with socket.socket() as listener:  # Bind the port, so that no other program answers.
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        env = TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError) as error:
            join(DistributedConfig(timeout=1))
    assert f"127.0.0.1:{port} within distributed.timeout=1 seconds" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("sse avx avx2 avx512f avx512dq avx512cd avx512bw avx512vl", "AVX512,STRICT"),
        ("sse avx avx2 avx512f avx512cd", "AVX2,STRICT"),
        ("sse avx avx2", "AVX2,STRICT"),
        (None, "AVX2,STRICT"),
    ],
)
def test_mkl_mode_uses_avx512_only_if_cpu_has_all_required_flags(tmp_path, flags, expected):
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        text = f"processor\t: 0\nflags\t\t: {flags}\nvmx flags\t: ept\n"
        cpuinfo.write_text(text, encoding="utf-8")
    assert strict_mode(cpuinfo) == expected


@pytest.mark.parametrize(
    ("by_user", "cpu", "recorded", "expected"),
    [
        (None, "AVX512,STRICT", "AVX2,STRICT", "AVX2,STRICT"),
        (None, "AVX512,STRICT", "", "AVX512,STRICT"),
        (None, "AVX2,STRICT", "AVX512,STRICT", "AVX2,STRICT"),
        ("AVX512,STRICT", "AVX512,STRICT", "AVX2,STRICT", "AVX512,STRICT"),
        ("COMPATIBLE", "AVX512,STRICT", "AVX2,STRICT", "COMPATIBLE"),
    ],
)
def test_resume_keeps_mkl_mode_unless_user_sets_mode(monkeypatch, by_user, cpu, recorded, expected):
    monkeypatch.setattr(launcher, "strict_mode", lambda: cpu)
    monkeypatch.delenv("DIFFLLM_MKL_CBWR", raising=False)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if by_user:
        monkeypatch.setenv("MKL_CBWR", by_user)
    launcher.mode_in_force.cache_clear()
    set_variables()
    assert keep_mode(recorded) == os.environ["MKL_CBWR"] == expected
    assert keep_mode("SSE4_2") == expected, "MKL has already read the variable"
    assert os.environ["MKL_CBWR"] == expected
    launcher.mode_in_force.cache_clear()


@pytest.mark.parametrize(
    ("env", "affinity", "expected"),
    [
        ({}, 8, "8"),
        ({"OMP_NUM_THREADS": "3"}, 8, "3"),
        ({"OMP_NUM_THREADS": "3", "DIFFLLM_OMP_NUM_THREADS": "3"}, 8, "8"),  # of another machine
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 8, "2"),
        (TORCHRUN | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "16"}, 8, "1"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_ON_NODE": "8"}, 8, "4"),
        (SUBMITIT | {"SLURM_CPUS_ON_NODE": "32"}, 8, "8"),  # bound by srun
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "32"}, 8, "2"),
        # bound by srun
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_ON_NODE": "16"}, 8, "8"),
    ],
)
def test_threads_divide_cores_by_processes_unless_user_sets_number(
    tmp_path, monkeypatch, env, affinity, expected
):
    for module in (launcher, machine):
        monkeypatch.setattr(module, "allowed_cpus", lambda: range(affinity))
    env = dict(env)
    choose_threads(env, tmp_path)
    assert env["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_waiting_policy_of_user_is_not_changed(name):
    env = {name: "7"}
    choose_threads(env)
    chosen = {key: env[key] for key in launcher.WAITING if key in env}
    assert chosen == {name: "7"}
    choose_threads(env := {})
    assert env["GOMP_SPINCOUNT"] == "1000"


def test_every_command_chooses_threads_before_torch_is_imported():
    """The variables act only if torch's OpenMP library reads them when it is loaded."""
    code = (
        "import os, sys, importlib\n"
        "from diffllm import cli\n"
        "assert 'torch' not in sys.modules and 'GOMP_SPINCOUNT' not in os.environ\n"
        "load = importlib.import_module\n"
        "def checked(name):\n"
        "    if name.startswith('diffllm.cli.'):\n"
        "        assert 'torch' not in sys.modules and os.environ['GOMP_SPINCOUNT'] == '1000'\n"
        "        print('chosen')\n"
        "    return load(name)\n"
        "importlib.import_module = checked\n"
        "sys.exit(cli.main(['evaluate', '--help']))\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in launcher.WAITING}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", env=env)
    assert ended.returncode == 0, ended.stderr
    assert "chosen" in ended.stdout
