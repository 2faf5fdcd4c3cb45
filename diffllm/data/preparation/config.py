"""The config of the ``prepare`` group."""

from dataclasses import dataclass

from diffllm.core.bounds import bounded, check_bounds


@dataclass
class PrepareConfig:
    """The processes that tokenise a corpus."""

    processes: int | None = bounded(None, least=1, most=4096)
    """Processes; null: one a core, while there are parts of the corpus left."""

    def validate(self) -> None:
        """Raise ConfigError for a value outside its range."""
        check_bounds("prepare.", self)
