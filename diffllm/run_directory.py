"""A run's directory: its name, its identity, whether it may be used."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from diffllm.changes import Changes, described, is_allowed
from diffllm.checkpoint.directory import (
    check_whole,
    list_checkpoints,
    list_incomplete,
    newest_good,
    remove,
)
from diffllm.config import TrainConfig, compose_config, typed
from diffllm.errors import CheckpointError, ConfigError
from diffllm.held_directory import hold

# What may change between two starts of one run without changing what it computes.
FREE = (
    "run.name", "run.dir", "run.report", "run.sweep", "run.swept", "run.matched",
    "run.allow_changes", "wandb", "resume",
    "log_interval", "checkpoint", "eval", "diagnostics", "distributed", "parallel",
    "train.max_consecutive_skips",
    "micro_batch_size", "compile", "activation_checkpointing", "model.attention.backend",
    "model.loss_chunk", "model.attention.values",
    "data.cache_dir", "data.num_workers", "data.prefetch_factor", "data.paths", "data.tokenizer",
    "data.sample_prompt",
    *(f"run.choices.{group}" for group in ("model", "data", "optim", "parallel", "experiment")),
)  # fmt: skip
FOLLOWS = {"model.init_seed": "seed", "model.seq_len": "seq_len"}
MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OSError, RecursionError)

REQUEUE_FILE = "requeue"

NAME = re.compile(r"(?!\.)[\w.,+-]+")


class RunDirectory:
    """Rank 0's hold on `outputs/<name>/`; one process at a time.

    Raises:
        ConfigError: the name exists with another config, or the directory cannot be written.
    """

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
            raise ConfigError(
                f"{self.path} is a run with another config ({described(changes)}); choose another "
                f"run.name, or go on with run.allow_changes=[{','.join([*allowed, *refused])}]"
            )
        self.changes = changes

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
        file = self.path / "summary.json"
        return file.is_file() and json.loads(file.read_text())["steps"] >= self.cfg.steps

    def begin(self, tokenizer: Path, step: int = 0) -> None:
        """Note changes, write config.yaml and the tokenizer; drop checkpoints never completed.

        Args:
            step: where the run goes on.

        Raises:
            CheckpointError: a file cannot be written.
        """
        if self.changes:  # first: once config.yaml is new, nothing would tell of them
            self._note_changes(step)
        (self.path / "summary.json").unlink(missing_ok=True)  # of a run that was shorter
        write_atomic(self.config_file, OmegaConf.to_yaml(OmegaConf.structured(self.cfg)))
        if "tokenizer" in self.changes or not (self.path / "tokenizer.model").exists():
            write_atomic(self.path / "tokenizer.model", tokenizer.read_bytes())
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

    def describe(self, facts: dict[str, Any]) -> None:
        """Write run.json: parameters, corpus, device and the like of the latest start."""
        write_atomic(self.path / "run.json", json.dumps(facts, indent=2) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Mark the run as finished."""
        write_atomic(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def differences(path: Path, cfg: TrainConfig) -> Changes:
    """What `cfg` would change about the run at `path`, if one is there.

    Raises:
        CheckpointError: its config.yaml is not a config of ours.
    """
    if not (path / "config.yaml").is_file():
        return {}
    saved = flatten(yaml_dict(load_run_config(path)))
    new = flatten(yaml_dict(cfg))
    keys = {key for key in saved.keys() | new.keys() if saved.get(key) != new.get(key)}
    keys -= {key for key, origin in FOLLOWS.items() if origin in keys}
    return {
        key: (saved.get(key), new.get(key))
        for key in sorted(keys)
        if not is_allowed(key, list(FREE))
    }


def choose_path(cfg: TrainConfig) -> Path:
    """Where the run goes: run.dir, or outputs/[<sweep>/]<name> with a fresh name if none is set."""
    name = cfg.run.name
    if name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{cfg.run.choices['experiment']}-{cfg.run.choices['attention']}-{stamp}"
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


def resume_checkpoint(cfg: TrainConfig, own: list[Path]) -> Path | None:
    """The checkpoint that `resume` means, every file verified; None for a start from nothing.

    Of several, the newest that is whole; those skipped are named on stderr.

    Raises:
        CheckpointError: there are checkpoints and none is whole, or the one named is not.
    """
    if cfg.resume == "never":
        return None
    if own or cfg.resume == "auto":
        return newest_good(own)
    path = Path(cfg.resume).expanduser()
    inside = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if inside:
        return newest_good(inside)
    check_whole(path)
    return path


def load_run_config(path: Path) -> TrainConfig:
    """The typed config of a run directory, from its config.yaml.

    Raises:
        CheckpointError: there is none, or it is not a config of ours.
    """
    file = path / "config.yaml"
    try:
        saved = OmegaConf.load(file)
        check_values(saved)
        return typed(OmegaConf.merge(defaults_of(saved.run.choices.attention), saved))  # type: ignore[arg-type]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a run directory: it has no config.yaml") from None
    except (ConfigError, OmegaConfBaseException, YAMLError, *MALFORMED) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} is not a config of this version: {reason}") from error


def check_values(saved: Any) -> None:
    """Raise ValueError unless a config holds plain values only, as a saved one does.

    An interpolation would be resolved here: `${oc.env:...}` reads this process's environment.
    """
    content: Any = OmegaConf.to_container(saved, resolve=False)
    for key, value in flatten(content).items():
        if "${" in str(value):
            raise ValueError(f"{key} is an interpolation, not a value")


@cache
def defaults_of(variant: str) -> DictConfig:
    """The composed config of a variant, for reading; a report loads many runs of few variants."""
    return compose_config([f"attention={variant}"])


def yaml_dict(cfg: TrainConfig) -> dict[str, Any]:
    """Plain values, enums by name."""
    return OmegaConf.to_container(  # type: ignore[return-value]
        OmegaConf.structured(cfg), enum_to_str=True
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file in one step; raises CheckpointError where that cannot be done."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def request_requeue(path: Path, number: signal.Signals, step: int | None) -> None:
    """Leave the marker that lets a launch script put the job back into the queue.

    Args:
        step: that was saved last on the way out; None where nothing was.
    """
    write_atomic(path / REQUEUE_FILE, json.dumps({"signal": number.name, "step": step}) + "\n")
