"""Measurements one after another, and contestants in turns."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.measuring import ratios
from harness.records import Records
from harness.worker import Reply, Worker, together


@dataclass(frozen=True)
class Measurement:
    """One call in a process of its own."""

    name: str
    call: str
    """The function, with its module."""
    arguments: dict[str, Any]
    limit: float = 120
    """Seconds, the start of the process included."""
    expected: float = 30
    """Seconds that it takes on a GPU, about; it is not begun if the stage has less left."""


@dataclass(frozen=True)
class Group:
    """Contestants that are built side by side and then take turns."""

    name: str
    contestants: dict[str, dict[str, Any]]
    """Arguments of `build_step` by name; the first is what the others are compared with."""
    rounds: int
    repeats: int
    """Steps in a turn, timed together, after one that is not timed."""
    at_once: int = 1
    """Contestants that make their first steps at the same time: as many as memory has room for."""
    profiled: tuple[str, ...] = ()
    """Contestants of which one step is broken down."""
    limit: float = 240
    """Seconds to build, and again to make the first steps."""
    expected: float = 120
    """Seconds of all of it, as a `Measurement`'s."""


@dataclass
class Runner:
    """Runs measurements until the time of a stage is over."""

    records: Records
    device: str
    logs: Path
    deadline: float
    """When the stage ends, on time.monotonic(); what would end later is not begun."""
    only: str = ""
    contestants: str = "harness.contestants"
    """The module whose functions groups call."""
    left: list[str] = field(default_factory=list)
    """Names for which there was no time."""
    ready: Worker | None = None
    """A process that was started ahead, for the next measurement."""

    def run(self, items: Sequence[Measurement | Group]) -> None:
        """Make all measurements that are `missing`, as far as there is time."""
        todo = list(self.missing(items))
        try:
            for item in todo:
                if time.monotonic() + item.expected > self.deadline:
                    self.left.append(item.name)
                elif isinstance(item, Group):
                    self.run_group(item)
                else:
                    self.run_one(item, ahead=item is not todo[-1])
        finally:
            if self.ready:
                self.ready.close()

    def missing(self, items: Sequence[Measurement | Group]) -> Iterator[Measurement | Group]:
        """Those of `items` that have not succeeded yet and have `only` in their name."""
        for item in items:
            if self.only not in item.name:
                continue
            if isinstance(item, Measurement):
                wanted = not self.records.has(item.name, item.arguments)
            else:
                wanted = not all(self.records.has(*entry) for entry in entries(item))
            if wanted:
                yield item

    def worker(self, name: str) -> Worker:
        """A fresh process."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name.replace(' ', '-').replace('/', '-')}.log"
        return Worker(self.device, log)

    def run_one(self, item: Measurement, ahead: bool) -> None:
        """A measurement, while on a GPU the next one's process loads its modules."""
        start = time.monotonic()
        worker, self.ready = self.ready or self.worker(item.name), None
        if ahead and self.device != "cpu":
            self.ready = self.worker("loaded ahead")
        reply = worker.ask(item.call, item.arguments, self.within(item.limit))
        worker.close()
        took = time.monotonic() - start
        self.records.add(item.name, item.arguments, reply.status, reply.result, took)

    def within(self, limit: float) -> float:
        """A limit that does not overrun the stage's by more than a minute."""
        return min(limit, max(10, self.deadline + 60 - time.monotonic()))

    def run_group(self, group: Group) -> None:
        """Build contestants, warm them up, let them take turns, and break down steps of some."""
        start = time.monotonic()
        if self.ready:
            self.ready.close()
            self.ready = None
        workers = {name: self.worker(f"{group.name} {name}") for name in group.contestants}

        def call(
            function: str, what: dict[str, dict[str, Any]], at_once: float = math.inf
        ) -> dict[str, Any]:
            """Results by name of those that succeed; the others are recorded and left out."""
            path = f"{self.contestants}.{function}"
            calls = {name: (workers[name], path, what[name]) for name in what}
            results = {}
            for name, reply in together(calls, self.within(group.limit), at_once).items():
                if reply.ok:
                    results[name] = reply.result
                else:
                    self.fail(group, name, reply, start)
                    workers.pop(name).kill()
            return results

        try:
            call("build_step", dict(group.contestants))
            first = call("warm", {name: {} for name in workers}, group.at_once)
            times: dict[str, list[float]] = {name: [] for name in workers}
            peaks: dict[str, int | None] = {}
            for round_ in range(group.rounds):
                # There and back, so that none always follows the same other one.
                for name in list(workers)[:: 1 if round_ % 2 == 0 else -1]:
                    taken = call("turn", {name: {"repeats": group.repeats}})
                    if name in taken:
                        times[name].append(taken[name]["seconds"])
                        peaks[name] = taken[name]["peak"]
                if time.monotonic() > self.deadline + 30:
                    break
            for name in list(workers):
                self.record(group, name, {**first[name], "peak": peaks[name]}, times, start)
            for name in [name for name in group.profiled if name in workers]:
                began = time.monotonic()
                for profile in call("profile", {name: {}}).values():
                    entry = profile_entry(group, name)
                    self.records.add(*entry, "ok", profile, time.monotonic() - began)
        finally:
            for worker in workers.values():
                worker.close()

    def fail(self, group: Group, name: str, reply: Reply, start: float) -> None:
        """Record a contestant that has failed."""
        entry = f"{group.name}: {name}", group.contestants[name]
        self.records.add(*entry, reply.status, reply.result, time.monotonic() - start)

    def record(
        self,
        group: Group,
        name: str,
        facts: dict[str, Any],
        times: dict[str, list[float]],
        start: float,
    ) -> None:
        """Record a contestant that has been through its turns."""
        mine, median = times[name], statistics.median(times[name])
        reference = times.get(next(iter(group.contestants)))
        whole = reference is not None and len(reference) == len(mine)
        result = {
            "ms": 1e3 * median,
            "tokens_per_s": facts["tokens"] / median,
            **{key: share / median for key, share in facts["mfu_of_a_second"].items()},
            "time": ratios(mine, reference) if whole else None,
            "against": next(iter(group.contestants)),
            "peak": facts["peak"],
            "first_steps_s": facts["seconds"],
            "shape": facts["shape"],
            "rounds_ms": [1e3 * value for value in mine],
        }
        entry = f"{group.name}: {name}", group.contestants[name]
        self.records.add(*entry, "ok", result, time.monotonic() - start)


def entries(group: Group) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and config of all that a group records."""
    for name, config in group.contestants.items():
        yield f"{group.name}: {name}", config
    for name in group.profiled:
        yield profile_entry(group, name)


def profile_entry(group: Group, name: str) -> tuple[str, dict[str, Any]]:
    """Name and config of a breakdown."""
    return f"{group.name}, one step of {name}", group.contestants[name]
