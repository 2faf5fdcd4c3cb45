"""Counts and ranks that callers give: what cannot be is said where it is given."""

from numbers import Integral

from diffllm.core.errors import ConfigError


def check_counts(least: int, **counts: int) -> None:
    """Raise ConfigError for one that is no whole number, or below the least that can be."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or isinstance(count, bool) or count < least:
            raise ConfigError(f"{name}={count!r} has to be a whole number of at least {least}")


def check_rank(rank: int, world_size: int) -> None:
    """Raise ConfigError for a rank that there is not."""
    check_counts(least=1, world_size=world_size)
    check_counts(least=0, rank=rank)
    if rank >= world_size:
        raise ConfigError(f"rank={rank} has to be below world_size={world_size}")
