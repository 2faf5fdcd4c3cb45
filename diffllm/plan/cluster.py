"""The cluster that a plan is for: what its user states, and what is assumed."""

from collections import Counter
from dataclasses import dataclass, fields

from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.metrics.profiling import DEVICES, Device, device_called
from diffllm.plan.traffic import Call, Collective

POSITIVE = {"above": 0, "below": float("inf")}


@dataclass
class Cluster:
    """The cluster's description, by the keys of `diffllm plan` that no training run has."""

    gpus: int = bounded(8, help="ranks, one a GPU", least=1, most=2**17)
    gpu: str = bounded("h200", help="its name, for peak and memory")
    tokens: float | None = bounded(None, help="to train on, for days and GPU-hours", **POSITIVE)
    mfu: float = bounded(0.4, help="model FLOPs utilisation that a step reaches", above=0, most=1)
    nvlink_gbs: float = bounded(
        450.0, help="GB/s that a GPU sends inside its node; NVLink of H100, H200", **POSITIVE
    )
    network_gbs: float = bounded(50.0, help="GB/s of each GPU's network card", **POSITIVE)
    gpus_per_node: int = bounded(8, help="GPUs that share a node", least=1, most=2**17)
    reserve_gib: float = bounded(
        6.0, help="GiB for CUDA's context, NCCL, fragments", least=0, most=1e6
    )
    peak_flops: float | None = bounded(
        None, help="dense bf16 FLOP/s of the GPU, if not the table's", **POSITIVE
    )
    memory_gib: float | None = bounded(
        None, help="GiB of the GPU, if not the table's", above=0, most=1e6
    )
    rank: int = bounded(0, help="the rank whose memory is planned; rank 0 holds most", least=0)

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no cluster has."""
        check_bounds("", self)
        if self.rank >= self.gpus:
            raise ConfigError(f"rank={self.rank} must be less than gpus={self.gpus}")

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
