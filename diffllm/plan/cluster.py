"""The cluster that a plan is for: what its user states, and what is assumed."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from diffllm.errors import ConfigError
from diffllm.metrics.mfu import DEVICES, Device, device_called
from diffllm.plan.traffic import Call, Collective


def key(help: str, default: Any) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Cluster:
    """The cluster's description, by the keys of `diffllm plan` that no training run has."""

    gpus: int = key("ranks, one a GPU", 8)
    gpu: str = key("its name, for peak and memory", "h200")
    tokens: float | None = key("to train on, for days and GPU-hours", None)
    mfu: float = key("model FLOPs utilisation that a step reaches", 0.4)
    nvlink_gbs: float = key("GB/s that a GPU sends inside its node; NVLink of H100, H200", 450.0)
    network_gbs: float = key("GB/s of the network card that each GPU has", 50.0)
    gpus_per_node: int = key("GPUs that share a node", 8)
    reserve_gib: float = key("GiB for CUDA's context, NCCL's buffers, fragments", 6.0)
    peak_flops: float | None = key("dense bf16 FLOP/s of the GPU, instead of the table's", None)
    memory_gib: float | None = key("GiB of the GPU, instead of the table's", None)
    rank: int = key("the rank whose memory is planned; rank 0 holds most", 0)

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no cluster has."""
        for name in ("gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("tokens", "nvlink_gbs", "network_gbs", "peak_flops", "memory_gib"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be positive")
        if not 0 < self.mfu <= 1:
            raise ConfigError(f"mfu={self.mfu} must lie in (0, 1]")
        if not 0 <= self.reserve_gib < float("inf"):
            raise ConfigError(f"reserve_gib={self.reserve_gib} must not be negative")
        if not 0 <= self.rank < self.gpus:
            raise ConfigError(f"rank={self.rank} must lie in [0, {self.gpus - 1}]")

    @property
    def device(self) -> Device:
        """The GPU's numbers, the user's where stated; raises ConfigError if one is unknown."""
        known = device_called(self.gpu)
        peak = self.peak_flops or (known and known.peak_flops)
        memory = self.memory_gib or (known and known.memory_gib)
        if not peak or not memory:
            names = ", ".join(device.name for device in DEVICES)
            raise ConfigError(
                f"gpu={self.gpu} is not known; choose from {names}, "
                "or give peak_flops= and memory_gib="
            )
        return Device(known.name if known else self.gpu, peak, memory)

    def fewest_in_a_node(self, ranks: tuple[int, ...]) -> int:
        """Count the given ranks in the node that has fewest of them; ranks fill nodes in order."""
        return min(Counter(rank // self.gpus_per_node for rank in ranks).values())

    def seconds(self, call: Call) -> float:
        """Return the seconds of a collective at the stated bandwidths.

        A ring enters and leaves a node once, and a group has as many rings as it has ranks in a
        node, each with a network card of its own. All to all, every rank sends for itself. Of a
        group that is spread unevenly, the node with the fewest ranks is what the others wait for.
        """
        n, near = len(call.ranks), self.fewest_in_a_node(call.ranks)
        nvlink, network = 1e9 * self.nvlink_gbs, 1e9 * self.network_gbs
        sent = call.kind.on_the_wire(call.size, n)
        if near == n:
            return sent / nvlink
        if call.kind is Collective.all_to_all:
            outside = call.size * (n - near) / n
            return max((sent - outside) / nvlink, outside / network)
        return sent / min(nvlink, network * near)


OWN_KEYS = {f.name: f for f in fields(Cluster)}
