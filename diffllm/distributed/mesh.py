"""Device meshes for replicated, sharded and expert-parallel training."""

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key


class Reduce(Enum):
    """When ranks sum their gradients during gradient accumulation.

    last: after the last micro-batch; each rank accumulates float32 gradients of all parameters.
    every: after each micro-batch; each rank accumulates only the gradients of its shard.
    """

    last = "last"
    every = "every"


@dataclass
class ParallelConfig:
    """Sizes of the device meshes, and when ranks sum gradients.

    The world size must equal replicate * shard * expert. Either `replicate` or `shard` may be -1.
    """

    replicate: int = key(
        1,
        effect="speed",
        help="Copies of the parameters, each on other ranks (HSDP); -1: world size / (shard * "
        "expert).",
    )
    shard: int = key(
        -1,
        effect="speed",
        help="Shards of each copy (FSDP), apart from `expert`; -1: world size / (replicate * "
        "expert).",
    )
    expert: int = key(
        1,
        least=1,
        effect="speed",
        help="Number of neighbouring ranks that share the experts of every layer and exchange "
        "tokens.",
    )
    context: int = key(
        1,
        least=1,
        effect="speed",
        help="Number of neighbouring ranks that share each sequence (context parallelism).",
    )
    reduce: Reduce | None = key(
        None,
        effect="speed",
        help="When gradients are reduced; null: `last` if the gradients are small, else `every`.",
    )

    def validate(self, n_experts: int) -> None:
        for name in ("replicate", "shard"):
            size = getattr(self, name)
            if size < 1 and size != -1:
                raise ConfigError(
                    f"parallel.{name}={size} must be at least 1, or -1 to compute it from the "
                    "number of processes"
                )
        if self.replicate == self.shard == -1:
            raise ConfigError(
                "parallel.replicate=-1 and parallel.shard=-1 cannot be combined; "
                "set one of these keys to 1 or more"
            )
        if self.expert != 1 and not n_experts:
            raise ConfigError(
                f"parallel.expert={self.expert} needs a mixture-of-experts model; "
                "this model is dense; set parallel.expert=1"
            )
        if n_experts % self.expert:
            raise ConfigError(
                f"parallel.expert={self.expert} must divide model.moe.n_experts={n_experts}"
            )

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        """Return the sizes (replicate, shard, expert); compute a size of -1 from `world_size`.

        Raises ConfigError if the sizes do not match `world_size`.
        """
        replicate, shard, expert = self.replicate, self.shard, self.expert
        fixed = prod(size for size in (replicate, shard, expert) if size != -1)
        free, remainder = divmod(world_size, fixed)
        if remainder or (free > 1 and -1 not in (replicate, shard)):
            experts = f" x parallel.expert={expert}" if expert != 1 else ""
            multiple = "a multiple of " if -1 in (replicate, shard) else ""
            start = "change the number of processes, or change these keys"
            if world_size == 1:
                start = f"torchrun --nproc-per-node={fixed} starts them"
            raise ConfigError(
                f"parallel.replicate={replicate} x parallel.shard={shard}{experts} needs "
                f"{multiple}{fixed} processes, not {world_size}; {start}"
            )
        if replicate == -1:
            replicate = free
        if shard == -1:
            shard = free
        if shard * expert % self.context:
            raise ConfigError(
                f"parallel.context={self.context} must divide the ranks of one copy of the "
                f"parameters, parallel.shard x parallel.expert = {shard * expert}; change one "
                "of these keys"
            )
        return replicate, shard, expert


class Meshes(NamedTuple):
    """Two device meshes over the same ranks: one for dense parameters, one for experts."""

    dense: DeviceMesh
    """Dimensions "replicate" and "fsdp" (shard x expert)."""
    experts: DeviceMesh | None
    """Dimensions "replicate", "shard" and "expert"; None without expert parallelism."""
    context: DeviceMesh | None = None
    """The ranks that share each sequence; None without context parallelism."""

    @property
    def one_rank(self) -> bool:
        return self.dense.size() == 1


def build_meshes(cfg: ParallelConfig, device_type: str, world_size: int) -> Meshes:
    """Build the device meshes over all ranks.

    The dimension "expert" is the last: its ranks exchange tokens in every layer, so they should
    be on the same node.

    Raises ConfigError if the sizes in `cfg` do not match `world_size`.
    """
    replicate, shard, expert = cfg.sizes(world_size)
    dense = init_device_mesh(
        device_type, (replicate, shard * expert), mesh_dim_names=("replicate", "fsdp")
    )
    experts = None
    if expert > 1:
        experts = init_device_mesh(
            device_type,
            (replicate, shard, expert),
            mesh_dim_names=("replicate", "shard", "expert"),
        )
    return Meshes(dense, experts, context_mesh(cfg.context, device_type, world_size))


def context_mesh(context: int, device_type: str, world_size: int) -> DeviceMesh | None:
    """Create the process groups of `context` neighbouring ranks; return the mesh of this rank."""
    if context == 1:
        return None
    mesh = init_device_mesh(
        device_type, (world_size // context, context), mesh_dim_names=("sequence", "context")
    )
    return mesh["context"]
