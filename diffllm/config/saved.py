"""Read the config of a run directory without executing code, and compare two configs."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from diffllm.config.changes import Changes, is_fixed, what_differs
from diffllm.config.compose import compose_config, typed_config
from diffllm.config.overrides import without_removed
from diffllm.config.plugin_code import LOADED, version_changes
from diffllm.config.plugins import MODULE_NAME
from diffllm.config.run_config import ResolvedConfig
from diffllm.config.schema import TrainConfig
from diffllm.config.yaml_file import LARGEST_YAML, parse_yaml
from diffllm.core.errors import CheckpointError, ConfigError, UserError
from diffllm.core.files import read_text, readable, similar_path
from diffllm.core.keys import Declaration, declaration_of, declarations
from diffllm.core.printing import to_stderr
from diffllm.core.registry import SCHEMAS, SOURCES
from diffllm.core.run_files import RunFile, read_facts
from diffllm.data.config import PREPARED_ELSEWHERE, DataConfig

Counts = Callable[[Declaration], bool]
"""Whether a difference in a key with this declaration counts."""
MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OSError, RecursionError)


def yaml_line(key: str, value: str) -> re.Pattern[str]:
    """Return the pattern of a line in config.yaml with the value of `key`; group 1 is the value.

    `value` is the pattern of a plain value.
    """
    section, _, name = key.rpartition(".")
    start = f"^{section}:\n(?:  .*\n)*?  " if section else "^"
    # A value continues on the next line if that line is indented further.
    end = "\n(?!   )" if section else "\n(?! )"
    return re.compile(f"{start}{name}: ({value}){end}", re.MULTILINE | re.ASCII)


WHOLE_NUMBER = r"0|[1-9]\d{0,17}"
RATE = r"0\.\d{0,9}[1-9]\d*|[1-9]\d{0,9}\.\d+|[1-9]\.\d+e-\d\d"
PATH = r"null|[\w.+-]*/[\w./+-]*"
VARYING = {
    "seed": yaml_line("seed", WHOLE_NUMBER),
    "model.init_seed": yaml_line("model.init_seed", WHOLE_NUMBER),
    "optim.lr": yaml_line("optim.lr", RATE),
    "run.name": yaml_line("run.name", r"null|[A-Za-z][\w.-]*\d"),
    "run.dir": yaml_line("run.dir", PATH),
    "run.study": yaml_line("run.study", PATH),
}
"""Lines of config.yaml that differ between runs of a sweep or study, if the value is plain.

