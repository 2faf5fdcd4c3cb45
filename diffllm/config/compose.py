"""Compose a config from overrides with Hydra, and convert the config to typed dataclasses."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from diffllm.config.changes import is_within
from diffllm.config.overrides import (
    COMPOSING,
    CONFIG_GROUPS,
    REMOVED_KEYS,
    check_booleans,
    check_computed,
    check_interpolations,
    check_overrides,
    check_secrets,
    explain,
    implied_source,
    key_of_word,
    one_line,
    unknown_key,
)
from diffllm.config.plugins import config_directory, directories
from diffllm.config.schema import MOST_STEPS, TrainConfig
from diffllm.config.values import check_paths, check_values, leaves
from diffllm.config.words import for_hydra, parsed_override, with_recipe
from diffllm.core.bounds import sections
from diffllm.core.errors import ConfigError
from diffllm.core.keys import Declaration, class_declarations, declaration_of, strictest
from diffllm.core.registry import SCHEMAS
from diffllm.model.attention.base import AttentionConfig


@contextmanager
def hydra() -> Iterator[ConfigLoader]:
    """Initialize Hydra with the built-in YAML files, and yield the config loader of Hydra."""
    # Hydra cannot be initialized twice in a process, and the calling script may have done so.
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def yaml_names(group: str) -> list[str]:
    # Hydra's own listing is slower.
    names = set()
    for directory in (config_directory(), *directories()):
        names |= {path.stem for path in directory.glob(f"{group}/*.yaml")}
    return sorted(names)


def variants() -> list[str]:
    return yaml_names("attention")


def variant_config(name: str, schema: str | None = None) -> AttentionConfig:
    """Return the attention config in the YAML file of the variant `name`.

    If the file is missing, return the default config of the class registered as `schema`. If
    `schema` is None, the file must exist.
    """
    if schema and name not in variants():
        return SCHEMAS["attention", schema]()
    with hydra():
        attention = OmegaConf.to_object(compose(f"attention/{name}").model.attention)
    assert isinstance(attention, AttentionConfig)
    return attention


def compose_config(overrides: list[str]) -> DictConfig:
    """Compose an untyped config from overrides; raises ConfigError for an invalid override."""
    with hydra():
        typed = overrides
        try:
            check_secrets(overrides)
            check_interpolations(overrides)
            check_computed(overrides)
            expanded: list[str] = []
            for word in overrides:
                expanded += with_recipe(word)
            typed = expanded
            parsed = [parsed_override(for_hydra(word)) for word in typed]
            check_overrides(parsed, yaml_names)
            overrides = [str(override.input_line) for override in parsed]
            deciding = deciding_words(parsed)
            if not deciding:
                overrides.insert(0, "experiment=quickstart")
            cfg = compose("train", overrides=overrides, return_hydra_config=True)
            # A key such as data.paths selects a source, whose YAML requires a second composition.
            source = implied_source(cfg, parsed)
            if source:
                overrides = [*source, *overrides]
                cfg = compose("train", overrides=overrides, return_hydra_config=True)
            check_booleans(cfg, parsed)
            choose_length(cfg, parsed)
        except COMPOSING as error:
            raise ConfigError(explain(error, typed)) from error
        except RecursionError:
            # Hydra's parser calls itself at each bracket.
            deepest = max(overrides, key=lambda word: word.count("[") + word.count("{"))
            raise ConfigError(
                f"{deepest[:40]}... has too many nested brackets; remove some levels of brackets"
            ) from None
    chosen = cfg.hydra.runtime.choices
    with open_dict(cfg):
        cfg.resolved.defaults = defaults_text(deciding)
        cfg.resolved.choices = {group: chosen[group] for group in CONFIG_GROUPS}
        del cfg["hydra"]
    return cfg


def deciding_words(overrides: list[Override]) -> list[str]:
    """Return the overrides that affect the results of a run, in their order on the command line.

    A seed does not count: it selects a repetition of the same experiment.
    """
    declared = registered_declarations()
    words = []
    for override in overrides:
        name = override.key_or_group
        parts = [part for key, part in declared.items() if is_within(key, [name])]
        if not parts:
            # The override sets an entry of a mapping, a group without keys, or an unknown key.
            parts = [declaration_of(name, declared)]
        if any(part.computes and "seed" not in part.kinds for part in parts):
            words.append(str(override.input_line))
    return words


def registered_declarations() -> dict[str, Declaration]:
    """Return the declarations of all keys, also of registered variants and data sources."""
    parts = [class_declarations(TrainConfig)]
    for (group, _), config_class in SCHEMAS.items():
        prefix = "model.attention." if group == "attention" else f"{group}."
        parts.append(class_declarations(config_class, prefix))
    return strictest(parts)


def defaults_text(deciding: list[str]) -> str | None:
    """Describe the defaults below the overrides; overrides in `deciding` affect the results.

    Return None if an override sets the experiment.
    """
    if not deciding:
        return "experiment=quickstart, because no override except seeds changes the training"
    if any(key_of_word(word) == "experiment" for word in deciding):
        return None
    key = key_of_word(deciding[0])
    return (
        f"conf/train.yaml, because the override of {key} changes the training; for the defaults of "
        "the quickstart, add experiment=quickstart"
    )


def typed_config(composed: DictConfig) -> TrainConfig:
    """Convert a composed config to validated dataclasses; raises ConfigError for invalid values."""
    try:
        check_interpolated(composed)
        cfg = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{one_line(error)}") from error
    assert isinstance(cfg, TrainConfig)
    config_classes = {"attention": type(cfg.model.attention), "data": type(cfg.data)}
    names = {(group, cls): name for (group, name), cls in SCHEMAS.items()}
    schemas = {}
    for group, config_class in config_classes.items():
        # The default class of `data` is not registered.
        if (group, config_class) in names:
            schemas[group] = names[group, config_class]
    cfg.resolved.schemas = schemas
    check_fields(cfg)
    check_values(cfg)
    keys = [key for key, _, _ in leaves(cfg)]
    # A corpus, a tokenizer and tokens are compared by content, and old runs have removed keys.
    keys += ["corpus", "tokenizer", "tokens", *REMOVED_KEYS]
    for name in cfg.run.allow_changes:
        if not any(is_within(key, [name]) for key in keys):
            raise ConfigError(f"run.allow_changes: {unknown_key(name, keys)}")
    cfg.validate()
    return cfg


def checked(cfg: TrainConfig) -> TrainConfig:
    """Return a validated copy of a config; raises ConfigError if a value or field is invalid."""
    check_fields(cfg)
    try:
        composed = OmegaConf.structured(cfg)
    except OmegaConfBaseException as error:
        # The error names a key without its section.
        ending = f".{error.full_key}"
        candidates = [key for key, _, _ in leaves(cfg) if f".{key}".endswith(ending)]
        key = candidates[0] if len(candidates) == 1 else error.full_key
        raise ConfigError(f"{key}: {one_line(error)}") from error
    copy = typed_config(composed)
    check_paths(copy)
    copy.resolved.schemas = dict(cfg.resolved.schemas)
    return copy


def check_interpolated(cfg: DictConfig, prefix: str = "") -> None:
    """Raise ConfigError if a list or mapping is interpolated from another type of value.

    An example is data.paths=${seed}. OmegaConf does not check the type of such a value.
    """
    for name in cfg:
        # `cfg[name]` would resolve the interpolation.
        node = cfg._get_node(name)
        key = f"{prefix}{name!s}"
        if not isinstance(node, DictConfig | ListConfig) or node._is_missing():
            continue
        if node._is_interpolation() and not isinstance(cfg[name], type(node) | None):
            kind = "list" if isinstance(node, ListConfig) else "mapping"
            raise ConfigError(f"{key} refers to the value {cfg[name]}, but must be a {kind}")
        if isinstance(node, DictConfig) and not (node._is_interpolation() or node._is_none()):
            check_interpolated(node, f"{key}.")


def check_fields(cfg: TrainConfig) -> None:
    """Raise ConfigError if an object in a config has an attribute that its dataclass lacks.

    The override +model.foo=1, for example, adds such an attribute.
    """
    for prefix, node in sections(cfg):
        field_names = [f.name for f in fields(node)]
        for unknown in vars(node).keys() - field_names:
            keys = [key for key, _, _ in leaves(cfg)]
            raise ConfigError(unknown_key(f"{prefix}{unknown}", [*CONFIG_GROUPS, *keys]))


BUDGET_KEYS = tuple(
    key for key, declared in class_declarations(TrainConfig).items() if declared.fact == "steps"
)
"""The keys that determine the steps."""
LENGTHS = ("steps", *BUDGET_KEYS)
"""The key steps, and the keys that determine the steps."""
# In floating point, 0.07 * 100 is 7.000000000000001, which must not become 8.
STEP_TOLERANCE = 1e-6


# Round the share up: otherwise the last interval would end one or two steps before the run ends.
OmegaConf.register_new_resolver(
    "of_steps",
    lambda share, most, _root_: max(1, min(most, math.ceil(share * _root_.steps - STEP_TOLERANCE))),
    replace=True,
)
HELDOUT_SHARE, MOST_HELDOUT = 0.25, 1e7
"""eval.tokens=auto: this share of the run's tokens, at most this number.

