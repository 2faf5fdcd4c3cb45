"""Which process this is, and what the processes agree on before any process group exists."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from diffllm.distributed.collectives import record_collectives
from diffllm.errors import AgreedError, ConfigError, UserError

T = TypeVar("T")

READ_S = 30
"""Seconds that an error of rank 0 waits for ranks that are late."""


@dataclass
class DistributedConfig:
    """How processes meet."""

    timeout: int = 600
    """Seconds until a collective that does not complete ends the run."""
    check_interval: int = 0
    """Steps between checks that ranks with the same part of the model hold the same values; at the
    start that is always checked, and 0 leaves it at that."""

    def validate(self) -> None:
        """Raise ConfigError for a timeout that is not positive, or a negative interval."""
        if self.timeout < 1:
            raise ConfigError(f"distributed.timeout={self.timeout} must be at least 1 second")
        if self.check_interval < 0:
            raise ConfigError(
                f"distributed.check_interval={self.check_interval} must not be negative"
            )


@dataclass
class World:
    """One process among `size`, with a key-value store that all of them share."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store

    def decide(self, key: str, choose: Callable[[], T]) -> T:
        """What `choose` returns on rank 0 (JSON), or the UserError it raises, on every rank."""
        if self.rank == 0:
            try:
                result = choose()
                self.store.set(key, json.dumps({"result": result}))
                return result
            except UserError as error:
                self.store.set(key, json.dumps({"error": str(error)}))
                # The store ends with this process, unless torchrun has it: the others read first.
                with contextlib.suppress(DistError):
                    read = [f"{key}/read/{rank}" for rank in range(1, self.size)]
                    self.store.wait(read, timedelta(seconds=READ_S))
                raise
        decision = json.loads(self.store.get(key))
        if "error" in decision:
            self.store.set(f"{key}/read/{self.rank}", "")
            raise AgreedError(decision["error"])
        return decision["result"]

    def device(self) -> torch.device:
        """This rank's GPU where there is one, else the CPU."""
        if torch.cuda.is_available():
            if self.local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"local rank {self.local_rank} has no GPU: this machine has "
                    f"{torch.cuda.device_count()}; start one process a GPU"
                )
            torch.cuda.set_device(self.local_rank)
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    def init_process_group(self, device: torch.device, cfg: DistributedConfig) -> None:
        """NCCL for GPU tensors and gloo for CPU tensors, or gloo alone."""
        record_collectives()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=cfg.timeout),
            device_id=device if device.type == "cuda" else None,
        )


def environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) without it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, size, local = (os.environ.get(name) for name in names)
    if rank is None or size is None:
        return 0, 1, 0
    return int(rank), int(size), int(local or 0)


def join(cfg: DistributedConfig) -> World:
    """Meet the other processes of this launch; waits for all of them to appear."""
    rank, size, local_rank = environment()
    if size == 1:
        return World(0, 1, 0, dist.HashStore())
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=cfg.timeout)))
    # One launcher's store serves restarts and the jobs of a sweep, each with keys of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"diffllm/{attempt}/{os.environ.get('DIFFLLM_SWEEP_JOB', '')}"
    return World(rank, size, local_rank, dist.PrefixStore(prefix, store))
