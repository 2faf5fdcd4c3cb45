"""Counts of visible keys with masked documents, from which the FLOPs of a run are computed."""

from dataclasses import dataclass
from typing import Any

from diffllm.core.typed import made


@dataclass
class VisibleKeys:
    """Sums over the queries of all ranks since step 0; zeros if documents are not masked."""

    keys: int = 0
    queries: int = 0
    logged_keys: int = 0
    """The value of `keys` at the last logged step."""
    logged_queries: int = 0

    @property
    def mean(self) -> float | None:
        """Mean number of keys that a query sees; None if nothing was counted."""
        return self.keys / self.queries if self.queries else None

    def add(self, keys: int, queries: int) -> None:
        self.keys += keys
        self.queries += queries

    def log(self) -> float:
        """Return the mean since the last call; at least one query must have been counted since."""
        keys, queries = self.keys - self.logged_keys, self.queries - self.logged_queries
        self.logged_keys, self.logged_queries = self.keys, self.queries
        return keys / queries

    @classmethod
    def of(cls, values: Any) -> "VisibleKeys":
        """Read a saved state; raises ValueError for an impossible state."""
        found = made(cls, values)
        rises = 0 <= found.logged_keys <= found.keys
        if not rises or not 0 <= found.logged_queries <= found.queries <= found.keys:
            raise ValueError("has no usable counts of visible keys")
        return found