A forward pass takes a third of the time of a training step, so the share costs 8% of the training.
Runs of 200,000 tokens or more evaluate at least 50,000.
"""


def auto_tokens(root: DictConfig) -> float:
    """Return the number of held-out tokens of the last loss, from the length of the run."""
    # Not the steps, if max_tokens determines them: their number is rounded down.
    return heldout_tokens(root.max_tokens or root.steps * root.global_batch_size * root.seq_len)


def heldout_tokens(training_tokens: float) -> float:
    return float(min(MOST_HELDOUT, HELDOUT_SHARE * training_tokens))


OmegaConf.register_new_resolver("auto_tokens", lambda _root_: auto_tokens(_root_), replace=True)


def choose_length(cfg: DictConfig, overrides: list[Override]) -> None:
    """Make an override of a key in LENGTHS replace the run length from YAML files.

    If one of these keys has an override, set the others, except `steps`, in `cfg` to None. Raises
    ConfigError if more than one of these keys has an override, or if `cfg` still contains more
    than one.
    """
    replaced = [override.get_key_element() for override in overrides]
    overridden = []
    for name in LENGTHS:
        # Null sets no length, and an override of the section `train` need not set a budget.
        if is_within(name, replaced) and OmegaConf.select(cfg, name) is not None:
            overridden.append(name)
    if overridden:
        for name in BUDGET_KEYS:
            if name not in overridden:
                OmegaConf.update(cfg, name, None)
    remaining = lengths_in(cfg)
    if len(overridden) > 1 or len(remaining) > 1:
        raise ConfigError(
            f"{', '.join(sorted(overridden or remaining))}: only one of these keys can be set; "
            "remove the other keys"
        )


def lengths_in(cfg: DictConfig) -> list[str]:
    """Return the keys of a composed config that determine the steps."""
    return [name for name in BUDGET_KEYS if OmegaConf.select(cfg, name) is not None]


def steps_to_train(cfg: TrainConfig, flops_per_token: float | None = None) -> int:
    """Compute the number of optimizer steps from max_tokens, epochs or train.budget.flops.

    For epochs, first prepare the corpus, because its number of sequences is needed. Raises
    ConfigError if the result is less than one step or more than MOST_STEPS.

    Args:
        flops_per_token: training FLOPs per token, for train.budget.flops.
    """
    tokens_per_step = cfg.global_batch_size * cfg.seq_len
    if cfg.max_tokens is not None:
        name, value = "max_tokens", cfg.max_tokens
        steps = value / tokens_per_step
    elif cfg.epochs is not None:
        # These imports take seconds, and only `epochs` needs them.
        from diffllm.data.preparation.prepare import prepare
        from diffllm.data.sequences import sequences_of_epoch

        name, value = "epochs", cfg.epochs
        sequences = sequences_of_epoch(prepare(cfg.data, cfg.prepare), cfg.data, cfg.seq_len)
        steps = value * sequences / cfg.global_batch_size
    else:
        assert cfg.train.budget.flops is not None
        assert flops_per_token is not None
        name, value = "train.budget.flops", cfg.train.budget.flops
        steps = value / (tokens_per_step * flops_per_token)
    if steps < 1:
        raise ConfigError(
            f"{name}={value:g} is less than one step of global_batch_size="
            f"{cfg.global_batch_size} sequences of seq_len={cfg.seq_len} tokens; increase {name}"
        )
    if steps > MOST_STEPS:
        raise ConfigError(
            f"{name}={value:g} must be at most {value / steps * MOST_STEPS:.4g}, which is the "
            f"maximum of {MOST_STEPS:,} steps"
        )
    # The costs of two variants are closest with the nearest number of steps.
    return int(steps) if flops_per_token is None else round(steps)
