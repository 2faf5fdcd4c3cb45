"""The parts of a corpus, shared by the processes of a node, with their progress."""

from collections.abc import Callable, Sequence
from pathlib import Path

from diffllm.data.preparation.config import PrepareConfig
from diffllm.data.preparation.reporter import Reporter
from diffllm.data.preparation.workers import (
    SIZE_DONE,
    TEXT_BYTES,
    TOKENS,
    Counts,
    Meter,
    available_cores,
    work_through,
)
from diffllm.data.text.corpus import Part


def share_parts(
    doing: str,
    parts: Sequence[Part],
    numbers: Sequence[int],
    do: Callable[[int, Meter, int], None],
    is_done: Callable[[int], bool],
    claims: Path,
    log: Path,
    how: PrepareConfig,
) -> None:
    """Do the parts of these numbers that are not done, and say how far that is.

    Raises what `do` raises, DataError where a process is killed.

    Args:
        doing: what is done, for the screen.
        do: takes the number of a part, what it counts with, and how many threads it may use.
        claims: directory of the files by which parts are claimed.
        log: file of progress.
    """
    todo = [number for number in numbers if not is_done(number)]
    if not todo:
        return
    cores = available_cores()
    counts = Counts(min(how.processes or cores, len(todo)))
    threads = max(1, cores // counts.processes)
    sizes = [max(1, part.size) for part in parts]
    whole = sum(sizes[number] for number in numbers)
    before = 1 - sum(sizes[number] for number in todo) / whole
    with Reporter(doing, log) as reporter:
        if before:
            reporter.line(f"going on: {len(todo)} of {len(numbers)} parts are left")

        def tick() -> None:
            read = sorted({parts[number].name for number in counts.current()})
            others = [f"part {number} of another process" for number in counts.waiting()]
            done = before + counts.total(SIZE_DONE) / whole
            encoded = counts.total(TEXT_BYTES), counts.total(TOKENS)
            reporter.show(min(done, 1.0), before, *encoded, read or others)

        def in_threads(number: int, meter: Meter) -> None:
            do(number, meter, threads)

        def names(numbers: list[int]) -> str:
            return ", ".join(sorted({parts[number].name for number in numbers})[:3]) or "nothing"

        work_through(todo, in_threads, is_done, sizes.__getitem__, claims, counts, tick, names)
