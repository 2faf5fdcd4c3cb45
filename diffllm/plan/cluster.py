"""The cluster of a plan: GPUs, their memory and FLOP/s, and bandwidths between GPUs."""

from collections import Counter
from dataclasses import dataclass, fields

from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.gpus import DEVICES, Device, device_named
from diffllm.plan.step import Call, Collective

POSITIVE_BOUNDS = {"above": 0, "below": float("inf")}


@dataclass
class Cluster:
    """Keys of `diffllm plan` that describe the cluster.

    All other keys of `diffllm plan` are keys of a training config.
    """

    gpus: int = bounded(8, help="number of GPUs, one rank per GPU", least=1, most=2**17)
    gpu: str = bounded("h200", help="name of the GPU, for peak FLOP/s and memory")
    tokens: float | None = bounded(
        None, help="training tokens, for days and GPU-hours", **POSITIVE_BOUNDS
    )
    mfu: float = bounded(0.4, help="model FLOPs utilisation of a step", above=0, most=1)
    nvlink_gbs: float = bounded(
        450.0, help="GB/s per GPU inside a node; default: NVLink of H100, H200", **POSITIVE_BOUNDS
    )
    network_gbs: float = bounded(
        50.0, help="GB/s of the network card of each GPU", **POSITIVE_BOUNDS
    )
    gpus_per_node: int = bounded(8, help="number of GPUs per node", least=1, most=2**17)
    reserve_gib: float = bounded(
        6.0, help="GiB per GPU for CUDA context, NCCL, fragmentation", least=0, most=1e6
    )
    peak_flops: float | None = bounded(
        None, help="dense bf16 FLOP/s of the GPU; overrides the table", **POSITIVE_BOUNDS
    )
    memory_gib: float | None = bounded(
        None, help="GiB of the GPU; overrides the table", above=0, most=1e6
    )
    rank: int = bounded(0, help="rank whose memory is planned; rank 0 needs most", least=0)

    def __post_init__(self) -> None:
        check_bounds("", self)
        if self.rank >= self.gpus:
            raise ConfigError(f"rank={self.rank} must be less than gpus={self.gpus}")

    @property
    def device(self) -> Device:
        """Name, peak FLOP/s and memory of the GPU; peak_flops and memory_gib override the table.

        Raises ConfigError if `gpu` is unknown, unless both peak_flops and memory_gib are set.
        """
        name, peak, memory = self.gpu, self.peak_flops, self.memory_gib
        in_table = device_named(self.gpu)
        if in_table:
            name = in_table.name
            peak = peak or in_table.peak_flops
            memory = memory or in_table.memory_gib
        if not peak or not memory:
            names = ", ".join(device.name for device in DEVICES)
            raise ConfigError(
                f"gpu={self.gpu} is unknown; choose from {names}, "
                "or set peak_flops= and memory_gib="
            )
        return Device(name, peak, memory)

    def fewest_in_a_node(self, ranks: tuple[int, ...]) -> int:
        """Count the given ranks in each node; return the smallest count above 0."""
        ranks_by_node = Counter(rank // self.gpus_per_node for rank in ranks)
        return min(ranks_by_node.values())

    def seconds(self, call: Call) -> float:
        """Return the duration of a collective in seconds, at the bandwidths of the cluster.

        A collective over several nodes, except all-to-all, runs as parallel rings. Each ring uses
        one network card per node. The number of rings is the smallest number of participating ranks
        in any of these nodes.
        """
        n = len(call.ranks)
        near = self.fewest_in_a_node(call.ranks)
        nvlink = 1e9 * self.nvlink_gbs
        network = 1e9 * self.network_gbs
        sent = call.kind.on_the_wire(call.size, n)
        if near == n:
            return sent / nvlink
        if call.kind is Collective.all_to_all:
            # Both parts are sent at the same time. The node with the fewest ranks is the slowest,
            # because it sends the largest share to other nodes.
            outside = call.size * (n - near) / n
            return max((sent - outside) / nvlink, outside / network)
        return sent / min(nvlink, network * near)


CLUSTER_KEYS = {f.name: f for f in fields(Cluster)}
