"""The device mesh: world = replicate x shard."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diffllm.errors import ConfigError


@dataclass
class ParallelConfig:
    """Sizes of the mesh; -1 takes the ranks that are left."""

    replicate: int = 1
    """Groups that each hold a full copy of the parameters (HSDP)."""
    shard: int = -1
    """Ranks that a copy is sharded over (FSDP)."""
    expert: int = 1
    """Ranks that experts are spread over."""

    def validate(self) -> None:
        """Raise ConfigError for sizes that no world can have."""
        for name in ("replicate", "shard", "expert"):
            size = getattr(self, name)
            if size < 1 and size != -1:
                raise ConfigError(f"parallel.{name}={size} must be at least 1, or -1 for the rest")
        if self.replicate == self.shard == -1:
            raise ConfigError("only one of parallel.replicate and parallel.shard may be -1")
        if self.expert != 1:
            raise ConfigError(
                f"parallel.expert={self.expert} needs a mixture-of-experts model; "
                "this one is dense: parallel.expert=1"
            )

    def sizes(self, world_size: int) -> tuple[int, int]:
        """(replicate, shard) for `world_size` ranks; raises ConfigError if they do not fill it."""
        replicate, shard = self.replicate, self.shard
        if replicate == -1:
            replicate = world_size // shard
        if shard == -1:
            shard = world_size // replicate
        if replicate * shard != world_size:
            raise ConfigError(
                f"parallel.replicate={self.replicate} x parallel.shard={self.shard} "
                f"does not make {world_size} ranks"
            )
        return replicate, shard


def build_mesh(cfg: ParallelConfig, device_type: str, world_size: int) -> DeviceMesh:
    """A mesh with dimensions "replicate" and "shard" over all ranks."""
    return init_device_mesh(
        device_type, cfg.sizes(world_size), mesh_dim_names=("replicate", "shard")
    )
