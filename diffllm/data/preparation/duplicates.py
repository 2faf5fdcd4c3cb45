"""Documents whose text has been seen before, in their own source or in one that is named earlier.

They are found by hashes, 8 bytes a document in the cache, where another mixture of the same corpora
finds them again. A range of hashes is compared at a time, so that memory is bounded whatever the
number of documents. Of a billion texts, two different ones have one hash with a probability of 3%.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from diffllm.core.files import build_once
from diffllm.core.files.arrays import read_array, write_array
from diffllm.data.preparation.config import PrepareConfig
from diffllm.data.preparation.encoding import batches, document_hashes, left_out_path
from diffllm.data.preparation.sharing import share_parts
from diffllm.data.preparation.workers import Meter
from diffllm.data.text.corpus import Corpus
from diffllm.data.text.file_index import combined_hash
from diffllm.data.verified import usable
from diffllm.data.waiting import held, said_if_long

AT_ONCE = 2**25
"""Hashes that are compared at a time, in about 1 GB of memory."""


@dataclass(frozen=True)
class Hashes:
    """The hashes of a corpus's documents in a directory, a file a part."""

    corpus: Corpus
    directory: Path

    def path(self, number: int) -> Path:
        """Return the file of a part: (documents,) uint64, of those that are more than blank."""
        return self.directory / f"part-{number:05d}.npy"

    def is_done(self, number: int) -> bool:
        """Whether a part has been hashed."""
        try:
            read_array(self.path(number), "<u8")
        except (OSError, ValueError):  # also for a file that a power cut has cut off
            return False
        return True

    def write(self, number: int, meter: Meter, threads: int) -> None:
        """Hash the documents of a part."""
        found = [np.zeros(0, np.uint64)]
        for documents, _ in batches(self.corpus.parts[number]):
            found.append(document_hashes(documents))
            meter.add(sum(len(document.text) for document in documents), 0)
        write_array(self.path(number), np.concatenate(found))

    def read(self) -> Iterator[np.ndarray]:
        """Yield the hashes of the parts in order, (documents,) uint64 each."""
        for number in range(len(self.corpus.parts)):
            with usable(self.path(number), self.directory):
                hashes = read_array(self.path(number), "<u8")
            yield hashes


def find_duplicates(
    before: Sequence[Corpus], corpus: Corpus, cache_dir: Path, how: PrepareConfig
) -> Path:
    """Find the documents of a corpus that are there before, in it or in one that comes ahead.

    Returns a directory that names them for each part, as `left_out_path` says. A node hashes what
    no other has hashed, or is hashing. Raises as `share_parts`.
    """
    hashed = [hashes_of(each, cache_dir, how) for each in (*before, corpus)]
    key = combined_hash(["with checksums", *(hashes.directory.name for hashes in hashed)])
    directory = cache_dir / "duplicates" / key[:32]
    with said_if_long(f"the comparison of documents in {directory}"):
        build_once(directory, partial(write_left_out, hashed))
    return directory


def hashes_of(corpus: Corpus, cache_dir: Path, how: PrepareConfig) -> Hashes:
    """Hash the documents of a corpus, but for the parts that have been hashed."""
    division = combined_hash([corpus.identity, [part.size for part in corpus.parts]])
    hashes = Hashes(corpus, cache_dir / "hashes" / division[:32])
    hashes.directory.mkdir(parents=True, exist_ok=True)
    numbers = range(len(corpus.parts))
    first = how.node_rank * len(numbers) // how.num_nodes
    order = [*numbers[first:], *numbers[:first]]  # nodes begin apart
    what = f"hashes documents into {hashes.directory}"
    with held(Path(f"{hashes.directory}{how.of_node}.lock"), what):
        share_parts(
            "hashing",
            corpus.parts,
            order,
            do=hashes.write,
            is_done=hashes.is_done,
            claims=hashes.directory,
            log=Path(f"{hashes.directory}{how.of_node}.log"),
            how=how,
        )
    return hashes


def write_left_out(hashed: Sequence[Hashes], directory: Path) -> None:
    """Write, for each part of the last corpus, the numbers of its documents that came before."""

    def all_parts() -> Iterator[np.ndarray]:
        return (hashes for each in hashed for hashes in each.read())

    ends = np.cumsum([0, *map(len, all_parts())], dtype=np.int64)
    ranges = -(-int(ends[-1]) // AT_ONCE)
    bounds = [k * 2**64 // ranges for k in range(ranges)] if ranges else []
    repeated = [np.zeros(0, np.int64)]
    for low, high in pairwise([*bounds, 2**64]):
        values, places = [], []
        for part, begin in zip(all_parts(), ends.tolist(), strict=False):
            here = np.flatnonzero((part >= low) & (part <= high - 1))
            values.append(part[here])
            places.append(begin + here)
        first = np.unique(np.concatenate(values), return_index=True)[1]
        repeated.append(np.delete(np.concatenate(places), first))
    left_out = np.sort(np.concatenate(repeated))
    of_last = len(ends) - 1 - len(hashed[-1].corpus.parts)
    for number, (start, stop) in enumerate(pairwise(ends[of_last:].tolist())):
        low, high = np.searchsorted(left_out, (start, stop))
        write_array(left_out_path(directory, number), left_out[low:high] - start)
