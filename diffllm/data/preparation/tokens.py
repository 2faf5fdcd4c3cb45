"""Encode all parts of a corpus into one directory of token shards.

Until all parts are encoded, the shards are in a directory with ".partial-" in its name, next to
one record per encoded part. A restarted preparation skips the parts that have a record.
"""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from diffllm.core.atomic_directories import publish
from diffllm.core.errors import DataError
from diffllm.core.files import locked
from diffllm.core.machine import usable_cpus
from diffllm.core.printing import to_stderr
from diffllm.data.preparation.encoding import HASH_OFFSET, Encoding, PartRecord, next_held_out
from diffllm.data.preparation.workers import (
    DONE,
    READING,
    Counts,
    PrepareConfig,
    report,
    work_through,
)
from diffllm.data.shards import LARGEST_SHARE, SPLITS, Manifest, Split, together, unigram_entropy
from diffllm.data.streams import TokenStream, as_targets, token_counts
from diffllm.data.text.corpus import Corpus
from diffllm.data.text.file_index import combined_hash
from diffllm.data.text.skipped import report_skipped
from diffllm.data.tokenizer import Tokenizer, tokenizer_in, write_tokenizer
from diffllm.data.verified import identity_of, leave_mark, usable


@dataclass(frozen=True)
class TokensJob:
    """Encodes a corpus to token shards in the new directory `final`.

    If `cut` is false, about `heldout_fraction` of the documents are held out. If `cut` is true, the
    corpus parts contain pieces of a single document, and all pieces of the last part are held out.
    `eos_token` is the EOS; None: the EOS that the files of the tokenizer name.
    """

    corpus: Corpus
    tokenizer: Path
    heldout_fraction: float
    final: Path
    cut: bool = False
    eos_token: str | None = None

    @cached_property
    def partial(self) -> Path:
        # The hash of the division is in the name: records of another division would not fit.
        division = [part.size for part in self.corpus.parts]
        division_hash = combined_hash(division)[:8]
        return self.final.with_name(f"{self.final.name}.partial-{division_hash}")

    def build(self, prepare_cfg: PrepareConfig) -> None:
        """Encode the unfinished parts of the corpus, then move the shards of all parts to `final`.

        Does nothing if `final` exists. Raises DataError if a part is unreadable or a process was
        killed, and OSError if a write fails. After an error, the next call skips encoded parts.
        """
        self.final.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(f"{self.final}.lock"), f"prepares {self.final}"):
            # Another process may have finished while this process waited for the lock.
            if self.final.is_dir():
                return
            to_stderr(f"preparing tokens: {self.corpus.description}, in {self.final}")
            started = time.monotonic()
            tokens = self.partial / "tokens"
            tokens.mkdir(parents=True, exist_ok=True)
            report_skipped(self.corpus.skipped, tokens, self.final)
            # Encode with the copy, so that the stored tokenizer is the one that encoded the tokens.
            write_tokenizer(self.tokenizer, tokens, self.eos_token)
            tokenizer = Tokenizer.from_file(tokenizer_in(tokens))
            below = math.floor(self.heldout_fraction * 2**64) - HASH_OFFSET
            encoding = Encoding(self.corpus, tokenizer, self.partial, below, self.cut)
            self.encode(encoding, prepare_cfg)
            self.join(encoding, prepare_cfg, started)

    def encode(self, encoding: Encoding, prepare_cfg: PrepareConfig) -> None:
        """Encode the unfinished parts of the corpus in parallel processes."""
        parts = self.corpus.parts
        todo = [number for number in range(len(parts)) if not encoding.is_done(number)]
        if not todo:
            return
        counts = Counts(len(parts))
        cores = usable_cpus()
        processes = min(prepare_cfg.processes or cores, len(todo))
        # With fewer parts than cores, the tokenizer uses several threads per part.
        threads = max(1, cores // processes)
        # Parts of a hub dataset have the unknown size 0; each of them counts the same.
        sizes = [max(1, part.size) for part in parts]
        corpus_size = sum(sizes)
        share_before = 1 - sum(sizes[number] for number in todo) / corpus_size
        started = time.monotonic()
        if share_before:
            to_stderr(f"resuming: {len(todo)} of {len(parts)} parts are left")

        # These functions run in this process, and see the states that the workers write.
        def reading() -> str:
            # A set, because several parts of a large file have the same name.
            names: set[str] = set()
            for number in todo:
                if counts.state[number] == READING:
                    names.add(parts[number].name)
            return ", ".join(sorted(names))

        def tick() -> None:
            finished_size = 0
            for number in todo:
                if counts.state[number] == DONE:
                    finished_size += sizes[number]
            # Rounding could give a share slightly above 1.
            share = min(share_before + finished_size / corpus_size, 1.0)
            seconds = time.monotonic() - started
            report(counts, share, share_before, seconds, reading())

        work = partial(encoding.work, counts=counts, threads=threads)
        work_through(todo, work, processes, tick, reading)

    def join(self, encoding: Encoding, prepare_cfg: PrepareConfig, started: float) -> None:
        records = self.records()
        if not self.cut:
            # The final limit depends on the counts of all parts. With this limit, only parts with
            # documents between the two limits are encoded again.
            limit = heldout_limit(records, encoding.heldout_below)
            self.encode(replace(encoding, heldout_below=limit), prepare_cfg)
            records = self.records()
        manifest = self.manifest(records, encoding)
        hashes: dict[str, str] = {}
        for split in manifest.splits.values():
            for shard in split.shards:
                hashes[shard.file] = shard.sha256
                # A shard of a corpus with prompts also has a file with the loss mask.
                if shard.mask and shard.mask_sha256:
                    hashes[shard.mask] = shard.mask_sha256
        for path in encoding.directory.glob("*-*-*"):
            # Shards of an earlier attempt, for example with another limit.
            if path.name not in hashes:
                path.unlink()
        # Before publishing: the text may have changed since its hash was computed.
        self.corpus.check()
        manifest.save(encoding.directory)
        publish(encoding.directory, self.final)
        # The writers have just hashed the shards, so the first run need not hash them again.
        for name, sha256 in hashes.items():
            path = self.final / name
            leave_mark(path, sha256, identity_of(path))
        for attempt in self.final.parent.glob(f"{self.final.name}.partial-*"):
            shutil.rmtree(attempt, ignore_errors=True)
        train = manifest.splits["train"].tokens
        heldout = manifest.splits["heldout"].tokens
        pieces = ", pieces of a single document," if manifest.cut else ""
        to_stderr(
            f"prepared {train:,} training and {heldout:,} held-out tokens{pieces} "
            f"in {time.monotonic() - started:.0f} s"
        )

    def records(self) -> list[PartRecord]:
        numbers = range(len(self.corpus.parts))
        with usable(self.partial, self.partial):
            return [PartRecord.load(self.partial, number) for number in numbers]

    def manifest(self, records: Sequence[PartRecord], encoding: Encoding) -> Manifest:
        splits: dict[str, Split] = {}
        for name in SPLITS:
            splits[name] = together([record.splits[name] for record in records])
        blank_documents = sum(record.skipped_empty for record in records)
        # Without token counts: they are counted below with a stream, which needs a manifest.
        manifest = Manifest.of(
            encoding.tokenizer,
            np.zeros(1),
            source=self.corpus.description,
            corpus=self.corpus.identity,
            skipped_empty=self.corpus.skipped_empty + blank_documents,
            skipped_undecodable=self.corpus.skipped_undecodable,
            splits=splits,
            cut=self.cut,
            note=self.corpus.note,
        )
        heldout = TokenStream(encoding.directory, manifest, "heldout")

        def targets(start: int, stop: int) -> np.ndarray:
            return as_targets(heldout, start, heldout.tokens(start, stop))

        counts = token_counts(targets, 0, len(heldout), manifest.vocab_size)
        return replace(manifest, heldout_unigram_entropy=unigram_entropy(counts))


def heldout_limit(records: Sequence[PartRecord], below: int) -> int:
    """Return the hash limit of the held-out split: documents with a lower hash are held out.

    `records` describe the parts of the corpus, which were encoded with `below` as limit. Return
    `below`, except in two cases:
    - If one split is empty, return a limit that gives this split one distinct document.
    - If the held-out split is too small, return a higher limit, so that the split has its minimum
      size but at most LARGEST_SHARE of the corpus.
    Raises DataError if the corpus has fewer than two distinct documents.
    """
    extreme_hashes: list[int] = []
    following: list[list[int]] = []
    for record in records:
        following += record.following
        for value in (record.least, record.most):
            if value is not None:
                extreme_hashes.append(value)
    least = min(extreme_hashes, default=0)
    most = max(extreme_hashes, default=0)
    if least == most:
        raise DataError(
            "the corpus must contain at least two different documents with text, because "
            "one document is held out; add documents"
        )
    # At least one distinct document is on each side of the limit.
    limit = least + 1 if least >= below else min(below, most)
    train = documents_and_tokens(records, "train")
    held = documents_and_tokens(records, "heldout")
    # Without any row, the array would not have three columns.
    candidates = np.array(following, np.int64).reshape(-1, 3)
    rows = next_held_out(candidates, held)
    held_afterwards = held + rows[:, 1:].cumsum(axis=0)
    is_allowed = held_afterwards <= LARGEST_SHARE * (train + held)
    chosen_hashes = rows[is_allowed.all(axis=1), 0]
    if not len(chosen_hashes):
        return limit
    return max(limit, int(chosen_hashes[-1]) + 1)


def documents_and_tokens(records: Sequence[PartRecord], name: str) -> np.ndarray:
    """Return the numbers of documents and tokens of a split in all parts, (2,) int64."""
    counts = []
    for record in records:
        split = record.splits[name]
        counts.append([split.documents, split.tokens])
    return np.array(counts).sum(axis=0)
