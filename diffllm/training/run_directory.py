"""The run directory: its name, its lock and its files."""

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from omegaconf import OmegaConf

from diffllm.checkpoint.run_checkpoints import remove
from diffllm.config import TrainConfig
from diffllm.config.changes import Changes, changes_text, changes_training, is_within, what_differs
from diffllm.config.saved import differences, load_run_config, with_lengths
from diffllm.config.words import former_text
from diffllm.core.errors import CheckpointError, ConfigError, InUseError
from diffllm.core.files import (
    NO_FLOCK,
    check_length,
    open_regular,
    user_path,
    why_no_file,
    write_atomic,
)
from diffllm.core.held_directories import hold, missing, reserve, take_back
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import (
    RunFile,
    RunFolder,
    SweepFile,
    list_checkpoints,
    list_incomplete,
    read_changes,
    read_ending,
    read_facts,
    read_record,
    read_summary,
)
from diffllm.data.tokenizer import TOKENIZER_FILES, tokenizer_files, tokenizer_in
from diffllm.distributed.launcher import in_sweep

FOR_GOOD = ("init_match", "weights", "previous")
"""Facts in run.json that the first start of a run decides."""

LARGEST_LOCK = 1000
POLL_SECONDS = 1
LONGEST_NAME = 230
"""Maximum bytes of a name: file systems allow 255, and log files append suffixes."""
RUN_NAME = re.compile(r"(?!\.)[\w.,+-]+")


MESSAGE_WORDS = ("run directory", "run.dir=...")
"""Kind of directory, and the override that chooses another, in errors of `hold` and `reserve`."""


