"""The pieces that documents are packed in: whole documents, or parts of those that are too long.

Shapes: T sequence length, k pieces.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from diffllm.data.shards import Stream

BLOCK = 2**22
"""Tokens that are searched for ends of documents at once."""


def pieces(stream: Stream, eos_id: int, seq_len: int) -> Iterator[np.ndarray]:
    """Cut the documents of a stream into pieces of at most T tokens, in their order.

    Yields, block by block, (3, k) int64: the first token of each piece, its tokens, and how many of
    its document lie before it.
    """
    document = place = 0  # begin of the open document, and of the piece that it goes on with
    for start in range(0, len(stream), BLOCK):
        stop = min(start + BLOCK, len(stream))
        ends = start + 1 + np.flatnonzero(stream.tokens(start, stop) == eos_id)
        documents, places = np.append(document, ends), np.append(place, ends)
        open_end = stop  # of the document that goes on behind the block, whole pieces are cut off
        if stop < len(stream):
            open_end -= (stop - int(places[-1])) % seq_len
        tokens = np.append(ends, open_end) - places
        counts = -(-tokens // seq_len)
        cut = seq_len * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        starts = np.repeat(places, counts) + cut
        lengths = np.minimum(np.repeat(tokens, counts) - cut, seq_len)
        yield np.stack((starts, lengths, starts - np.repeat(documents, counts)))
        document, place = int(documents[-1]), open_end


def windows(parts: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Join parts (r, any) and cut them into windows (r, size), the last of which is shorter."""
    held: list[np.ndarray] = []
    for part in parts:
        held.append(part)
        if sum(each.shape[1] for each in held) >= size:
            joined = np.concatenate(held, axis=1)
            whole = joined.shape[1] // size * size
            yield from np.split(joined[:, :whole], whole // size, axis=1)
            held = [joined[:, whole:]]
    rest = np.concatenate(held, axis=1)
    if rest.size:
        yield rest