YAML reads a plain value as a valid integer, a positive float, null or a string.
"""
PARSED: dict[tuple[Any, ...], TrainConfig] = {}
"""Parsed configs, by the first result of `split` and the registered classes."""


def differences(path: Path, cfg: TrainConfig, counts: Counts = is_fixed) -> Changes:
    """Compare the run at `path` with the config `cfg` and with the plugins of this process.

    Return {key: (value in the run, current value)} for all differences that count. Return {} if
    `path` is not a run. Raises CheckpointError if config.yaml is invalid.
    """
    if not (path / RunFile.CONFIG).is_file():
        return {}
    return changes_to(load_run_config(path), cfg, counts) | plugin_changes(path)


def with_lengths(changes: Changes, path: Path, cfg: TrainConfig) -> Changes:
    """Return `changes`, the result of `differences`, for a message.

    If `steps` differs, include the keys that determine the steps, such as train.budget.flops.
    """
    if "steps" not in changes:
        return changes
    lengths = changes_to(load_run_config(path), cfg, lambda declared: declared.fact == "steps")
    return {**lengths, **changes}


def plugin_changes(run: Path, needs_all: bool = True) -> Changes:
    """Compare the plugin versions of a run with those of this process; see `version_changes`.

    Plugins of the run that this process has not imported count as changed if `needs_all` is true,
    and are ignored if `needs_all` is false.
    """
    record = read_facts(run)
    recorded = record.get("plugin_code") or {}
    if not needs_all:
        recorded = {name: version for name, version in recorded.items() if name in LOADED}
    return version_changes(recorded)


@cache
def warn_of_plugins(run: Path) -> None:
    changes = plugin_changes(run, needs_all=False)
    if changes:
        to_stderr(f"warning: {run} was trained with {what_differs(changes)}")


def changes_to(begun: Any, cfg: Any, counts: Counts = is_fixed) -> Changes:
    """Return {key: (value in `begun`, value in `cfg`)} for all differences that count.

    `begun` and `cfg` are two configs, or one section of two configs. Omit a key that has the value
    of another key in both configs, as `model.init_seed` usually has the value of `seed`.
    """
    saved = flatten(yaml_dict(begun))
    new = flatten(yaml_dict(cfg))
    declared = {**declarations(begun), **declarations(cfg)}
    differing = {key for key in saved.keys() | new.keys() if saved.get(key) != new.get(key)}
    changes: Changes = {}
    for key in sorted(differing):
        declaration = declaration_of(key, declared)
        source = declaration.follows
        is_following = False
        # The difference of the source is enough, if the key follows the source in both configs.
        if source in differing:
            follows_before = saved.get(key) == saved.get(source)
            follows_now = new.get(key) == new.get(source)
            is_following = follows_before and follows_now
        if counts(declaration) and not is_following:
            changes[key] = (saved.get(key), new.get(key))
    return changes


def load_run_config(path: Path) -> TrainConfig:
    """Load config.yaml of the run directory `path`.

    Of runs that differ only in the keys of VARYING, one config is parsed, which takes 0.03 s; the
    others are copies. Raises CheckpointError if config.yaml is missing or invalid. Raises UserError
    if the config needs a plugin that is not imported.
    """
    file = path / RunFile.CONFIG
    try:
        with readable(file):
            # A config is larger than a recipe, because each source includes all defaults.
            text = read_text(file, 4 * LARGEST_YAML)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise CheckpointError(no_run(path)) from None
        raise
    common, values = split(text)
    if values is None:
        return parse_config(file, text)
    # A reloaded plugin registers a new class with the same name.
    cache_key = (common, *SCHEMAS.values())
    if cache_key not in PARSED:
        PARSED[cache_key] = parse_config(file, text)
    # A copy, because callers may change values.
    cfg = deepcopy(PARSED[cache_key])
    cfg.seed = int(values["seed"])
    cfg.model.init_seed = int(values["model.init_seed"])
    cfg.optim.lr = float(values["optim.lr"])
    for name in ("name", "dir", "study"):
        value = values[f"run.{name}"]
        setattr(cfg.run, name, None if value == "null" else value)
    return cfg


def split(text: str) -> tuple[str, dict[str, str] | None]:
    """Split a config.yaml into (text without the values of the keys in VARYING, {key: value}).

    If the value of a key is missing or does not match its pattern, the dict is None.
    """
    values = {}
    for key, line in VARYING.items():
        match = line.search(text)
        if match is None:
            return text, None
        values[key] = match[1]
        text = text[: match.start(1)] + text[match.end(1) :]
    return text, values


def parse_config(file: Path, text: str) -> TrainConfig:
    try:
        with readable(file):
            content = parse_yaml(text)
        if not isinstance(content, dict):
            raise ValueError("the file is not a mapping of keys to values")
        # OmegaConf would resolve ${, also from the environment, and replace '???'.
        for placeholder in ("${", "'???'"):
            if placeholder in repr(content):
                raise ValueError(f"the file contains {placeholder} in place of a value")
        content = with_resolved(without_removed(content))
        check_registered(file.parent, content)
        schemas = content["resolved"].get("schemas", {})
        if "attention" in schemas:
            classes = {group: SCHEMAS[group, name] for group, name in schemas.items()}
            data = classes.get("data", DataConfig)
            base, values = defaults_of(None, classes["attention"], data)
        else:
            # A run of an older version has no schemas, and can only use built-in variants.
            variant = content["resolved"]["choices"]["attention"]
            base, values = defaults_of(variant)
        # A merge of only the changed entries is faster than a merge of all.
        merged = OmegaConf.merge(base, changed(content, values))
        return typed_config(merged)  # type: ignore[arg-type]
    except (ConfigError, OmegaConfBaseException, YAMLError, *MALFORMED) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} is not a config of this version: {reason}") from error


def with_resolved(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config with computed values in the section `resolved`.

    Older versions stored these values in the section `run`.
    """
    if "resolved" in saved:
        return saved
    run = dict(saved["run"])
    resolved = {}
    for computed in fields(ResolvedConfig):
        if computed.name in run:
            resolved[computed.name] = run.pop(computed.name)
    return {**saved, "run": run, "resolved": resolved}


