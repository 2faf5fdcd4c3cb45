"""Plan the runs of a sweep, and compare their configs with existing runs of the same sweep."""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.types import Override, QuotedString, Transformer
from hydra.errors import HydraException
from omegaconf import ListConfig

from diffllm.compare.sweep.directory import SweepDirectory
from diffllm.compare.sweep.eta import flops_of_step
from diffllm.compare.sweep.job import Job
from diffllm.config import RunConfig, TrainConfig, load_config
from diffllm.config.changes import is_within, what_differs
from diffllm.config.compose import hydra
from diffllm.config.loading import configs_of, without_imports
from diffllm.config.overrides import (
    COMPOSING,
    GROUPS,
    LIST_OR_TEXT,
    check_shared,
    explain,
    one_line,
)
from diffllm.config.saved import differences, load_run_config, with_lengths
from diffllm.config.words import (
    as_text,
    declared_type,
    parsed_override,
    quote_text,
    typed_override,
    typed_text,
    unquoted,
)
from diffllm.core.errors import CheckpointError, ConfigError, UserError
from diffllm.core.files import check_length, why_no_file
from diffllm.core.keys import class_declarations, declaration_of
from diffllm.core.names import shortened
from diffllm.metrics.wandb_config import check_wandb
from diffllm.training.directory import LONGEST_NAME, choose_path, ending
from diffllm.training.memory import check_memory

LONGEST = 40


def experiment_words(words: list[str]) -> list[str]:
    """Return the hydra.sweeper.params of the chosen experiment's YAML file, as overrides."""
    chosen = [word for word in words if word.startswith("experiment=")]
    with hydra():
        try:
            cfg = compose("train", overrides=chosen, return_hydra_config=True)
        except COMPOSING:
            return []  # The check of the jobs reports several or missing experiments.
    swept = []
    for key, values in (cfg.hydra.sweeper.params or {}).items():
        if isinstance(values, ListConfig):
            values = ",".join(word_of_item(key, item) for item in values)
        swept.append(f"{key}={values}")
    check_shared(swept, f"hydra.sweeper.params of {' '.join(chosen)}")
    return swept


def word_of_item(key: str, item: Any) -> str:
    """Return an item of a list in hydra.sweeper.params as a user types it."""
    if item is None:
        return "null"
    if isinstance(item, str) and declared_type(key) is str and unquoted(item) == item:
        return typed_text(item)
    return str(item)


def split_overrides(words: list[str]) -> tuple[list[Override], list[str]]:
    """Separate the overrides of the runs from the overrides of the Hydra launcher.

    Raises ConfigError for invalid overrides and for keys that a sweep forbids, such as run.name.

    Returns:
        The parsed run overrides (the last override per key), and the launcher overrides as text.
    """
    with hydra() as loader:  # glob(...) reads the loader.
        try:
            overrides = [parsed_override(quote_text(word, sweep=True), loader) for word in words]
        except HydraException as error:
            raise ConfigError(explain(error, words)) from error
    of_run = class_declarations(RunConfig, "run.")
    own: dict[str, Override] = {}
    launcher: list[str] = []
    for word, override in zip(words, overrides, strict=True):
        override.input_line = word
        key = override.get_key_element().lstrip("+~")
        swept = override.is_sweep_override()
        if not swept and (key == "hydra/launcher" or key.startswith("hydra.launcher.")):
            launcher.append(word)
        elif "sweep" in declaration_of(key, of_run).kinds or (swept and key.startswith("run.")):
            raise ConfigError(
                f"{word}: a sweep chooses the names of its runs; remove this override, and set one "
                "run.sweep=<name>"
            )
        elif key.split(".")[0].split("/")[0] == "hydra":
            allowed = f"hydra/launcher and hydra.launcher.*, with one value each ({LIST_OR_TEXT})"
            raise ConfigError(
                f"{word}: a sweep can set only these Hydra keys: {allowed}; remove this override"
            )
        else:
            own[override.get_key_element()] = override
    return list(own.values()), launcher


def combinations(overrides: list[Override]) -> list[list[str]]:
    return [list(job) for job in itertools.product(*map(split_values, overrides))]


def split_values(override: Override) -> list[str]:
    word, key = str(override.input_line), override.get_key_element()
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{word}: a sweep needs a list of values, such as {key}=1,2,3")
    try:
        values = [word_of_value(key, value) for value in override.sweep_iterator()]
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{word}: {one_line(error)}") from error
    if key in GROUPS:
        # glob(*) also matches the schemas of a group.
        values = [value for value in values if not value.endswith("_schema")]
    if not values:
        raise ConfigError(f"{word} selects no value; a sweep needs at least one value of {key}")
    return [f"{key}={value}" for value in values]


