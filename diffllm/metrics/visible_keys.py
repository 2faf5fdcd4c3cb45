"""Count the keys that queries see under document masks, to compute the FLOPs of a run."""

from dataclasses import dataclass
from typing import Any

from diffllm.core.typed import made


@dataclass
class VisibleKeys:
    """Counts of attention queries and of the keys that they see, summed over the ranks of a run.

    If documents are not masked, all counts stay 0: nothing is counted, because the number of
    visible keys then follows from `seq_len`.
    """

    keys: int = 0
    queries: int = 0
    logged_keys: int = 0
    """Value of `keys` at the last call of `log`."""
    logged_queries: int = 0
    """Value of `queries` at the last call of `log`."""

    @property
    def mean(self) -> float | None:
        """Mean number of keys that a query sees; None if no query was added yet."""
        return self.keys / self.queries if self.queries else None

    def add(self, keys: int, queries: int) -> None:
        self.keys += keys
        self.queries += queries

    def log(self) -> float:
        """Return the mean number of keys that a query sees, over queries added since the last call.

        Raises ZeroDivisionError if no query was added since the last call of `log`.
        """
        keys, queries = self.keys - self.logged_keys, self.queries - self.logged_queries
        self.logged_keys, self.logged_queries = self.keys, self.queries
        return keys / queries

    @classmethod
    def of(cls, values: Any) -> "VisibleKeys":
        """Create an instance from a dict with one entry per field.

        Raises ValueError for wrong types, negative counts, or fewer keys than queries.
        """
        counts = made(cls, values)
        is_valid = 0 <= counts.logged_keys <= counts.keys
        # Each query sees at least one key: its own token.
        if not is_valid or not 0 <= counts.logged_queries <= counts.queries <= counts.keys:
            raise ValueError("has no usable counts of visible keys")
        return counts


def expected_visible_keys(
    documents: dict[int, int], seq_len: int, has_whole_documents: bool
) -> float:
    """Return the mean number of keys that a query sees with causal attention and document masks.

    Args:
        documents: maps a document length in tokens, EOS included, to the number of such documents.
        has_whole_documents: True for best_fit packing, which cuts only documents of more than
            `seq_len` tokens (padding is not counted). False for a stream that is cut every
            `seq_len` tokens; each token of a document is then equally likely to begin a sequence.
    """
    keys = 0.0
    for length, number in documents.items():
        pieces, rest = divmod(length, seq_len)
        if has_whole_documents:
            seen = (pieces * seq_len * (seq_len + 1) + rest * (rest + 1)) / 2
        else:
            # Token p sees min(p, u) keys, with the place u in its sequence uniform from 1 to T:
            # p (2T + 1 - p) / 2T keys on average. Tokens after the T-th see (T + 1) / 2.
            n = min(length, seq_len)
            squares = n * (n + 1) * (2 * n + 1) / 6
            seen = ((2 * seq_len + 1) * n * (n + 1) / 2 - squares) / (2 * seq_len)
            seen += (length - n) * (seq_len + 1) / 2
        keys += number * seen
    return keys / sum(length * number for length, number in documents.items())
