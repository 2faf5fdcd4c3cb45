"""A run's directory: its name, its identity, whether it may be used."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from diffllm.checkpoint.directory import (
    list_checkpoints,
    list_incomplete,
    remove,
)
from diffllm.config import TrainConfig
from diffllm.config.changes import Changes, described, is_allowed
from diffllm.config.saved import differences, load_run_config
from diffllm.data.tokenizer_files import TOKENIZER_FILES, tokenizer_files, tokenizer_in
from diffllm.errors import ConfigError
from diffllm.files import hold, write_atomic

REQUEUE_FILE = "requeue"
FOR_GOOD = ("init_match",)
"""Facts in run.json that the first start of a run decides."""

NAME = re.compile(r"(?!\.)[\w.,+-]+")


class RunDirectory:
    """Rank 0's hold on `outputs/<name>/`; one process at a time. Raises ConfigError if the
    directory is in use or cannot be written."""

    def __init__(self, path: Path, cfg: TrainConfig):
        self.path, self.cfg = path, cfg
        self.changes: Changes = {}
        self.made = [p for p in (path, *path.parents) if not os.path.lexists(p)]
        self.lock = hold(path, "run directory", "run.dir=...")

    def check(self) -> None:
        """Compare with the run that is here, if any; nothing is changed."""
        if self.cfg.resume == "never" and self.has_run:
            raise ConfigError(
                f"{self.path} holds a run and resume=never; choose another run.name or resume=auto"
            )
        if not self.config_file.is_file():
            if self.has_run:
                raise ConfigError(f"{self.path} holds files but no config.yaml: not a run of ours")
            return
        changes = differences(self.path, self.cfg)
        allowed = self.cfg.run.allow_changes
        if refused := [key for key in changes if not is_allowed(key, allowed)]:
            experiment = load_run_config(self.path).run.choices["experiment"]
            other = experiment != self.cfg.run.choices["experiment"]
            made = f", made with experiment={experiment}" if other else ""
            raise ConfigError(
                f"{self.path} is a run with another config ({described(changes)}){made}; choose "
                "another run.name, or go on with "
                f"run.allow_changes=[{','.join([*allowed, *refused])}]"
            )
        self.changes = changes
        done = (summary_of(self.path) or {"steps": 0})["steps"]
        if done > self.cfg.steps or (done == self.cfg.steps and changes):
            raise ConfigError(
                f"{self.path} has made {done} steps, and nothing of it can be made otherwise "
                f"({described(changes)}); choose another run.name, or more steps"
            )

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def has_run(self) -> bool:
        return (self.path / "metrics.jsonl").exists() or bool(self.checkpoints)

    @property
    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.path / "checkpoints")

    def finished(self) -> bool:
        """Whether the run has reached its last step."""
        return is_finished(self.path, self.cfg.steps)

    def begin(self, tokenizer: Path, step: int = 0) -> None:
        """Begin the run, or go on after `step`: note changes, write config.yaml and the tokenizer,
        drop checkpoints never completed. Raises CheckpointError if a file cannot be written."""
        if self.changes:  # first: once config.yaml is new, nothing would tell of them
            self._note_changes(step)
        (self.path / "summary.json").unlink(missing_ok=True)  # of a run that was shorter
        (self.path / "diverged.json").unlink(missing_ok=True)  # of a start that gave up
        write_atomic(self.config_file, OmegaConf.to_yaml(OmegaConf.structured(self.cfg)))
        if "tokenizer" in self.changes or not tokenizer_in(self.path).exists():
            files = tokenizer_files(tokenizer)
            for name, content in files.items():
                write_atomic(self.path / name, content)
            for name in TOKENIZER_FILES:
                if name not in files:
                    (self.path / name).unlink(missing_ok=True)
        for leftover in list_incomplete(self.path / "checkpoints"):
            remove(leftover)

    def _note_changes(self, step: int) -> None:
        """Add a line to changes.jsonl: from this step on, what differs from the run before it."""
        file = self.path / "changes.jsonl"
        line = json.dumps({"step": step, "changes": self.changes}) + "\n"
        write_atomic(file, (file.read_text() if file.exists() else "") + line)

    def withdraw(self) -> None:
        """Remove the directory if this process made it and no training came of it."""
        if self.path in self.made and not self.has_run:
            shutil.rmtree(self.path)
            for parent in self.made[1:]:
                with contextlib.suppress(OSError):  # others use it by now
                    parent.rmdir()

    def forget_requeue(self) -> None:
        """Remove the marker that an earlier start left for the launch script."""
        (self.path / REQUEUE_FILE).unlink(missing_ok=True)

    def describe(self, facts: dict[str, Any], continues: bool = False) -> None:
        """Write run.json: parameters, corpus, device and the like of the latest start; of a run
        that continues, what its first start decided stays."""
        file, kept = self.path / "run.json", {}
        if continues:
            with contextlib.suppress(OSError, ValueError, TypeError):
                before = json.loads(file.read_text())
                kept = {key: before[key] for key in FOR_GOOD if key in before}
        write_atomic(file, json.dumps({**kept, **facts}, indent=2) + "\n")

    def give_up(self, step: int, reason: str) -> None:
        """Mark the run as diverged, until it goes on."""
        text = json.dumps({"step": step, "reason": reason}) + "\n"
        write_atomic(self.path / "diverged.json", text)

    def finish(self, summary: dict[str, Any]) -> None:
        """Mark the run as finished."""
        write_atomic(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def summary_of(path: Path) -> dict[str, Any] | None:
    """Read the summary.json of the run at `path`; None until it has reached a last step."""
    file = path / "summary.json"
    return json.loads(file.read_text()) if file.is_file() else None


def is_finished(path: Path, steps: int) -> bool:
    """Whether the run at `path` ended after that many steps."""
    summary = summary_of(path)
    return summary is not None and summary["steps"] == steps


def choose_path(cfg: TrainConfig) -> Path:
    """Return run.dir, or outputs/[<sweep>/]<name>, with a fresh name if none is set."""
    name = cfg.run.name
    if name is None and cfg.run.sweep and (Path("outputs") / cfg.run.sweep / "sweep.json").exists():
        raise ConfigError(
            f"run.sweep={cfg.run.sweep} is a sweep: -m goes on with it, and run.name=... with one "
            "of its runs"
        )
    if name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        experiment, model = cfg.run.choices["experiment"], cfg.run.choices["model"]
        kind = model if experiment == "none" else experiment
        name = f"{kind}-{cfg.run.choices['attention']}-{stamp}"
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"run.name={name!r} must be letters, digits and _ . , + - and not begin with a dot"
        )
    if cfg.run.sweep and not NAME.fullmatch(cfg.run.sweep):
        raise ConfigError(
            f"run.sweep={cfg.run.sweep!r} must be letters, digits and _ . , + - and not begin "
            "with a dot"
        )
    if cfg.run.dir:
        return Path(cfg.run.dir).expanduser()
    return Path("outputs", *([cfg.run.sweep] if cfg.run.sweep else []), name)


def request_requeue(path: Path, number: signal.Signals, step: int | None) -> None:
    """Leave the marker that lets a launch script put the job back into the queue.

    Args:
        step: that was saved last on the way out; None where nothing was.
    """
    write_atomic(path / REQUEUE_FILE, json.dumps({"signal": number.name, "step": step}) + "\n")