class RunDirectory:
    """The directory of a run and the files in it; only rank 0 makes this object.

    The constructor locks the directory, see `hold_run`. The constructor raises ConfigError if
    another process has the lock, or if the directory cannot be written.
    """

    def __init__(self, path: Path, cfg: TrainConfig, created: Sequence[Path] = ()):
        """Lock the directory `path`; `created` lists the paths that `reserve` has created."""
        self.path = path
        self.cfg = cfg
        self.changes: Changes = {}
        # List the missing parents before the lock creates them.
        self.created = [*missing(path), *created]
        self.lock = hold_run(path, created)

    def check(self) -> None:
        """Check that a run can start or resume with this config; write no files.

        Raises ConfigError if the directory contains a run that cannot resume with this config, and
        CheckpointError if a file has the wrong type, for example a link.
        """
        check_kind(self.path, "run", "run.dir" if self.cfg.run.dir else "run.name")
        check_own_files(self.path)
        if self.cfg.resume == "never" and self.has_run:
            raise ConfigError(
                f"the run {self.path} exists, but resume=never; choose another run.name"
            )
        if not self.config_file.is_file():
            if self.has_run:
                raise ConfigError(
                    f"{self.path} has metrics.jsonl or checkpoints but no config.yaml; "
                    "choose another run.name"
                )
            return
        changes = differences(self.path, self.cfg)
        allowed = self.cfg.run.allow_changes
        refused = [key for key in changes if not is_within(key, allowed)]
        if refused:
            settings = what_differs(with_lengths(changes, self.path, self.cfg))
            raise ConfigError(
                f"{self.path} was made with {settings}; choose another run.name, "
                f"{self.experiment_hint()}or resume with "
                f"run.allow_changes=[{','.join([*allowed, *refused])}]"
            )
        self.changes = changes
        done = steps_made(self.path) or 0
        if done > self.cfg.steps or (done == self.cfg.steps and changes):
            raise ConfigError(
                f"{self.path} is already at step {done}; these settings can no longer change: "
                f"{changes_text(changes)}; choose another run.name, or set steps above {done}"
            )

    def experiment_hint(self) -> str:
        """Return advice to set the experiment of the run; "" if this config has the same one.

        An older version may have chosen other defaults for the same command.
        """
        experiment = load_run_config(self.path).resolved.choices.get("experiment")
        if experiment is None or experiment == self.cfg.resolved.choices.get("experiment"):
            return ""
        return f"add experiment={experiment}, "

    @property
    def config_file(self) -> Path:
        return self.path / RunFile.CONFIG

    @property
    def facts(self) -> dict[str, Any] | None:
        """Content of run.json; None if the file is missing."""
        return read_record(self.path / RunFile.FACTS)

    @property
    def has_run(self) -> bool:
        return (self.path / RunFile.METRICS).exists() or bool(self.checkpoints)

    @property
    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.path / RunFolder.CHECKPOINTS)

    def begin(self, tokenizer: Path, step: int = 0, changes: Changes | None = None) -> None:
        """Write config.yaml and the tokenizer; delete summary.json and incomplete checkpoints.

        Args:
            step: the step of the checkpoint to resume from; 0 for a new run.
            changes: changes of the data order since the checkpoint, to append to changes.jsonl.
        """
        self.changes |= changes or {}
        if self.changes:  # Record changes first: writing config.yaml discards the old values.
            lines = [*read_changes(self.path), {"step": step, "changes": self.changes}]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            write_atomic(self.path / RunFile.CHANGES, text)
        # The summary may come from the same run with fewer steps.
        (self.path / RunFile.SUMMARY).unlink(missing_ok=True)
        if not self.checkpoints:  # saved.json would name a checkpoint that does not exist.
            (self.path / RunFile.SAVED).unlink(missing_ok=True)
        write_atomic(self.config_file, OmegaConf.to_yaml(OmegaConf.structured(self.cfg)))
        # A killed run without a checkpoint begins again, maybe with another tokenizer.
        if step == 0 or "tokenizer" in self.changes or not tokenizer_in(self.path).exists():
            files = tokenizer_files(tokenizer)
            for name, content in files.items():
                write_atomic(self.path / name, content)
            for name in {*TOKENIZER_FILES} - files.keys():
                (self.path / name).unlink(missing_ok=True)
        for leftover in list_incomplete(self.path / RunFolder.CHECKPOINTS):
            remove(leftover)

    def withdraw(self) -> None:
        """Release the lock; if no step was trained, delete the files that this process created."""
        if not self.has_run:
            take_back(self.path, self.created)
        elif not self.config_file.is_file():  # Foreign files: remove only the lock file.
            take_back(self.path, self.created[:1])
        self.lock.release()

    def describe(self, facts: dict[str, Any], continues: bool = False) -> None:
        """Write the JSON object `facts` to run.json.

        If `continues` is true (the run resumes), keep the entries FOR_GOOD of the existing
        run.json. Only the first start of a run determines these entries.
        """
        first_facts = {}
        former_facts = self.facts if continues else None
        if former_facts:
            first_facts = {key: former_facts[key] for key in FOR_GOOD if key in former_facts}
        content = {**first_facts, **facts}
        write_atomic(self.path / RunFile.FACTS, json.dumps(content, indent=2) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        write_atomic(self.path / RunFile.SUMMARY, json.dumps(summary, indent=2) + "\n")


def hold_run(path: Path, created: Sequence[Path] = ()) -> FileLock:
    """Lock the run directory `path`, see `hold`; wait while `diffllm wandb` reads the directory.

    A run that starts during this upload could write to the same wandb run. Under a sweep, also wait
    for the process of an earlier start. `created` are directories to remove if `hold` fails.
    """
    has_printed = False
    while True:
        try:
            return hold(path, *MESSAGE_WORDS, created=created)
        except InUseError:
            # A shared lock is possible if all other holders are readers.
            with shared_lock(path) as only_readers:
                if not only_readers and in_sweep():
                    # The same run of a killed sweep may still save.
                    return hold(path, *MESSAGE_WORDS, wait=True, created=created)
                if not only_readers:
                    raise
        if not has_printed:
            to_stderr(f"waiting until diffllm wandb has written {path} to wandb")
            has_printed = True
        time.sleep(POLL_SECONDS)


@contextmanager
def shared_lock(path: Path) -> Iterator[bool]:
    """Hold a shared lock of the run directory `path`, so that starts of the run wait.

    Yield True if the lock is held. Yield False without a lock if another process has the exclusive
    lock, as in training. If there is no lock file, or if its file system has no locks, yield True
    without a lock: a run can then start in this context. No file changes.
    """
    try:
        stream = open_regular(path / RunFile.LOCK, LARGEST_LOCK)
    except (OSError, ValueError):
        yield True
        return
    with stream:
        is_free = True
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
        yield is_free  # Closing the file releases the lock.


def kind_of(path: Path) -> str | None:
    """Return the kind of an output directory: "run", "sweep" or "study"; None for others."""
    if os.path.exists(path / RunFile.CONFIG) or os.path.exists(path / RunFile.METRICS):
        return "run"
    record = read_record(path / SweepFile.RECORD)
    if record is None:
        return None
    # A study is a sweep whose runs have the override run.study=.
    return "study" if "run.study=" in str(record.get("runs")) else "sweep"


def check_kind(path: Path, kind: str, key: str) -> None:
    """Raise ConfigError if `path` is a run, sweep or study of another kind than `kind`.

    The error asks the user to change the config key `key`.
    """
    present_kind = kind_of(path)
    if present_kind not in (None, kind):
        raise ConfigError(f"{path} is a {present_kind}, not a {kind}; choose another {key}")


def check_own_files(run: Path) -> None:
    """Raise CheckpointError if an output path of `run` has the wrong type, for example a link."""
    files = [run / name for name in (*RunFile, *TOKENIZER_FILES)]
    files += sorted(run.glob(f"{RunFolder.HELDOUT}/*.npz"))
    for file in files:
        problem = why_no_file(file)
        if problem:
            raise CheckpointError(
                f"{file} {problem}; rename or delete this path, or choose another run.name"
            )
    for folder in RunFolder:
        place = run / folder
        if os.path.lexists(place) and not place.is_dir():
            raise CheckpointError(
                f"{place} is not a directory; rename or delete this path, or mount the missing disk"
            )


def ending(path: Path, cfg: TrainConfig) -> dict[str, Any] | None:
    """Return the summary of the run in `path` if the run cannot continue with `cfg`, else None.

    A run that has made `cfg.steps` steps cannot continue. A diverged run cannot continue with the
    same training settings.
    """
    summary = read_ending(path)
    if summary and summary.get("stopped"):
        # A change of the corpus shows only later, so permission to change counts as a change.
        permits_changes = cfg.run.allow_changes != load_run_config(path).run.allow_changes
        if permits_changes or differences(path, cfg, changes_training):
            return None
        return summary
    return summary if steps_made(path) == cfg.steps else None


def steps_made(path: Path) -> int | None:
    """Return the number of steps in a run's summary.json; None if the file does not exist.

    Raises CheckpointError if summary.json has no number of steps.
    """
    summary = read_summary(path)
    if summary is None:
        return None
    steps = summary.get("steps")
    if steps is None:
        raise CheckpointError(
            f"{path / RunFile.SUMMARY} does not contain the number of steps; delete this file"
        )
    return int(steps)


def choose_path(cfg: TrainConfig) -> Path:
    """Return the run directory: `run.dir`, or outputs/[<run.sweep>/]<run.name>.

    The default of run.name contains the model or experiment, the attention variant and the time.
    Raises ConfigError if run.name or run.sweep is invalid, or for `check_former`.
    """
    name = cfg.run.name
    sweep_record = Path("outputs", cfg.run.sweep or ".", SweepFile.RECORD)
    if name is None and cfg.run.sweep and sweep_record.exists():
        raise ConfigError(
            f"run.sweep={cfg.run.sweep} already exists; to resume the sweep, add -m to the command"
        )
    if name is None:
        choices = cfg.resolved.choices
        kind = choices["experiment"]
        if kind == "none":
            kind = choices["model"]
        name = f"{kind}-{choices['attention']}-{time.strftime('%Y%m%d-%H%M%S')}"
    for key, part in (("run.name", name), ("run.sweep", cfg.run.sweep or "none")):
        if not RUN_NAME.fullmatch(part) or len(part.encode()) > LONGEST_NAME:
            raise ConfigError(
                f"{key}={part!r} must contain only letters, digits and _ . , + -, must not begin "
                f"with a dot, and may have at most {LONGEST_NAME} bytes"
            )
    if cfg.run.dir:
        path = user_path(cfg.run.dir, "run.dir")
        check_former("run.dir", cfg.run.dir, path)
        return path
    place = Path("outputs", cfg.run.sweep or ".")
    check_length(place, f"run.sweep={cfg.run.sweep}")
    check_length(place / name, f"run.name={name}")
    if cfg.run.sweep:
        check_former("run.sweep", cfg.run.sweep, place)
    check_former("run.name", name, place / name)
    return place / name


def check_former(key: str, value: str, path: Path) -> None:
    """Raise ConfigError if an older version started the run or sweep `path` in another directory.

    Older versions read the value 1.10 of run.name as a number and wrote to the directory 1.1.
    """
    former = path.with_name(former_text(path.name))
    if former == path or path.exists():
        return
    for file in (former / RunFile.FACTS, *former.glob(f"*/{RunFile.FACTS}")):
        command = read_facts(file.parent).get("command")
        if f"{key}={value}" in str(command).split():
            raise ConfigError(
                f"an older version started {former} with {key}={value}; to resume, set "
                f"{key}={former.name}; to start anew, choose another {key}"
            )


def claim_directory(cfg: TrainConfig) -> RunDirectory:
    """Lock and return the run directory.

    If run.dir or run.name is set, the directory may exist. Otherwise, create a new directory.
    """
    path = choose_path(cfg)
    if cfg.run.dir or cfg.run.name:
        return RunDirectory(path, cfg)
    path, created = reserve(path, *MESSAGE_WORDS)
    return RunDirectory(path, cfg, created)


def request_requeue(path: Path, number: signal.Signals, step: int | None) -> None:
    """Write the file `requeue` into a run directory, to let the launch script requeue the job.

    `number` is the signal that stopped the run. `step` is the step of the last checkpoint, or None
    if training had not begun.
    """
    write_atomic(path / RunFile.REQUEUE, json.dumps({"signal": number.name, "step": step}) + "\n")
