"""The jobs that a sweep's command line makes, and the names of their runs."""

import hashlib
import itertools
import json
import re
from enum import Enum
from operator import attrgetter
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import ListConfig

from diffllm.config import TrainConfig
from diffllm.config.compose import hydra
from diffllm.config.overrides import COMPOSING, GROUPS, check_shared, explain, one_line
from diffllm.core.errors import ConfigError
from diffllm.training.directory import LONGEST_NAME

LONGEST = 40
"""Characters of a value that a name shows; a longer one is told apart by its hash."""


def experiment_words(words: list[str]) -> list[str]:
    """Return the chosen experiment's swept values, its hydra.sweeper.params, as overrides."""
    chosen = [word for word in words if word.startswith("experiment=")]
    with hydra():
        try:
            cfg = compose("train", overrides=chosen, return_hydra_config=True)
        except COMPOSING:
            return []  # several experiments, or one that is not there: the jobs' own check says so
    swept = [
        f"{key}={','.join(map(str, values)) if isinstance(values, ListConfig) else values}"
        for key, values in (cfg.hydra.sweeper.params or {}).items()
    ]
    check_shared(swept, f"hydra.sweeper.params of {' '.join(chosen)}")
    return swept


def split_overrides(words: list[str]) -> tuple[list[Override], list[str]]:
    """Return the runs' overrides, the last for each key, and the words about Hydra's launcher.

    Raises ConfigError for what Hydra's grammar does not know, and keys that a sweep sets itself.
    """
    with hydra() as loader:  # which glob(...) reads
        try:
            overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
        except HydraException as error:
            raise ConfigError(explain(error, words)) from error
    own: dict[str, Override] = {}
    launcher: list[str] = []
    for override in overrides:
        word, key = str(override.input_line), override.get_key_element().lstrip("+~")
        if key in ("run.name", "run.dir"):
            raise ConfigError(
                "a sweep names its runs: use run.sweep=<name>, not run.name or run.dir"
            )
        if key == "run.swept" or (key.startswith("run.") and override.is_sweep_override()):
            raise ConfigError(f"{word}: a sweep has one run.sweep and fills in run.swept itself")
        if key == "hydra/launcher" or key.startswith("hydra.launcher."):
            if override.is_sweep_override():
                raise ConfigError(f"{word}: all runs of a sweep have one launcher")
            launcher.append(word)
        elif key.split(".")[0].split("/")[0] == "hydra":
            raise ConfigError(
                f"{word}: a sweep takes its values from keys like seed=0,1,2 and its directory "
                "from run.sweep; of Hydra's keys it has hydra/launcher and hydra.launcher.*"
            )
        else:
            own[override.get_key_element()] = override
    return list(own.values()), launcher


def combinations(overrides: list[Override]) -> list[list[str]]:
    """List the overrides of every job; the values of the last swept key change fastest."""
    return [list(job) for job in itertools.product(*map(split_values, overrides))]


def split_values(override: Override) -> list[str]:
    """Split an override into one for every value."""
    word, key = str(override.input_line), override.get_key_element()
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{word}: a sweep needs single values: {key}=1,2,3 or choice(...) or range(...)"
        )
    try:
        values = list(override.sweep_string_iterator())
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{word}: {one_line(error)}") from error
    if key in GROUPS:
        values = [value for value in values if not value.endswith("_schema")]  # glob(*) finds them
    if not values:
        raise ConfigError(f"{word}: these are no values")
    return [f"{key}={value}" for value in values]


def name_run(cfg: TrainConfig, keys: list[str]) -> str:
    """Name a run after the values of `keys`: diff_v1-lr0.001-seed0.

    The name depends on a value, not on its spelling, and two values never have one name.
    """
    labels, parts = short_labels(keys), []
    for key in keys:
        value = cfg.run.choices[key] if key in GROUPS else attrgetter(key.lstrip("+"))(cfg)
        parts.append(label_value(labels[key], value))
    name = "-".join(parts) or "run"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def short_labels(keys: list[str]) -> dict[str, str]:
    """Return the end of each key that no other key has; nothing for a config group."""
    paths = {key: key.lstrip("+").split(".") for key in keys}
    labels = dict.fromkeys(keys, "")
    for key in (key for key in keys if key not in GROUPS):
        others = [other for name, other in paths.items() if name != key and name not in GROUPS]
        ends = (paths[key][-n:] for n in range(1, len(paths[key]) + 1))
        label = next((e for e in ends if all(o[-len(e) :] != e for o in others)), paths[key])
        labels[key] = ".".join(label)
    return labels


def label_value(label: str, value: Any) -> str:
    """Label a value: seed0, lr0.0006, backend_flash; letters, digits and _ . + - only."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = value_text(value)
    safe = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text).strip("_")
    if safe != text or len(safe) > LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]
        safe = "-".join(filter(None, [safe[-LONGEST:].lstrip("_.-"), digest]))
    return f"{label}{'' if number or not label else '_'}{safe}"


def value_text(value: Any) -> str:
    """Return a value as text; a list of one text is that text."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return value if isinstance(value, str) else json.dumps(value)
