"""Plan the runs of a sweep, and compare their configs with existing runs of the same sweep."""

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.override_parser.types import Override, QuotedString, Transformer
from hydra.errors import HydraException
from omegaconf import ListConfig

from diffllm.compare.sweep.cluster import in_queue
from diffllm.compare.sweep.job import Job
from diffllm.compare.sweep.names import config_value, name_run
from diffllm.compare.sweep.sweep_directory import (
    Configs,
    SweepDirectory,
    begun_configs,
    check_runs,
    naming_keys,
    recorded_configs,
)
from diffllm.config import RunConfig, TrainConfig, load_config
from diffllm.config.compose import hydra
from diffllm.config.loading import configs_of
from diffllm.config.matching import totals
from diffllm.config.overrides import (
    COMPOSING,
    CONFIG_GROUPS,
    LIST_OR_TEXT,
    check_shared,
    explain,
    one_line,
)
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
from diffllm.core.files import check_length
from diffllm.core.keys import class_declarations, declaration_of
from diffllm.core.run_files import sweep_log
from diffllm.metrics.wandb_config import check_wandb
from diffllm.training.memory import check_memory
from diffllm.training.run_directory import choose_path, ending


def experiment_words(words: list[str]) -> list[str]:
    """Return the hydra.sweeper.params of the chosen experiment's YAML file, as overrides."""
    experiments = [word for word in words if word.startswith("experiment=")]
    with hydra():
        try:
            cfg = compose("train", overrides=experiments, return_hydra_config=True)
        except COMPOSING:
            return []  # The check of the runs reports several or missing experiments.
    overrides = []
    for key, values in (cfg.hydra.sweeper.params or {}).items():
        if isinstance(values, ListConfig):
            values = ",".join(word_of_item(key, item) for item in values)
        overrides.append(f"{key}={values}")
    check_shared(overrides, f"hydra.sweeper.params of {' '.join(experiments)}")
    return overrides


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
    run_keys = class_declarations(RunConfig, "run.")
    run_overrides: dict[str, Override] = {}
    launcher: list[str] = []
    for word, override in zip(words, overrides, strict=True):
        # Hydra parsed a quoted text; errors and the overrides of runs have the user's spelling.
        override.input_line = word
        key = override.get_key_element().lstrip("+~")
        is_swept = override.is_sweep_override()
        is_of_launcher = key == "hydra/launcher" or key.startswith("hydra.launcher.")
        is_chosen_by_sweep = "sweep" in declaration_of(key, run_keys).kinds
        if is_of_launcher and not is_swept:
            launcher.append(word)
        elif is_chosen_by_sweep or (is_swept and key.startswith("run.")):
            raise ConfigError(
                f"{word}: a sweep chooses the names of its runs; remove this override, and set one "
                "run.sweep=<name>"
            )
        elif re.split("[./]", key)[0] == "hydra":
            allowed = f"hydra/launcher and hydra.launcher.*, with one value each ({LIST_OR_TEXT})"
            raise ConfigError(
                f"{word}: a sweep can set only these Hydra keys: {allowed}; remove this override"
            )
        else:
            run_overrides[override.get_key_element()] = override
    return list(run_overrides.values()), launcher


