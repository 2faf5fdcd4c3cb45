"""Connection of this process to the other ranks, and the last collectives of this process.

Ranks exchange values through a key-value store before the process group exists.
"""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import DistError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from diffllm.core.errors import AgreedError, ConfigError, LaunchError, UserError
from diffllm.core.keys import key
from diffllm.core.torch_versions import FLIGHT_RECORDERS
from diffllm.distributed.launcher import SWEEP_JOB, environment, meeting_point
from diffllm.distributed.stop import StoppedEarly

T = TypeVar("T")
K = TypeVar("K")

RECORDED = 256
BACKGROUND: set[str] = set()
"""Names of groups without hang detection: their collectives may wait for a slow disk."""
SLICE_S = 0.5
READ_S = 30
"""Seconds that a failing rank 0 waits until late ranks have read its error."""
STOPPED = "stopped"
FAILED_COLLECTIVE = re.compile(r"gloo|nccl|process ?group|closed by peer|timed out", re.I)


@dataclass
class DistributedConfig:
    """Settings of collectives, and of checks that the model replicas are equal."""

    timeout: int = key(
        600,
        least=1,
        most=365 * 24 * 3600,
        effect="none",
        help="Seconds after which an incomplete collective ends the run.",
    )
    check_interval: int = key(
        0,
        least=0,
        effect="speed",
        help="Steps between comparisons of replicas on different ranks; 0: compare only at the "
        "start.",
    )


@dataclass
class World:
    """Rank of this process, world size, and the key-value store that all ranks share."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store
    timeout: int = 600

    def broadcast_from_rank0(self, key: str, choose: Callable[[], T]) -> T:
        """Call `choose` on rank 0; return the result, which must be a JSON value, on every rank.

        If `choose` raises UserError, rank 0 raises this error, and other ranks raise AgreedError.
        Every rank must call this with the same `key`, which no other call may use.
        """
        return self.broadcast_and_keep(key, lambda: (choose(), None))[0]

    def broadcast_and_keep(self, key: str, choose: Callable[[], tuple[T, K]]) -> tuple[T, K | None]:
        """Call `choose` on rank 0; return its first result on every rank.

        Also return its second result on rank 0, and None on the other ranks. The first result must
        be a JSON value. See `broadcast_from_rank0` for errors and for `key`.
        """
        if self.rank == 0:
            assert not self.store.check([key]), f"the key {key} was used before"
            try:
                result, private = choose()
            except UserError as error:
                self.store.set(key, json.dumps({"error": str(error)}))
                # Wait: the store ends with this process, unless torchrun hosts the store.
                read = [f"{key}/read/{rank}" for rank in range(1, self.size)]
                with contextlib.suppress(DistError):
                    self.store.wait(read, timedelta(seconds=READ_S))
                raise
            self.store.set(key, json.dumps({"result": result}))
            return result, private
        try:
            self.wait([key])
        except DistStoreError as error:
            raise LaunchError(
                f"rank 0 has not sent {key!r} within distributed.timeout={self.timeout} seconds; "
                "see the output of rank 0"
            ) from error
        decision = json.loads(self.store.get(key))
        if "result" in decision:
            return decision["result"], None
        self.store.set(f"{key}/read/{self.rank}", "")
        raise AgreedError(decision["error"])

    def wait(self, keys: list[str]) -> None:
        """Wait until the store contains all `keys`.

        Wait in short intervals, because Python cannot handle signals during a call of the store.

        Raises StoppedEarly if a signal has stopped another rank, and DistStoreError after
        `self.timeout` seconds.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self.store.wait(keys, timedelta(seconds=SLICE_S))
            except DistStoreError:
                number = self.stopped()
                if number:
                    raise StoppedEarly(number) from None
                if time.monotonic() > deadline:
                    raise

    def stopped(self) -> signal.Signals | None:
        if not self.store.check([STOPPED]):
            return None
        return signal.Signals(int(self.store.get(STOPPED)))

    def stop(self, number: signal.Signals) -> None:
        self.store.set(STOPPED, str(int(number)))

    def device(self) -> torch.device:
        """Return the GPU with the index `local_rank`, or the CPU if CUDA is not available.

        Raises ConfigError if this machine has GPUs, but none with this index.
        """
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {self.local_rank} has no GPU: this machine has "
                f"{torch.cuda.device_count()} GPUs; start at most one process per GPU"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def init_process_group(self, device: torch.device, cfg: DistributedConfig) -> None:
        # The variable makes torch record the last collectives.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=cfg.timeout),
            device_id=device if device.type == "cuda" else None,
        )