def no_run(path: Path, missing: str = RunFile.CONFIG) -> str:
    """Return the error message for a `path` that is not a run directory.

    `missing` is the file or directory that `path` lacks. If `path` exists, the message lists runs
    inside `path`; otherwise, the message suggests run directories with similar names.
    """

    def has_runs(directory: Path) -> bool:
        # The directory of a run, or the directory of a sweep with its runs. A pattern must have the
        # exact type str: `glob` of Python 3.11 raises TypeError for a member of an enum.
        return any(directory.glob(str(missing))) or any(directory.glob(f"*/{missing}"))

    if not path.is_dir():
        suggestion = similar_path(path, has_runs)
        return f"{path} is not a run directory: it does not exist{suggestion}"
    runs = sorted(file.parent.name for file in path.glob(f"*/{RunFile.CONFIG}"))
    hint = ""
    if runs:
        hint = f"; it contains {', '.join(runs[:5])}"
    if len(runs) > 5:
        hint += ", ..."
    return f"{path} is not a run directory: it has no {missing}{hint}"


def changed(content: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the nested dict `content` that differ from `defaults`."""
    changes = {}
    for key, value in content.items():
        default = defaults.get(key)
        # The types differ for True and 1, which Python calls equal.
        has_other_type = type(value) is not type(default)
        if isinstance(value, dict) and isinstance(default, dict):
            changes[key] = changed(value, default)
        elif has_other_type or value != default or key not in defaults:
            changes[key] = value
    return changes


def check_registered(path: Path, saved: dict[str, Any]) -> None:
    """Raise UserError if a saved config needs a plugin that is not imported.

    Do not import the plugin, because only the user can decide whether to trust the plugin's code.
    """
    missing = []
    for group, name in saved["resolved"].get("schemas", {}).items():
        if (group, name) not in SCHEMAS:
            missing.append(f"{group}={name}")
    data = saved["data"]
    for part in (data, *data.get("sources", {}).values()):
        source = part["source"]
        if source not in SOURCES and source not in PREPARED_ELSEWHERE:
            missing.append(f"data.source={source}")
    if missing:
        names = [str(name) for name in saved.get("plugins", [])]
        # The file may come from another person, and the user may copy the advice to a shell.
        are_modules = all(map(MODULE_NAME.fullmatch, names))
        plugins = "MODULE"
        if names and are_modules:
            plugins = ",".join(names)
        raise UserError(
            f"{path} needs {' and '.join(missing)} of a plugin that is not imported; "
            f"if you trust the code of the plugin, add plugins=[{plugins}]"
        )


@cache
def defaults_of(
    variant: str | None, attention: type | None = None, data: type = DataConfig
) -> tuple[DictConfig, Any]:
    words = [f"attention={variant}"] if variant else ["experiment=none"]
    base = compose_config(words)
    if attention:
        base.model.attention = OmegaConf.structured(attention)
    if data is not DataConfig:
        base.data = OmegaConf.structured(data)
    mappings = (
        base.resolved.schemas,
        base.data.sources,
        base.data.get("level"),
        base.eval.levels,
        base.data.document_lengths,
    )
    for mapping in mappings:
        # Entries of these mappings have arbitrary names, which OmegaConf's struct mode rejects.
        if mapping is not None:
            OmegaConf.set_struct(mapping, False)
    return base, OmegaConf.to_container(base, enum_to_str=True)


def yaml_dict(cfg: Any) -> dict[str, Any]:
    """Convert a config dataclass to nested dicts; replace enum members by their names."""

    def by_name(items: list[tuple[str, Any]]) -> dict[str, Any]:
        named = {}
        for key, value in items:
            named[key] = value.name if isinstance(value, Enum) else value
        return named

    return asdict(cfg, dict_factory=by_name)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested dicts to one dict with dotted keys, such as {"optim.lr": 0.001}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
