"""The directory of a sweep or study, and its record of runs and jobs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffllm.core.errors import InUseError
from diffllm.core.files import hold, missing, take_back, write_atomic
from diffllm.metrics.records import read_record
from diffllm.training.directory import check_kind

MESSAGE_WORDS = ("sweep directory", "another run.sweep")
"""Kind of directory, and the override that chooses another, in errors of `hold` and `reserve`."""


class SweepDirectory:
    """The directory of a sweep or study; `record` holds the content of its file sweep.json.

    record["keys"] contains the keys whose values form the run names. record["runs"] maps each run
    name to the overrides of these keys. record["jobs"] maps each run name to its SLURM job id.
    """

    def __init__(self, path: Path, kind: str = "sweep", created: Sequence[Path] = ()):
        """Read sweep.json; `created` lists the paths that `reserve` has created for this sweep."""
        self.path, self.kind, self.file = path, kind, path / "sweep.json"
        self.created = created
        check_kind(path, kind, "run.sweep" if kind == "sweep" else "out")
        found = {k: v for k, v in (read_record(self.file) or {}).items() if v is not None}
        self.record: dict[str, Any] = {"keys": None, "runs": {}, "jobs": {}, **found}

    def hold(self) -> None:
        self.made = [*missing(self.path), *self.created]
        self.lock = hold(self.path, *MESSAGE_WORDS, created=self.created)
        if SweepDirectory(self.path, self.kind).record != self.record:
            raise InUseError(f"sweep {self.path} was just started by another process; try again")

    def withdraw(self) -> None:
        if not any(path.is_dir() and path.name[0] != "." for path in self.path.glob("*")):
            take_back(self.path, self.made)

    def write(self) -> None:
        write_atomic(self.file, json.dumps(self.record, indent=2) + "\n")
