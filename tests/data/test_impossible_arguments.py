"""Calls from Python with counts, ranks and names that cannot be: one line says which."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffllm.core.errors import ConfigError
from diffllm.data.config import DataConfig
from diffllm.data.heldout import heldout_batches, heldout_documents, heldout_tokens
from diffllm.data.loader import TrainLoader
from diffllm.data.samples import ShuffledSequences, training_samples
from diffllm.data.sequences import StreamSequences, sequences_in
from diffllm.data.streams import TokenStream
from diffllm.data.token_data import TokenData

MakeStream = Callable[..., TokenStream]
NO_COUNT: list[Any] = [0, -1, 1.5, "2", None, True]


def loader(stream: TokenStream, **changes: Any) -> TrainLoader:
    samples = ShuffledSequences(StreamSequences(stream, 8), 0)
    return TrainLoader(samples, **{"global_batch_size": 4, "micro_batch_size": 1, **changes})


CALLS: dict[str, Callable[..., Any]] = {
    "loader": loader,
    "heldout_batches": lambda stream, **changes: list(
        heldout_batches(stream, **{"seq_len": 8, "batch_size": 2, "sequences": 4, **changes})
    ),
    "batches": lambda stream, **changes: list(
        heldout_documents(stream, 0).batches(**{"seq_len": 8, "batch_size": 2, **changes})
    ),
    "sequences_in": lambda stream, seq_len: sequences_in(stream, seq_len),
    "documents": lambda stream, tokens: heldout_documents(stream, 0, tokens),
    "tokens": lambda stream, tokens: heldout_tokens(stream, 0, tokens),
}
COUNTS = {
    "loader": ["global_batch_size", "micro_batch_size", "world_size"],
    "heldout_batches": ["seq_len", "batch_size", "sequences", "world_size"],
    "batches": ["seq_len", "batch_size", "world_size"],
    "sequences_in": ["seq_len"],
}
CASES = [
    *((call, {name: value}) for call, names in COUNTS.items() for name in names
      for value in NO_COUNT),
    *((call, {"rank": rank, "world_size": 2}) for call in ("loader", "heldout_batches", "batches")
      for rank in (2, 5, -1, 0.5)),
    *(("loader", {name: -1}) for name in ("num_workers", "prefetch_factor")),
    *((call, {"tokens": tokens}) for call in ("documents", "tokens")
      for tokens in (0, -3, float("nan"))),
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments"), CASES)
def test_it_is_named(make_stream: MakeStream, call: str, arguments: dict[str, Any]) -> None:
    stream = make_stream([*range(1, 99), 0])
    with pytest.raises(ConfigError) as caught:
        CALLS[call](stream, **arguments)
    line = str(caught.value)
    assert line.isprintable()
    assert any(f"{name}={value!r}" in line for name, value in arguments.items()), line


def test_a_split_that_there_is_not(prepared: TokenData) -> None:
    with pytest.raises(ConfigError, match="split='dev' is not one of train, heldout"):
        prepared.split("dev")


@pytest.mark.parametrize("seq_len", [0, -5])
def test_samples_of_no_length(prepared: TokenData, tmp_path: Path, seq_len: int) -> None:
    with pytest.raises(ConfigError, match=f"seq_len={seq_len} has to be"):
        training_samples(prepared, DataConfig(cache_dir=str(tmp_path)), seq_len, 0, 1)
