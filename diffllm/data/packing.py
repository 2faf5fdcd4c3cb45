"""Pack whole documents into sequences by best fit; cut documents longer than a sequence.

Documents are packed in order of decreasing length, each into the fullest sequence with enough free
space, as in "Fewer Truncations Improve Language Modeling" (Ding et al., 2024, arXiv 2404.10830).
All documents of one length are packed at once into all sequences with the same free space: the
number of steps depends on the number of distinct lengths and free spaces, not on the number of
documents.

The packing of a split is stored on disk as a plan, which lists the pieces of documents in each
sequence. Documents are packed in windows of limited size, to bound memory. The plan depends only on
the tokens and the sequence length.

Symbols in shapes: T tokens per sequence, n sequences, k pieces.
"""

import json
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.core.console import track
from diffllm.core.printing import to_stderr
from diffllm.core.typed import read_typed
from diffllm.data.shards import HashedFile
from diffllm.data.streams import FileArray, Stream, check_size, checked_array, document_ends
from diffllm.data.verified import identity_of, leave_mark, usable

PLAN_VERSION = 1
PACKING_WINDOW = 2**20
PLAN = "plan.json"
ARRAYS = {"starts.bin": "<i8", "lengths.bin": "<i4", "firsts.bin": "<i8"}
"""First token and length of each piece, ordered by sequence, (k,) each; first piece of each
sequence, then k, (n + 1,)."""


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items into bins: largest items first, each into the fullest bin with enough room.

    Returns the bin number of each item, (n,) int64, and the number of bins. Bins are numbered in
    the order of their creation. Ties go to the first item and to the oldest bin.

    Args:
        sizes: (n,) integers from 1 to `capacity`.
        capacity: size of an empty bin.
    """
    if not len(sizes):
        return np.empty(0, np.int64), 0
    assert sizes.min() >= 1
    assert sizes.max() <= capacity
    bins = np.empty(len(sizes), np.int64)
    open_bins = Bins()
    count = 0
    for items in groups_by_size(sizes, capacity):
        size = int(sizes[items[0]])
        while len(items):
            room, fullest = open_bins.take(size)
            if not room:
                room = capacity
                new_bins = -(-len(items) // (capacity // size))
                fullest = np.arange(count, count + new_bins)
                count += new_bins
            per_bin = room // size
            needed_bins = -(-len(items) // per_bin)
            used = min(len(fullest), needed_bins)
            n_items = min(len(items), used * per_bin)
            bin_of_place = np.repeat(fullest[:used], per_bin)
            bins[items[:n_items]] = bin_of_place[:n_items]
            items = items[n_items:]
            # The last used bin may get fewer items than the others.
            in_last = n_items - (used - 1) * per_bin
            open_bins.put(room - per_bin * size, fullest[: used - 1])
            open_bins.put(room - in_last * size, fullest[used - 1 : used])
            open_bins.put(room, fullest[used:])
    return bins, count


def groups_by_size(sizes: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Return the indices of the items of each size, largest items first."""
    # NumPy's stable sort of 16-bit numbers is a radix sort, which is faster.
    dtype = np.uint16 if capacity <= 2**16 else np.int64
    # Descending order by an ascending sort, which keeps the order of equal items.
    sort_keys = (capacity - sizes).astype(dtype)
    order = np.argsort(sort_keys, kind="stable")
    items_per_size = np.bincount(sizes, minlength=capacity + 1)[::-1]
    group_ends = np.cumsum(items_per_size[items_per_size > 0])
    return np.split(order, group_ends[:-1])