def word_of_value(key: str, value: Any) -> str:
    """Return a value of a sweep over `key` as a user types it after the equals sign."""
    text = value.text if isinstance(value, QuotedString) else value
    if isinstance(text, str) and declared_type(key.lstrip("+")) is str:
        return typed_text(text)
    return str(Transformer.str(value))


def name_run(cfg: TrainConfig, keys: list[str]) -> str:
    """Return a run name composed of the values of `keys`, such as "diff_v1-lr0.001-seed0".

    Different values give different names. The values 0.1 and 1e-1 give the same name.
    """
    labels, parts = short_labels(keys), []
    for key in keys:
        parts.append(label_value(labels[key], value_of(cfg, key)))
    return shortened("-".join(parts) or "run", LONGEST_NAME)


def value_of(cfg: TrainConfig, key: str) -> Any:
    """Return the value of a config key (enum members as names), or None if the key is missing."""
    value: Any = cfg
    for part in ["resolved", "choices", key] if key in GROUPS else key.lstrip("+").split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.name if isinstance(value, Enum) else value


def short_labels(keys: list[str]) -> dict[str, str]:
    paths = {key: key.lstrip("+").split(".") for key in keys}
    labels = dict.fromkeys(keys, "")
    for key in (key for key in keys if key not in GROUPS):
        others = [other for name, other in paths.items() if name != key and name not in GROUPS]
        ends = (paths[key][-n:] for n in range(1, len(paths[key]) + 1))
        label = next((e for e in ends if all(o[-len(e) :] != e for o in others)), paths[key])
        labels[key] = ".".join(label)
    return labels


def label_value(label: str, value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    text = value if isinstance(value, str) else json.dumps(value)
    safe = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text).strip("_")
    if safe != text or len(safe) > LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]
        safe = "-".join(filter(None, [safe[-LONGEST:].lstrip("_.-"), digest]))
    return f"{label}{'' if number or not label else '_'}{safe}"


def plan_sweep(
    overrides: list[Override],
    world_size: int,
    ranks_here: int = 0,
    created: Sequence[Path] = (),
) -> tuple[SweepDirectory, list[dict[str, Any]]]:
    """Check the configs of all runs, lock the directory of the sweep and update sweep.json.

    Raises ConfigError if a config is invalid or contradicts the config of an existing run, or if an
    unfinished run cannot fit into memory. For `ranks_here`, see `check_memory`; for `created`, see
    `SweepDirectory`.

    Returns:
        The locked directory, and for each run the keyword arguments of `Job`.
    """
    from diffllm.compare.report.rows import row_labels  # A slow import: loads SciPy.

    configs: dict[str, TrainConfig] = {}
    words: dict[str, list[str]] = {}
    by_key = [o.get_key_element() for o in overrides]
    swept = [o.get_key_element() for o in overrides if o.is_sweep_override()]
    jobs = combinations(overrides)
    loaded = configs_of([partial(load_config, job) for job in jobs])
    loaded[0].run.name = "run"
    directory = SweepDirectory(choose_path(loaded[0]).parent, created=created)
    keys = naming_keys(directory, swept, by_key)
    begun = begun_runs(directory)
    names = {name_run(cfg, keys): name for name, cfg in begun.items()}
    same: list[str] = []  # Overrides for all runs, in addition to those of the command.
    if "eval.tokens" not in by_key and any(cfg.eval.tokens is None for cfg in begun.values()):
        # Runs of older versions measured the whole held-out split by default: so do the others.
        same.append("eval.tokens=null")
        for cfg in loaded:
            cfg.eval.tokens = None
    for job, cfg in zip(jobs, loaded, strict=True):
        cfg.check_world(world_size)
        check_wandb(cfg.wandb)
        name = name_run(cfg, keys)
        cfg.run.name = name = names.get(name, name)
        check_length(directory.path / f"{name}.log", f"run.name={name}")
        cfg.run.swept = keys
        words[name], configs[name] = [*job, *same], cfg  # Spellings of one value give one run.
    directory.hold()
    try:
        finished = {name: has_ended(directory.path / name, cfg) for name, cfg in configs.items()}
        for name, cfg in configs.items():
            if finished[name]:
                continue
            try:
                check_memory(cfg, world_size, ranks_here)
            except ConfigError as error:
                raise ConfigError(f"run {name}: {error}") from error
        if keys != directory.record["keys"]:  # Runs that have not begun get new names.
            check_queue({n: i for n, i in directory.record["jobs"].items() if n not in begun})
            known = {name: words_for(cfg, keys) for name, cfg in begun.items()}
            directory.record |= {"keys": keys, "runs": known}
        fixed = [str(o.input_line) for o in overrides if o.get_key_element() not in keys]
        all_configs = {**other_configs(directory, configs, [*fixed, *same]), **configs}
        check_runs(directory, all_configs)
        labels = dict(zip(all_configs, row_labels([*all_configs.values()]), strict=True))
        for name, job in words.items():
            directory.record["runs"][name] = [job[by_key.index(key)] for key in keys]
        directory.write()
    except UserError:
        directory.withdraw()
        raise
    added = f"run.swept=[{','.join(keys)}]"
    jobs_of_runs = []
    for number, (name, cfg) in enumerate(configs.items(), start=1):
        path = directory.path / name
        arguments = [*words[name], added, typed_override("run.name", name)]
        planned = Job(
            number, len(configs), name, str(path), cfg.steps, flops_of_step(cfg), arguments,
            finished[name], group=labels[name],
        )  # fmt: skip
        jobs_of_runs.append(vars(planned))
    return directory, jobs_of_runs


