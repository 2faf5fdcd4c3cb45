from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffllm.data import streams
from diffllm.data.shards import token_dtype
from diffllm.data.streams import TokenStream


@pytest.fixture
def sharded_stream(make_stream: Callable[..., TokenStream]) -> TokenStream:
    return make_stream(list(range(1000)), shard_tokens=97)


@given(ends=st.tuples(st.integers(0, 1000), st.integers(0, 1000)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_token_stream_range_may_span_several_shards(sharded_stream, ends):
    start, stop = sorted(ends)
    tokens = sharded_stream.tokens(start, stop)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == list(range(start, stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (990, 1001)])
def test_token_stream_refuses_range_outside_its_length(sharded_stream, start, stop):
    with pytest.raises(IndexError, match="<= 1000, the length of the stream"):
        sharded_stream.tokens(start, stop)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (152_000, "<u4")]
)
def test_token_dtype_depends_on_vocabulary_size(make_stream, vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    assert make_stream([0, vocab_size - 1], vocab_size).tokens(0, 2).tolist() == [0, vocab_size - 1]


def test_token_stream_limits_number_of_open_shard_files(make_stream, monkeypatch):
    """Every open shard needs a file descriptor; a large corpus has more shards than descriptors."""
    monkeypatch.setattr(streams, "MOST_OPEN", 3)
    stream = make_stream(list(range(1000)), shard_tokens=50)
    for start in [*range(0, 1000, 37), 0, 990]:
        stop = min(start + 60, 1000)
        assert stream.tokens(start, stop).tolist() == list(range(start, stop))
        assert stream._array.cache_info().currsize <= 3
