"""The directory of a sweep or study: its record of runs and jobs, and its existing runs."""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffllm.config import TrainConfig
from diffllm.config.changes import is_within, what_differs
from diffllm.config.loading import without_imports
from diffllm.config.overrides import check_shared
from diffllm.config.saved import differences, load_run_config, with_lengths
from diffllm.core.errors import CheckpointError, ConfigError, InUseError
from diffllm.core.files import why_no_file, write_atomic
from diffllm.core.held_directories import hold, missing, take_back
from diffllm.core.run_files import RunFile, SweepFile, read_record, sweep_log
from diffllm.training.run_directory import check_kind

MESSAGE_WORDS = ("sweep directory", "another run.sweep")
"""Kind of directory, and the override that chooses another, in errors of `hold` and `reserve`."""

Configs = dict[str, TrainConfig]
"""Configs of runs, by run name."""


class SweepDirectory:
    """The directory of a sweep or study; `record` holds the content of its file sweep.json.

    record["keys"] contains the keys whose values form the run names. record["runs"] maps each run
    name to the overrides of these keys. record["jobs"] maps each run name to its SLURM job id.
    """

    def __init__(self, path: Path, kind: str = "sweep", created_paths: Sequence[Path] = ()):
        """Read sweep.json.

        `created_paths` lists the paths that `reserve` has created for this sweep.
        """
        self.path = path
        self.kind = kind
        self.file = path / SweepFile.RECORD
        self.created_paths = created_paths
        check_kind(path, kind, "run.sweep" if kind == "sweep" else "out")
        self.record: dict[str, Any] = {"keys": None, "runs": {}, "jobs": {}}
        for field, value in (read_record(self.file) or {}).items():
            if value is not None:
                self.record[field] = value

    def hold(self) -> None:
        """Create and lock the directory."""
        # Listed before `hold` creates the missing directories.
        self.removable_paths = [*missing(self.path), *self.created_paths]
        self.lock = hold(self.path, *MESSAGE_WORDS, created=self.created_paths)
        # Another process may have written sweep.json between the constructor and the lock.
        if SweepDirectory(self.path, self.kind).record != self.record:
            raise InUseError(f"sweep {self.path} was just started by another process; try again")

    def withdraw(self) -> None:
        """Delete the directories that `hold` or `reserve` created, unless a run exists."""
        for path in self.path.glob("*"):
            # Hidden directories are not runs.
            if path.is_dir() and not path.name.startswith("."):
                return
        take_back(self.path, self.removable_paths)

    def write(self) -> None:
        write_atomic(self.file, json.dumps(self.record, indent=2) + "\n")


def naming_keys(directory: SweepDirectory, swept_keys: list[str], all_keys: list[str]) -> list[str]:
    """Return the keys whose values form the run names.

    These are the keys in sweep.json, followed by the swept keys that sweep.json does not contain.
    `all_keys` contains the keys of all overrides. Raises ConfigError if a key in sweep.json has no
    override.
    """
    keys = directory.record["keys"] or []
    if not set(keys) <= set(all_keys):
        raise ConfigError(
            f"{directory.path} is a sweep over {', '.join(keys)}; set each of these keys in the "
            "command, or choose another run.sweep"
        )
    return [*keys, *(key for key in swept_keys if key not in keys)]


def begun_configs(directory: SweepDirectory) -> Configs:
    """Return the saved configs of all runs that have started and are not damaged."""
    configs = {}
    for name in directory.record["runs"]:
        with suppress(CheckpointError):  # The run has not begun, or reports its damage itself.
            configs[name] = load_run_config(directory.path / name)
    return configs


def recorded_configs(
    directory: SweepDirectory, planned_names: Collection[str], shared_words: list[str]
) -> Configs:
    """Return the configs of the runs in sweep.json that this command does not plan.

    Runs that have not begun are included, because their labels need the same keys; such a run is
    omitted if its config is invalid. `shared_words` contains the overrides that all runs share.
    """
    configs = {}
    for name, words in directory.record["runs"].items():
        if name in planned_names:
            continue
        try:
            check_shared(words, f"{directory.file}: runs.{name}")
            configs[name] = without_imports([*shared_words, *words])
        except ConfigError:
            if (directory.path / name / RunFile.CONFIG).is_file():
                raise
    return configs


def check_runs(directory: SweepDirectory, configs: Configs) -> None:
    """Raise ConfigError if an existing run cannot resume with its config in `configs`."""
    for name, cfg in configs.items():
        run = directory.path / name
        log = sweep_log(run)
        problem = why_no_file(log)
        if problem:
            raise ConfigError(
                f"the log file {log} {problem}; rename it, or choose another run.sweep"
            )
        try:
            changes = differences(run, cfg)
        except CheckpointError:
            continue  # This run will fail with a message; the remaining runs can start.
        allowed = cfg.run.allow_changes
        if not all(is_within(key, allowed) for key in changes):
            needed = ",".join(dict.fromkeys([*allowed, *changes]))
            raise ConfigError(
                f"the run {name} of the sweep {directory.path} was started with "
                f"{what_differs(with_lengths(changes, run, cfg))}; choose another run.sweep, or "
                f"allow the change with run.allow_changes=[{needed}]"
            )
        if cfg.resume == "never" and (run / RunFile.CONFIG).is_file():
            raise ConfigError(f"{run} contains a run, but resume=never; choose another run.sweep")
