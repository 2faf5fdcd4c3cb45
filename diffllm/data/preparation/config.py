"""The config of the ``prepare`` group."""

from dataclasses import dataclass

from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError


@dataclass
class PrepareConfig:
    """The processes that tokenise a corpus."""

    processes: int | None = bounded(None, least=1, most=4096)
    """Processes of a node; null: one a core, while there are parts of the corpus left."""
    num_nodes: int = bounded(1, least=1)
    """Nodes that share a corpus: `diffllm prepare` is started on each."""
    node_rank: int = bounded(0, least=0)
    """Which of the nodes this one is, from 0."""

    @property
    def of_node(self) -> str:
        """The ending of the names of a node's own files; empty where there is one node."""
        return f".node-{self.node_rank}-of-{self.num_nodes}" * (self.num_nodes > 1)

    def validate(self) -> None:
        """Raise ConfigError for a node that there is not."""
        check_bounds("prepare.", self)
        if self.node_rank >= self.num_nodes:
            raise ConfigError(
                f"prepare.node_rank={self.node_rank} has to be below "
                f"prepare.num_nodes={self.num_nodes}"
            )