def combinations(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each run of a sweep; the last key varies fastest."""
    words_by_key = [split_values(override) for override in overrides]
    return [list(words) for words in itertools.product(*words_by_key)]


def split_values(override: Override) -> list[str]:
    """Return one override per value of `override`, as a user types it."""
    word = str(override.input_line)
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{word}: a sweep needs a list of values, such as {key}=1,2,3")
    try:
        values = [word_of_value(key, value) for value in override.sweep_iterator()]
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{word}: {one_line(error)}") from error
    words = []
    for value in values:
        # glob(*) also matches the schemas of a group.
        if key not in CONFIG_GROUPS or not value.endswith("_schema"):
            words.append(f"{key}={value}")
    if not words:
        raise ConfigError(f"{word} selects no value; a sweep needs at least one value of {key}")
    return words


def word_of_value(key: str, value: Any) -> str:
    """Return a value of a sweep over `key` as a user types it after the equals sign."""
    text = value.text if isinstance(value, QuotedString) else value
    if isinstance(text, str) and declared_type(key.lstrip("+")) is str:
        return typed_text(text)
    return str(Transformer.str(value))


class ConfiguredRun(NamedTuple):
    """The overrides of a run, and its complete config."""

    words: list[str]
    cfg: TrainConfig


def configured_runs(overrides: list[Override]) -> list[ConfiguredRun]:
    """Return a run per combination of swept values; raises ConfigError if a config is invalid."""
    word_lists = combinations(overrides)
    configs = configs_of([partial(load_config, words) for words in word_lists])
    pairs = zip(word_lists, configs, strict=True)
    return [ConfiguredRun(words, cfg) for words, cfg in pairs]


def plan_sweep(
    overrides: list[Override],
    world_size: int,
    ranks_here: int = 0,
    created_paths: Sequence[Path] = (),
) -> tuple[SweepDirectory, list[dict[str, Any]]]:
    """Check the configs of all runs, lock the directory of the sweep and update sweep.json.

    Raises ConfigError if a config is invalid or contradicts the config of an existing run, or if an
    unfinished run cannot fit into memory. For `ranks_here`, see `check_memory`; for
    `created_paths`, see `SweepDirectory`.

    Returns:
        The locked directory, and for each run the keyword arguments of `Job`.
    """
    all_keys = [override.get_key_element() for override in overrides]
    swept_runs = configured_runs(overrides)
    swept_runs[0].cfg.run.name = "run"  # `choose_path` needs a name.
    path = choose_path(swept_runs[0].cfg).parent
    directory = SweepDirectory(path, created_paths=created_paths)
    keys = naming_keys(directory, keys_of_sweep(overrides), all_keys)
    begun = begun_configs(directory)
    shared_words = apply_older_defaults(swept_runs, all_keys, begun)
    runs = named_runs(swept_runs, keys, begun)
    for name, run in runs.items():
        run.cfg.check_world(world_size)
        check_wandb(run.cfg.wandb)
        check_length(sweep_log(directory.path / name), f"run.name={name}")
    # Only now: an invalid config must not leave a new directory. After `hold`, no other process can
    # change sweep.json or start the same runs.
    directory.hold()
    try:
        finished = {name: is_finished(path / name, run.cfg) for name, run in runs.items()}
        for name, run in runs.items():
            if not finished[name]:
                check_memory_of(name, run.cfg, world_size, ranks_here)
        if keys != directory.record["keys"]:
            record_keys(directory, keys, begun)
        for override in overrides:
            if override.get_key_element() not in keys:
                shared_words.append(str(override.input_line))
        groups = groups_of_runs(directory, runs, shared_words)
        places = [all_keys.index(key) for key in keys]
        for name, run in runs.items():
            directory.record["runs"][name] = [run.words[place] for place in places]
        directory.write()
    except UserError:
        directory.withdraw()
        raise
    swept = f"run.swept=[{','.join(keys)}]"
    jobs = []
    for number, (name, run) in enumerate(runs.items(), start=1):
        job = Job(
            number=number,
            total=len(runs),
            name=name,
            path=str(directory.path / name),
            steps=run.cfg.steps,
            flops_of_step=flops_of_step(run.cfg),
            words=[*run.words, swept, typed_override("run.name", name)],
            finished=finished[name],
            group=groups[name],
        )
        jobs.append(vars(job))
    return directory, jobs


def groups_of_runs(
    directory: SweepDirectory, runs: dict[str, ConfiguredRun], shared_words: list[str]
) -> dict[str, str]:
    """Check all runs of a sweep, and return their groups in wandb, which are rows of the report.

    Recorded runs that this command does not plan are included. Raises ConfigError if an existing
    run cannot resume.

    Args:
        shared_words: overrides that all runs share.
    """
    from diffllm.compare.report.rows import row_labels  # A slow import: loads SciPy.

    configs = recorded_configs(directory, runs, shared_words)
    for name, run in runs.items():
        configs[name] = run.cfg
    check_runs(directory, configs)
    # A label names only the keys in which the runs differ, so it depends on all runs of the sweep.
    labels = row_labels(list(configs.values()))
    return dict(zip(configs, labels, strict=True))


def keys_of_sweep(overrides: list[Override]) -> list[str]:
    return [o.get_key_element() for o in overrides if o.is_sweep_override()]


def apply_older_defaults(
    swept_runs: list[ConfiguredRun], all_keys: list[str], begun: Configs
) -> list[str]:
    """Give all runs the older default of eval.tokens if a begun run has it.

    Runs of older versions measured the whole held-out split by default, so the new runs of their
    sweep must do the same. Return the overrides that this function adds.
    """
    is_older = any(cfg.eval.tokens is None for cfg in begun.values())
    if "eval.tokens" in all_keys or not is_older:
        return []
    for words, cfg in swept_runs:
        words.append("eval.tokens=null")
        cfg.eval.tokens = None
    return ["eval.tokens=null"]


def named_runs(
    swept_runs: list[ConfiguredRun], keys: list[str], begun: Configs
) -> dict[str, ConfiguredRun]:
    """Set and return the names of the runs. Several spellings of equal values give one run.

    Begun runs keep their names, which may be from a sweep over fewer keys.
    """
    begun_names = {name_run(cfg, keys): name for name, cfg in begun.items()}
    runs = {}
    for run in swept_runs:
        new_name = name_run(run.cfg, keys)
        name = begun_names.get(new_name, new_name)
        run.cfg.run.name = name
        run.cfg.run.swept = keys
        runs[name] = run
    return runs


def flops_of_step(cfg: TrainConfig) -> float:
    """Return the training FLOPs of one optimizer step; 0 if the model cannot be built."""
    try:
        flops_per_token = totals(cfg.model, cfg.visible_keys)["flops"]
    except Exception:  # The run itself fails with a message; the other runs can start.
        return 0.0
    return cfg.global_batch_size * cfg.seq_len * flops_per_token


def is_finished(path: Path, cfg: TrainConfig) -> bool:
    with suppress(CheckpointError):  # A damaged run fails with a message when it starts.
        return ending(path, cfg) is not None
    return False


def check_memory_of(name: str, cfg: TrainConfig, world_size: int, ranks_here: int) -> None:
    try:
        check_memory(cfg, world_size, ranks_here)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from error


def record_keys(directory: SweepDirectory, keys: list[str], begun: Configs) -> None:
    """Record that the names of runs consist of `keys`. Runs that have not begun get new names.

    Raises ConfigError if such a run is in SLURM's queue.
    """
    for name, job_id in directory.record["jobs"].items():
        if name not in begun and in_queue(job_id):
            fix = f"wait until job {job_id} begins, or run scancel {job_id}"
            raise ConfigError(
                f"the run {name} is in SLURM's queue, but must be renamed because this command "
                f"sweeps over other keys; {fix}"
            )
    words_by_name = {}
    for name, cfg in begun.items():
        words_by_name[name] = words_for(cfg, keys)
    directory.record["keys"] = keys
    directory.record["runs"] = words_by_name


def words_for(cfg: TrainConfig, keys: list[str]) -> list[str]:
    """Return overrides that set `keys` to their values in `cfg`; omit keys with value None."""
    words = []
    for key in keys:
        value = config_value(cfg, key)
        if value is None:
            continue
        text = value if key in CONFIG_GROUPS else as_text(value)
        words.append(f"{key}={text}")
    return words