class Bins:
    def __init__(self) -> None:
        self._rooms: list[int] = []
        """Distinct rooms of all bins, ascending."""
        self._bins: dict[int, list[np.ndarray]] = {}
        """Bins by room, in arrays that are ascending."""

    def take(self, size: int) -> tuple[int, np.ndarray]:
        """Remove and return all bins with the smallest free space that is at least `size`.

        Returns the free space and the bin numbers in ascending order. If no bin has enough free
        space, returns 0 and an empty array.
        """
        place = bisect_left(self._rooms, size)
        if place == len(self._rooms):
            return 0, np.empty(0, np.int64)
        room = self._rooms.pop(place)
        bins = np.concatenate(self._bins.pop(room))
        # NumPy's stable sort is fast here, because it merges ascending runs.
        return room, np.sort(bins, kind="stable")

    def put(self, room: int, bins: np.ndarray) -> None:
        """Add bins with equal free space `room`; bins without free space are not added."""
        if not room or not len(bins):
            return
        if room not in self._bins:
            insort(self._rooms, room)
            self._bins[room] = []
        self._bins[room].append(bins)


def pieces_of_documents(stream: Stream, eos_id: int, seq_len: int) -> Iterator[np.ndarray]:
    """Cut each document of a stream into pieces of at most `seq_len` tokens, in stream order.

    Yields (3, k) int64 arrays with one column per piece. The rows are: position of the piece in the
    stream, length of the piece, and position of the piece in its document.
    """
    # Start of the unfinished document, and of its next piece.
    document = place = 0
    for stop, ends in document_ends(stream, eos_id):
        documents = np.append(document, ends)
        places = np.append(place, ends)
        # A document that continues after the block yields only pieces of `seq_len` tokens, because
        # the length of its last piece is not known yet.
        open_end = stop
        if stop < len(stream):
            open_end -= (stop - int(places[-1])) % seq_len
        tokens = np.append(ends, open_end) - places
        counts = -(-tokens // seq_len)
        # Pieces of the block before each document, then the number of each piece among its
        # document's pieces in this block.
        pieces_before = np.cumsum(counts) - counts
        piece_numbers = np.arange(counts.sum()) - np.repeat(pieces_before, counts)
        cut_tokens = seq_len * piece_numbers
        starts = np.repeat(places, counts) + cut_tokens
        remaining = np.repeat(tokens, counts) - cut_tokens
        lengths = np.minimum(remaining, seq_len)
        positions = starts - np.repeat(documents, counts)
        yield np.stack((starts, lengths, positions))
        document = int(documents[-1])
        place = open_end


def windows(parts: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Concatenate arrays along axis 1, and yield the result in windows of `size` columns."""
    pending: list[np.ndarray] = []
    for part in parts:
        pending.append(part)
        columns = sum(array.shape[1] for array in pending)
        if columns < size:
            continue
        joined = np.concatenate(pending, axis=1)
        full_windows = columns // size
        full = full_windows * size
        yield from np.split(joined[:, :full], full_windows, axis=1)
        pending = [joined[:, full:]]
    rest = np.concatenate(pending, axis=1)
    if rest.size:
        yield rest


@dataclass(frozen=True)
class PackingCounts:
    documents: int
    documents_cut: int
    """Documents longer than a sequence."""
    tokens: int
    sequences: int
    padding: int
    """Targets without a token."""

    @property
    def padding_share(self) -> float:
        return self.padding / (self.tokens + self.padding)

    def text(self) -> str:
        return (
            f"best fit, {self.documents:,} documents in {self.sequences:,} sequences; longer than "
            f"a sequence, so cut: {self.documents_cut:,}; dropped tokens: 0; "
            f"padding: {self.padding:,} tokens ({self.padding_share:.2%})"
        )

    def numbers(self) -> dict[str, float]:
        return {**asdict(self), "padding_share": self.padding_share}

    def __add__(self, other: "PackingCounts") -> "PackingCounts":
        totals = {name: count + getattr(other, name) for name, count in vars(self).items()}
        return PackingCounts(**totals)


@dataclass(frozen=True)
class PlanFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PlanRecord:
    counts: PackingCounts
    files: dict[str, PlanFile]

    def check(self, directory: Path) -> None:
        least_count = min(vars(self.counts).values())
        if least_count < 0 or self.files.keys() != ARRAYS.keys():
            raise ValueError(f"counts must be at least 0, and files must be {', '.join(ARRAYS)}")
        for name in ARRAYS:
            check_size(directory / name, self.files[name].bytes)
        # Sizes in bytes: an element has 8 bytes in `starts` and `firsts`, 4 in `lengths`.
        starts, lengths, firsts = [self.files[name].bytes for name in ARRAYS]
        expected_firsts = 8 * (self.counts.sequences + 1)
        if starts != 2 * lengths or firsts != expected_firsts:
            raise ValueError("the file sizes do not match each other or counts.sequences")


def write_plan(stream: Stream, eos_id: int, seq_len: int, directory: Path) -> None:
    """Pack the documents of a stream into sequences, and write the packing plan to a directory."""
    started = time.monotonic()
    to_stderr(f"packing documents into sequences of {seq_len:,} tokens")
    documents = 0
    cut_documents = 0
    sequences = 0
    pieces = 0
    files = [HashedFile(directory / name) for name in ARRAYS]

    def write(*arrays: Any) -> None:
        for file, dtype, values in zip(files, ARRAYS.values(), arrays, strict=True):
            file.write(np.ascontiguousarray(values, dtype))

    with track("packing", len(stream)) as advance:
        all_pieces = pieces_of_documents(stream, eos_id, seq_len)
        for window in windows(all_pieces, PACKING_WINDOW):
            _, lengths, positions = window
            # The last piece of a cut document takes one more place: an EOS without a target
            # separates the piece from the document before. A piece of T tokens needs no EOS.
            needs_eos = (positions > 0) & (lengths < seq_len)
            bins, count = best_fit_decreasing(lengths + needs_eos, seq_len)
            # A stable sort keeps the pieces of a sequence in corpus order.
            by_sequence = np.argsort(bins, kind="stable")
            starts, lengths, positions = window[:, by_sequence]
            per_sequence = np.bincount(bins)
            firsts = pieces + np.cumsum(per_sequence) - per_sequence
            write(starts, lengths, firsts)
            documents += int((positions == 0).sum())
            # A document longer than a sequence has exactly one piece at this position.
            cut_documents += int((positions == seq_len).sum())
            sequences += count
            pieces += len(bins)
            advance(int(lengths.sum()))
    # `firsts` has one entry more than there are sequences: the end of the last sequence.
    write([], [], [pieces])
    padding = sequences * seq_len - len(stream)
    counts = PackingCounts(documents, cut_documents, len(stream), sequences, padding)
    plan_files: dict[str, PlanFile] = {}
    for file in files:
        name, sha256 = file.close()
        path = directory / name
        plan_files[name] = PlanFile(path.stat().st_size, sha256)
        # The hash was computed while writing, so the first reader need not hash the file again.
        leave_mark(path, sha256, identity_of(path))
    record = PlanRecord(counts, plan_files)
    text = json.dumps(asdict(record), indent=2) + "\n"
    (directory / PLAN).write_text(text, encoding="utf-8")
    to_stderr(f"packed {documents:,} documents in {time.monotonic() - started:.0f} s")


class PackingPlan:
    """Packing plan on disk, which lists the pieces of documents in each sequence."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with usable(directory / PLAN, directory):
            record = read_typed(directory / PLAN, PlanRecord, follow=True)
            record.check(directory)
        self.counts = record.counts
        self._files = record.files

    def __getitem__(self, sequence: int) -> list[tuple[int, int]]:
        """Return (position of first token, length) of each document piece in a sequence.

        Raises DataError if the files of the plan are damaged.
        """
        starts, lengths, firsts = self._arrays
        first, stop = firsts[sequence : sequence + 2].tolist()
        piece_starts = starts[first:stop].tolist()
        piece_lengths = lengths[first:stop].tolist()
        return list(zip(piece_starts, piece_lengths, strict=True))

    def require(self, fits: bool) -> None:
        with usable(self._directory / PLAN, self._directory):
            if not fits:
                raise ValueError("a piece exceeds its sequence or the corpus")

    @cached_property
    def _arrays(self) -> list[FileArray]:
        arrays = []
        for name, dtype in ARRAYS.items():
            arrays.append(checked_array(self._directory / name, dtype, self._files[name].sha256))
        return arrays

    # File descriptors are valid in one process only, so a copy opens the files again.
    def __reduce__(self) -> tuple[object, ...]:
        return PackingPlan, (self._directory,)