def has_ended(path: Path, cfg: TrainConfig) -> bool:
    with suppress(CheckpointError):  # A damaged run fails with a message when it starts.
        return ending(path, cfg) is not None
    return False


def naming_keys(directory: SweepDirectory, swept_keys: list[str], all_keys: list[str]) -> list[str]:
    """Return the keys whose values form the run names.

    These are the keys in sweep.json, followed by the swept keys that sweep.json does not contain.
    `all_keys` contains the keys of all overrides. Raises ConfigError if a key in sweep.json has no
    override.
    """
    keys = directory.record["keys"] or []
    if not {*keys} <= {*all_keys}:
        raise ConfigError(
            f"{directory.path} is a sweep over {', '.join(keys)}; set each of these keys in the "
            "command, or choose another run.sweep"
        )
    return [*keys, *(key for key in swept_keys if key not in keys)]


def begun_runs(directory: SweepDirectory) -> dict[str, TrainConfig]:
    """Return {run name: saved config} for all runs that have started and are not damaged."""
    begun = {}
    for name in directory.record["runs"]:
        with suppress(CheckpointError):  # The run has not begun, or reports its damage itself.
            begun[name] = load_run_config(directory.path / name)
    return begun


def check_queue(job_ids: dict[str, str]) -> None:
    """Raise ConfigError if a job in `job_ids` is in SLURM's queue.

    The run of such a job cannot be renamed. `job_ids` maps the names of the runs to the ids of
    their SLURM jobs.
    """
    from diffllm.compare.sweep.cluster import in_queue

    for name, job_id in job_ids.items():
        if in_queue(job_id):
            fix = f"wait until job {job_id} begins, or run scancel {job_id}"
            raise ConfigError(
                f"the run {name} is in SLURM's queue, but must be renamed because this command "
                f"sweeps over other keys; {fix}"
            )


def words_for(cfg: TrainConfig, keys: list[str]) -> list[str]:
    """Return overrides that set `keys` to their values in `cfg`; omit keys with value None."""
    values = {key: value for key in keys if (value := value_of(cfg, key)) is not None}
    return [f"{key}={v if key in GROUPS else as_text(v)}" for key, v in values.items()]


def other_configs(
    directory: SweepDirectory, planned: Collection[str], fixed: list[str]
) -> dict[str, TrainConfig]:
    """Return the configs of the runs in sweep.json that this command does not plan, by run name.

    Runs that have not begun are included, because their labels need the same keys; such a run is
    omitted if its config is invalid. `fixed` contains the overrides that all runs share.
    """
    others = {}
    for name, swept in directory.record["runs"].items():
        if name in planned:
            continue
        try:
            check_shared(swept, f"{directory.file}: runs.{name}")
            others[name] = without_imports([*fixed, *swept])
        except ConfigError:
            if (directory.path / name / "config.yaml").is_file():
                raise
    return others


def check_runs(directory: SweepDirectory, configs: dict[str, TrainConfig]) -> None:
    for name, cfg in configs.items():
        path = directory.path / name
        log = path.with_name(f"{name}.log")
        if wrong := why_no_file(log):
            raise ConfigError(f"the log file {log} {wrong}; rename it, or choose another run.sweep")
        try:
            changes = differences(path, cfg)
        except CheckpointError:
            continue  # This run will fail with a message; the remaining runs can start.
        if any(not is_within(key, cfg.run.allow_changes) for key in changes):
            shown = with_lengths(changes, path, cfg)
            raise ConfigError(
                f"the run {path.name} of the sweep {directory.path} was started with "
                f"{what_differs(shown)}; choose another run.sweep, or allow the change with "
                f"run.allow_changes=[{','.join(dict.fromkeys([*cfg.run.allow_changes, *changes]))}]"
            )
        if cfg.resume == "never" and (path / "config.yaml").is_file():
            raise ConfigError(f"{path} contains a run, but resume=never; choose another run.sweep")
