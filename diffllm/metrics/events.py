"""The file events.jsonl: spikes, skipped updates, divergence, restarts and stalls of a run."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from diffllm.core.errors import CheckpointError
from diffllm.core.files import open_regular, open_to_append, parse_json, read_lines, readable
from diffllm.core.printing import finite_values
from diffllm.core.run_files import RunFile
from diffllm.core.typed import made
from diffllm.metrics.growing_file import GrowingFile
from diffllm.metrics.spikes import Spike

EVENT_KINDS = {
    "loss_spike": "the loss is a spike",
    "grad_spike": "the gradient norm is a spike",
    "skipped": "the update was skipped",
    "diverged": "the run ended without a finite held-out loss",
    "restart": "a process resumed the run, after the checkpoint of this step",
    "stall": "a rank was missing or waited too long, after this step",
}
OF_PROCESSES = ("restart", "stall")
"""Kinds that a resume keeps: training repeats steps, but processes stay in the past."""
LARGEST_SAMPLE = 2**53
"""Limit of sample numbers."""
LARGEST_EVENTS_FILE = 2**53
"""Limit in bytes: a stall is written to a file of any size."""
TAIL = 8192
"""Bytes at the end of the file that contain the last line, if it is a stall."""
MOST_BATCH_SAMPLES = 2**20
"""Maximum number of samples of an event per source, more than any global batch has."""


@dataclass(frozen=True)
class BatchPlace:
    """The samples of one step, independent of batch sizes, mixture weights and checkpoints."""

    tokens_hash: str
    """First characters of the hash of all prepared tokens."""
    seed: int
    stage: int
    seq_len: int
    packing: str
    samples: dict[str, list[int]]
    """First sample and end of the samples by source, in the order of the source; see `Place`."""

    def check(self) -> None:
        """Raise ValueError if a range of samples is invalid."""
        for source, bounds in self.samples.items():
            first, stop = bounds if len(bounds) == 2 else (0, 0)
            if not 0 <= first < stop <= min(first + MOST_BATCH_SAMPLES, LARGEST_SAMPLE):
                raise ValueError(f"batch.samples.{source}={bounds} must be a first sample and end")


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl."""

    kind: str
    """A key of EVENT_KINDS."""
    step: int
    tokens: int
    """Tokens that the run has read up to `step`."""
    definition: str | None = None
    """Definition of the spike, such as "spikes_detrended"."""
    value: float | None = None
    """Gradient norm for grad_spike, loss in nats per token for loss_spike and skipped."""
    height: float | None = None
    """Distance of a spike in standard deviations of its definition, see `Spike`."""
    lr: float | None = None
    batch: BatchPlace | None = None
    detail: str = ""

    def check(self) -> None:
        """Raise ValueError if a value is invalid, as in a damaged file."""
        if self.kind not in EVENT_KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(EVENT_KINDS)}")
        if min(self.step, self.tokens) < 0:
            raise ValueError("step and tokens must be at least 0")
        if self.batch:
            self.batch.check()

    def line(self) -> bytes:
        return json.dumps(finite_values(asdict(self)), allow_nan=False).encode() + b"\n"


def events_of_step(
    skipped: Event, was_skipped: bool, spikes: Mapping[str, Spike], grad_norm: float
) -> list[Event]:
    """Return the events of one step.

    Args:
        skipped: the event of a skipped update at this step.
        was_skipped: whether the update was skipped.
        spikes: result of `SpikeMonitor.update`.
        grad_norm: gradient norm of the step.
    """
    events = []
    for counter, spike in spikes.items():
        definition, _, series = counter.partition("/")
        event = replace(skipped, kind=f"{series}_spike", definition=definition, height=spike.height)
        if series != "loss":
            event = replace(event, value=grad_norm)
        events.append(event)
    return [*events, skipped] if was_skipped else events


def short_hash(tokens_hash: str) -> str:
    """Return the characters of a hash that identify the tokens of an event."""
    return tokens_hash[:16]


