"""All parts of a corpus to one directory of shards, whose manifest joins them.

Until then they lie in a directory whose name has ".partial-" in it, with a record of each part that
is done, from which a later start goes on.
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from filelock import Timeout

from diffllm.core.errors import DataError
from diffllm.core.files import locked, publish, read_text, replace_file
from diffllm.core.printing import to_stderr
from diffllm.data.preparation.arrays import read_array
from diffllm.data.preparation.config import PrepareConfig
from diffllm.data.preparation.encoding import HALF, Encoding, PartRecord, counts_path
from diffllm.data.preparation.reporter import Reporter
from diffllm.data.preparation.workers import (
    SIZE_DONE,
    TEXT_BYTES,
    TOKENS,
    Counts,
    Meter,
    available_cores,
    claim,
    work_through,
)
from diffllm.data.shards import SPLITS, Manifest, together
from diffllm.data.text.corpus import Corpus
from diffllm.data.text.file_index import combined_hash
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.tokenizer_files import tokenizer_in, write_tokenizer
from diffllm.data.verified import identity_of, leave_mark, usable
from diffllm.data.waiting import held

ORIGIN = "origin"
"""The file, beside the records of parts, that says where their corpus lies."""
TOKENS_BESIDE = "tokens"
"""The directory, beside the records of parts, that becomes that of all tokens."""


@dataclass(frozen=True)
class TokensJob:
    """A corpus that becomes tokens in one directory.

    Args:
        cut: that the corpus is a single document, whose last part is held out.
        origin: hash of where the corpus lies and what is made of it, whatever its content.
    """

    corpus: Corpus
    tokenizer: Path
    heldout_fraction: float
    final: Path
    cut: bool = False
    origin: str | None = None

    @cached_property
    def partial(self) -> Path:
        """The directory of parts that are done; another division into parts has another."""
        division = [part.size for part in self.corpus.parts]
        return self.final.with_name(f"{self.final.name}.partial-{combined_hash(division)[:8]}")

    def build(self, how: PrepareConfig) -> None:
        """Encode the parts that are not done, and join all.

        Raises DataError for a corpus that cannot be read, OSError for a directory that cannot be
        written. What is done by then stays.
        """
        self.final.parent.mkdir(parents=True, exist_ok=True)
        with held(Path(f"{self.final}.lock"), f"prepares {self.final}"):
            if self.final.is_dir():
                self.remove_partial()
                return
            to_stderr(f"preparing tokens: {self.corpus.description}, in {self.final}")
            started = time.monotonic()
            encoding = self.encoding()
            self.remove_outdated()
            self.encode(encoding, how, encoding.is_done)
            self.join(encoding, how, started)

    def encoding(self) -> Encoding:
        """Make the directories, and return what encodes a part."""
        tokens = self.partial / TOKENS_BESIDE
        tokens.mkdir(parents=True, exist_ok=True)
        replace_file(self.partial / ORIGIN, str(self.origin))
        write_tokenizer(self.tokenizer, tokens)
        return Encoding(
            parts=self.corpus.parts,
            tokenizer=Tokenizer.from_file(tokenizer_in(tokens)),
            records=self.partial,
            directory=tokens,
            heldout_below=math.floor(self.heldout_fraction * 2**64),
            last_is_heldout=self.cut,
            has_prompts=self.corpus.has_prompts,
        )

    def encode(
        self, encoding: Encoding, how: PrepareConfig, is_done: Callable[[int], bool]
    ) -> None:
        """Encode the parts that are not done, in processes, and report the progress.

        Raises as `build`, and DataError for a process that is killed.
        """
        parts = encoding.parts
        todo = [number for number in range(len(parts)) if not is_done(number)]
        if not todo:
            return
        cores = available_cores()
        counts = Counts(min(how.processes or cores, len(todo)))
        threads = max(1, cores // counts.processes)
        sizes = [max(1, part.size) for part in parts]
        before = 1 - sum(sizes[number] for number in todo) / sum(sizes)
        with Reporter(Path(f"{self.final}.log")) as reporter:
            if before:
                reporter.line(f"going on: {len(todo)} of {len(parts)} parts are left")

            def tick() -> None:
                read = sorted({parts[number].name for number in counts.current()})
                others = [f"part {number} of another process" for number in counts.waiting()]
                done = before + counts.total(SIZE_DONE) / sum(sizes)
                encoded = counts.total(TEXT_BYTES), counts.total(TOKENS)
                reporter.show(min(done, 1.0), before, *encoded, read or others)

            def in_threads(number: int, meter: Meter) -> None:
                encoding.encode(number, meter, threads)

            def names(numbers: list[int]) -> str:
                read = sorted({parts[number].name for number in numbers})
                return ", ".join(read[:3]) or "nothing"

            try:
                work_through(
                    todo, in_threads, is_done, sizes.__getitem__, self.partial, counts, tick, names
                )
            except BaseException:
                remove_unfinished(encoding, is_done)
                raise

    def join(self, encoding: Encoding, how: PrepareConfig, started: float) -> None:
        """Write the manifest of all parts, and give the directory its name."""
        parts = range(len(self.corpus.parts))
        records = self.records(parts)
        if not self.cut:
            below = split_hash(records, encoding.heldout_below)
            again = replace(encoding, heldout_below=below)
            self.encode(again, how, lambda number: not again.is_stale(number))
            records = self.records(parts)
        manifest = self.manifest(records, encoding)
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        named = {name for shard in shards for name in (shard.file, shard.mask)}
        for path in encoding.directory.glob("*-*-*"):
            if path.name not in named:  # of a former attempt
                path.unlink()
        self.corpus.check()  # so that no other text gets its hash
        manifest.save(encoding.directory)
        publish(encoding.directory, self.final)
        for shard in shards:
            path = self.final / shard.file
            leave_mark(path, shard.sha256, identity_of(path))
            if shard.mask and shard.mask_sha256:
                path = self.final / shard.mask
                leave_mark(path, shard.mask_sha256, identity_of(path))
        self.remove_partial()
        train, heldout = (manifest.splits[split].tokens for split in SPLITS)
        to_stderr(
            f"prepared {train:,} training and {heldout:,} held-out tokens"
            f"{', the end of the one document,' * manifest.cut} "
            f"in {time.monotonic() - started:.0f} s"
        )

    def records(self, parts: Sequence[int]) -> list[PartRecord]:
        """Read the records of all parts; raises DataError for a damaged one."""
        with usable(self.partial, self.partial):
            return [PartRecord.load(self.partial, number) for number in parts]

    def remove_outdated(self) -> None:
        """Remove partial directories of other tokens that no preparation can use, unless a process
        holds their lock: of an earlier content of the same files, of complete tokens, and those
        whose process was killed before it wrote the origin."""
        for partial in self.final.parent.glob("*.partial-*"):
            begun = partial.name.partition(".partial-")[0]
            origin = ""
            with suppress(OSError, ValueError):
                origin = read_text(partial / ORIGIN, 1000)
            begun_in_vain = not origin and not any(partial.glob("part-*.json"))
            complete = partial.with_name(begun).is_dir()
            outdated = begun_in_vain or complete or origin == self.origin
            if begun != self.final.name and outdated:
                remove_unless_held(partial)

    def remove_partial(self) -> None:
        """Remove what is left of the preparation of a directory that is there."""
        for parts_of in self.final.parent.glob(f"{self.final.name}.partial-*"):
            shutil.rmtree(parts_of, ignore_errors=True)

    def manifest(self, records: Sequence[PartRecord], encoding: Encoding) -> Manifest:
        """Describe the shards of all parts together."""
        tokenizer = encoding.tokenizer
        heldout = np.zeros(tokenizer.vocab_size, np.int64)
        for number in range(len(records)):
            with usable(path := counts_path(self.partial, number), self.partial):
                there_are, counts = read_array(path, "<i8", 2)
            heldout[there_are] += counts
        return Manifest.of(
            tokenizer,
            heldout,
            source=self.corpus.description,
            corpus=self.corpus.identity,
            skipped_empty=self.corpus.skipped_empty + sum(r.skipped_empty for r in records),
            skipped_undecodable=self.corpus.skipped_undecodable,
            splits={split: together([r.splits[split] for r in records]) for split in SPLITS},
            cut=self.cut,
            note=self.corpus.note,
        )


def remove_unless_held(partial: Path) -> None:
    """Remove a partial directory unless a process holds the lock of its preparation."""
    begun = partial.name.partition(".partial-")[0]
    lock = partial.with_name(f"{begun}.lock")
    with suppress(Timeout, OSError), locked(lock, wait=False):
        shutil.rmtree(partial)


def split_hash(records: Sequence[PartRecord], below: int) -> int:
    """Return the hash below which documents are held out: the one that is asked for, or the next
    that leaves a document on either side. Raises DataError if all documents are equal."""
    least = HALF + min((r.least for r in records if r.least is not None), default=-HALF)
    most = HALF + max((r.most for r in records if r.most is not None), default=-HALF)
    if least == most:
        raise DataError(
            "the corpus has fewer than two distinct documents that are not blank, too few to hold "
            "one out"
        )
    return least + 1 if least >= below else min(below, most)


def remove_unfinished(encoding: Encoding, is_done: Callable[[int], bool]) -> None:
    """Remove the shards of parts that nobody is working on and that are not done."""
    for path in encoding.directory.glob("*-*-*"):
        number = int(path.name.split("-")[1])
        with suppress(OSError, Timeout), locked(claim(encoding.records, number), wait=False):
            if not is_done(number):
                path.unlink()