def join(cfg: DistributedConfig) -> World:
    """Connect to the other processes of this launch; return this process's `World`.

    Raises LaunchError if the connection fails or takes more than `cfg.timeout` seconds.
    """
    rank, size, local_rank = environment()
    if size == 1:
        return World(0, 1, 0, dist.HashStore())
    address, port = meeting_point()
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    url = f"env://?rank={rank}&world_size={size}"
    try:
        store, rank, size = next(rendezvous(url, timeout=timedelta(seconds=cfg.timeout)))
        # A launcher's store can outlive its processes: restarts and jobs of a sweep share a store.
        store = dist.PrefixStore(f"diffllm/{os.environ.get(SWEEP_JOB, '')}", store)
        meeting = agree_on_name(store, rank, size, cfg.timeout)
    except (DistError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"cannot connect to the other {size - 1} ranks at {address}:{port} within "
            f"distributed.timeout={cfg.timeout} seconds ({reason}); "
            "check that all ranks are started and can reach this address"
        ) from error
    return World(rank, size, local_rank, dist.PrefixStore(meeting, store), cfg.timeout)


def agree_on_name(store: dist.Store, rank: int, size: int, timeout: int) -> str:
    """Return a random name of this launch, which is the same on all ranks.

    The caller uses the name as prefix of store keys, so that ranks ignore keys of earlier launches.
    torchrun's restart count is not a suitable prefix, because it may differ between nodes.

    If a rank does not connect within `timeout` seconds, rank 0 raises LaunchError.
    """
    if rank:
        word = uuid4().hex
        store.set(f"arrived/{rank}", word)
        meeting = store.get(f"answer/{word}").decode()
        store.set(f"{meeting}/present/{rank}", "")
        return meeting
    meeting = uuid4().hex
    missing = set(range(1, size))
    deadline = time.monotonic() + timeout
    while missing:
        # Answer a rank until it is present: `arrived` may be from a process of an earlier launch.
        for other in missing:
            if store.check([f"arrived/{other}"]):
                word = store.get(f"arrived/{other}").decode()
                store.set(f"answer/{word}", meeting)
        for other in sorted(missing):
            if store.check([f"{meeting}/present/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise LaunchError(
                f"{len(missing)} of {size} ranks did not connect within "
                f"distributed.timeout={timeout} seconds; missing ranks: "
                f"{names}; see the output of these ranks"
            )
        time.sleep(0.01)
    return meeting


class Calls(NamedTuple):
    """The last collectives of this process.

    All fields except `newest` describe one collective: the oldest pending collective or, if none
    is pending, the newest collective.
    """

    name: str = ""
    """Operation and input shapes, such as 'gloo:all_reduce of [3]'; "" without collectives."""
    group: str = ""
    number: int = 0
    """Index of the collective within its process group, the same on every rank."""
    age_s: float = 0.0
    """Seconds since the collective was called."""
    pending: bool = False
    """Whether the collective is incomplete; also True for a short time after its completion."""
    newest: dict[str, int] = {}  # noqa: RUF012
    """For each process group, the index of the newest collective."""


def recorded() -> Calls:
    """Return the `Calls` of this process, according to torch's flight recorder.

    Any thread may call this.
    """
    entries: list[dict[str, Any]] = []
    for dump in FLIGHT_RECORDERS:
        for entry in json.loads(dump(True, False)).get("entries", []):
            if not entry["is_p2p"] and entry["process_group"][0] not in BACKGROUND:
                entries.append(entry)
    if not entries:
        return Calls()
    entries.sort(key=lambda entry: entry["time_created_ns"])
    oldest_pending = None
    newest = {}
    for entry in entries:
        newest[group_name(entry)] = entry["collective_seq_id"]
        if oldest_pending is None and not entry["retired"]:
            oldest_pending = entry
    shown = entries[-1] if oldest_pending is None else oldest_pending
    shapes = " ".join(str(shape) for shape in shown["input_sizes"][:2])
    return Calls(
        name=f"{shown['profiling_name']} of {shapes}",
        group=group_name(shown),
        number=shown["collective_seq_id"],
        age_s=max(0.0, time.time() - shown["time_created_ns"] / 1e9),
        pending=oldest_pending is not None,
        newest=newest,
    )


def group_name(entry: dict[str, Any]) -> str:
    """Return the process group of an entry of torch's flight recorder, such as "gloo:0"."""
    # Each backend counts its groups separately, so add the backend to the name.
    backend = entry["profiling_name"].partition(":")[0]
    return f"{backend}:{entry['process_group'][0]}"


def is_failed_collective(error: BaseException | None) -> bool:
    """Return whether `error` comes from a failed collective.

    If `error` is a UserError, return whether its cause comes from a failed collective.
    """
    if isinstance(error, UserError):
        return is_failed_collective(error.__cause__)
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and bool(FAILED_COLLECTIVE.search(str(error)))
    )