def samples_text(event: Event) -> str:
    """Return the samples of an event by source, such as "corpus 208-215"; "" without a batch."""
    ranges = event.batch.samples.items() if event.batch else ()
    return ", ".join(f"{source} {first}-{stop - 1}" for source, (first, stop) in ranges)


def parse_event(line: str) -> Event:
    """Parse a line of events.jsonl. Raises ValueError for an invalid line."""
    event = made(Event, parse_json(line))
    event.check()
    return event


def read_events(run: Path) -> list[Event]:
    """Read the events of a run, oldest first.

    An incomplete last line is ignored. Raises CheckpointError if the file is missing or invalid.
    """
    file = run / RunFile.EVENTS
    if not file.exists():
        raise CheckpointError(
            f"{file} does not exist: an older version trained this run; if the run resumes, "
            "events of later steps are recorded"
        )
    events = []
    with readable(file):
        for number, line in enumerate(read_lines(file), 1):
            try:
                events.append(parse_event(line))
            except ValueError as error:
                # Without a line break, a process is still writing the line, or was killed.
                if line.endswith("\n"):
                    raise ValueError(f"is damaged: line {number}: {error}") from None
    return events


class EventsFile:
    """The file events.jsonl of a run.

    `last_step` is the step from which the run resumes, or 0 for a new run. Training repeats later
    steps, so their events are removed, except those in OF_PROCESSES. If writing fails, events are
    kept in memory and written later. Raises CheckpointError if the file cannot be created.
    """

    def __init__(self, path: Path, last_step: int = 0):
        self.ends: list[Event] = []
        """Divergences that earlier processes of the run have written."""
        lines = []
        with readable(path), contextlib.suppress(FileNotFoundError):
            for line in read_lines(path):
                # A kill or a full disk may have cut the line.
                with contextlib.suppress(ValueError):
                    kind, step = kind_and_step(line)
                    if step <= last_step or kind in OF_PROCESSES:
                        if kind == "diverged":
                            self.ends.append(parse_event(line))
                        lines.append(line.rstrip("\n").encode() + b"\n")
        self.file = GrowingFile(path, b"".join(lines), "events")

    def write(self, event: Event) -> None:
        # Another process may append a stall: a failed write removes an incomplete line at the end.
        with locked(self.file.file):
            self.file.append(event.line())

    def write_end(self, event: Event) -> None:
        """Write the divergence of a run, unless a process killed at the same step has done so."""
        if event not in self.ends:
            self.write(event)

    def close(self) -> None:
        with locked(self.file.file):
            self.file.close()


def kind_and_step(line: str) -> tuple[str, int]:
    """Return two fields of a line of events.jsonl; `parse_event` takes several times as long.

    Raises ValueError if a field is missing or has the wrong type.
    """
    content = parse_json(line)
    fields = content if isinstance(content, dict) else {}
    kind, step = fields.get("kind"), fields.get("step")
    if not isinstance(kind, str) or type(step) is not int:
        raise ValueError("is not an event")
    return kind, step


@contextlib.contextmanager
def locked(file: IO[bytes]) -> Iterator[None]:
    """Lock an open file for other users of this function; on file systems with locks only.

    Closing the file in this context also releases the lock.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if not file.closed:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def append_stall(run: Path, event: Event) -> None:
    """Write a stall at once, from any thread or rank, unless another rank has just done so.

    Raises OSError if the file cannot be written.
    """
    # Several ranks may report the stall. The lock covers the read and the write, so that only the
    # first of them writes.
    file = run / RunFile.EVENTS
    with os.fdopen(open_to_append(file), "ab", buffering=0) as stream, locked(stream):
        last = last_event(file)
        if last is None or (last.kind, last.step) != (event.kind, event.step):
            stream.write(event.line())


def last_event(path: Path) -> Event | None:
    """Return the event in the last line of a file; None if the line is invalid or very long."""
    with open_regular(path, LARGEST_EVENTS_FILE) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL))
        lines = stream.read().decode(errors="replace").splitlines()
    with contextlib.suppress(ValueError):
        return parse_event(lines[-1]) if lines else None
    return None
