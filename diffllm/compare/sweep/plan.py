"""The plan of a sweep: every job checked, and compared with what its directory already holds."""

import json
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from diffllm.compare.sweep.names import combinations, name_run
from diffllm.config import TrainConfig, load_config
from diffllm.config.loading import without_imports
from diffllm.config.overrides import check_shared
from diffllm.config.saved import differences
from diffllm.config.schema import is_allowed, what_differs
from diffllm.core.errors import CheckpointError, ConfigError, InUseError, UserError
from diffllm.core.files import check_length, hold, missing, take_back, why_no_file, write_atomic
from diffllm.metrics.records import read_record
from diffllm.training.directory import choose_path, ending


class SweepDirectory:
    """The directory `outputs/<sweep>/`, held by rank 0; one sweep at a time.

    sweep.json has the keys that name its runs, and for each run the overrides of these keys.
    """

    def __init__(self, path: Path):
        self.path, self.file = path, path / "sweep.json"
        self.record: dict[str, Any] = {"keys": None, "runs": {}, "jobs": {}}
        found = read_record(self.file) or {}
        self.record |= {name: value for name, value in found.items() if value is not None}

    def hold(self) -> None:
        """Keep other processes out until this one ends; raises ConfigError if one was there."""
        self.made = missing(self.path)
        self.lock = hold(self.path, "sweep directory", "another run.sweep")
        if SweepDirectory(self.path).record != self.record:
            raise InUseError(f"sweep {self.path} has just been started by another process")

    def withdraw(self) -> None:
        """Remove what this process made of the directory, if no run came of it."""
        if not any(path.is_dir() and path.name[0] != "." for path in self.path.glob("*")):
            take_back(self.path, self.made)

    def write(self) -> None:
        write_atomic(self.file, json.dumps(self.record, indent=2) + "\n")


def plan_sweep(
    overrides: list[Override], world_size: int
) -> tuple[SweepDirectory, list[dict[str, Any]]]:
    """Check every job, take the sweep's directory, find out which runs have ended.

    Returns the directory, and the fields of each Job, in order. Raises ConfigError
    for a job that cannot run, and a directory that holds other runs under this name.
    """
    configs: dict[str, TrainConfig] = {}
    words: dict[str, list[str]] = {}
    by_key = [o.get_key_element() for o in overrides]
    swept = [o.get_key_element() for o in overrides if o.is_sweep_override()]
    jobs = combinations(overrides)
    loaded = [load_config(job) for job in jobs]
    loaded[0].run.name = "run"
    directory = SweepDirectory(choose_path(loaded[0]).parent)
    keys = naming_keys(directory, swept, by_key)
    for job, cfg in zip(jobs, loaded, strict=True):
        cfg.check_world(world_size)
        cfg.run.name = name = name_run(cfg, keys)
        check_length(directory.path / f"{name}.log", f"run.name={name}")
        cfg.run.swept = keys
        words[name], configs[name] = job, cfg  # two spellings of a value are one run
    directory.hold()
    try:
        check_runs(directory, configs, overrides)
        for name, job in words.items():
            directory.record["runs"][name] = [job[by_key.index(key)] for key in keys]
        directory.record["keys"] = keys
        directory.write()
    except UserError:
        directory.withdraw()
        raise
    added = f"run.swept=[{','.join(keys)}]"
    return directory, [
        {
            "number": number,
            "total": len(configs),
            "name": name,
            "path": str(directory.path / name),
            "steps": cfg.steps,
            "words": [*words[name], added, f"run.name={name}"],
            "finished": seems_ended(directory.path / name, cfg),
        }
        for number, (name, cfg) in enumerate(configs.items(), start=1)
    ]


def seems_ended(path: Path, cfg: TrainConfig) -> bool:
    """Whether the run at `path` has ended, and this config does not take it further; one whose
    files are damaged has not, and says so itself when it is started."""
    try:
        return ending(path, cfg) is not None
    except CheckpointError:
        return False


def naming_keys(directory: SweepDirectory, swept: list[str], given: list[str]) -> list[str]:
    """Return the keys that name the runs: those of the directory's sweep, if it has one already."""
    keys = directory.record["keys"]
    if keys is None:
        return swept
    if set(swept) <= set(keys) <= set(given):
        return keys
    raise ConfigError(
        f"{directory.path} is a sweep over {', '.join(keys) or 'nothing'}, not over "
        f"{', '.join(swept) or 'nothing'}; choose another run.sweep"
    )


def check_runs(
    directory: SweepDirectory, configs: dict[str, TrainConfig], overrides: list[Override]
) -> None:
    """Raise ConfigError if a run in the directory was made with other fixed overrides."""
    keys = directory.record["keys"]
    fixed = [str(o.input_line) for o in overrides if o.get_key_element() not in (keys or [])]
    there = {}
    for name, swept in directory.record["runs"].items():
        if name not in configs and (directory.path / name / "config.yaml").is_file():
            check_shared(swept, f"{directory.file}: runs.{name}")
            there[name] = without_imports([*fixed, *swept])
    for name, cfg in {**there, **configs}.items():
        path = directory.path / name
        log = path.with_name(f"{name}.log")
        if wrong := why_no_file(log):
            raise ConfigError(f"{log} {wrong}; move it away, or choose another run.sweep")
        try:
            changes = differences(path, cfg)
        except CheckpointError:
            continue  # the run itself will say so, and the others can go on
        if any(not is_allowed(key, cfg.run.allow_changes) for key in changes):
            raise ConfigError(
                f"the sweep {directory.path} was made with {what_differs(changes)} in "
                f"{path.name}; choose another run.sweep, or resume with run.allow_changes=["
                f"{','.join(dict.fromkeys([*cfg.run.allow_changes, *changes]))}]"
            )
        if cfg.resume == "never" and (path / "config.yaml").is_file():
            raise ConfigError(f"{path} holds a run and resume=never; choose another run.sweep")
