"""Checks of overrides before composition, and one-line explanations of composition errors."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from diffllm.config.run_config import EvalConfig
from diffllm.config.synonyms import suggestion
from diffllm.core.errors import ConfigError, choose_from, did_you_mean
from diffllm.core.keys import class_declarations
from diffllm.core.secrets import SECRET_IN_VALUE, SECRET_KEY
from diffllm.data.config import DataConfig

CONFIG_GROUPS = ("model", "attention", "data", "optim", "parallel", "experiment")
FILLED_IN = "resolved"
"""Section of computed values, which overrides cannot set."""
FIXED = "an override cannot set or delete this key; remove this override"
COMPOSING = (
    HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, LookupError,
    ArithmeticError, OSError,
)  # fmt: skip
AUTO = {
    name: declared.auto
    for name, declared in class_declarations(EvalConfig, "eval.").items()
    if declared.auto
}
"""Numbers that may also be the word "auto", and the interpolation that computes the number."""

LONGEST_QUOTED = 200
NOT_A_NUMBER = re.compile(r"Value (.*) of type '\w+' could not be converted to (Float|Integer)")
NOT_A_LIST = re.compile(r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.")
NOT_A_TEXT = re.compile(r"Invalid type assigned: \w+ is not a subclass of str\..*")
NOT_OPTIONAL = re.compile(r"field '\S+' is not Optional")
NOT_A_SECTION = re.compile(r"Invalid type assigned: \w+ is not a subclass of \w+\..*")
OF_A_SECTION = "a section cannot have a value; set its keys, such as wandb.mode=disabled"
LIST_OR_TEXT = "a list needs brackets, a text with commas needs quotes"
NUMBER_TYPES = {"Float": "a number, such as 0.5 or 1e6", "Integer": "an integer"}
ALLOWED = re.compile(r"\$\{(?:[\w.\[\]-]+|of_steps:[\w\s.,+-]*|auto_tokens:)\}")


def check_interpolations(words: list[str], prefix: str = "") -> None:
    """Raise ConfigError if an override contains a disallowed interpolation.

    The allowed forms of ${...} are ${key} and ${of_steps:...}.
    `prefix` is the start of the error message, for example a file name.
    """
    for word in words:
        # Hydra removes backslashes, so `\\${` is an interpolation, too.
        unescaped = word.replace("\\", "")
        if "${" in ALLOWED.sub("", unescaped):
            key = word.partition("=")[0]
            raise ConfigError(
                f"{prefix}{key}: this interpolation is not allowed; use ${{KEY}}, such as "
                "${seq_len}, or "
                "${of_steps:SHARE,MOST}, such as ${of_steps:0.1,1000}"
            )


def check_shared(words: list[str], source: str) -> None:
    """Raise ConfigError if overrides from a file set `plugins` or Hydra's own keys (hydra.*).

    Also raise ConfigError for interpolations that `check_interpolations` does not allow. Error
    messages start with `source`, which names the file.
    """
    check_interpolations(words, f"{source}: ")
    for word in words:
        if re.match(r"[\s+~]*(plugins|hydra)\b", word):
            raise ConfigError(
                f"{source}: {word}: a file cannot set plugins or Hydra's own keys; "
                "remove this override from the file"
            )


def check_secrets(words: list[str]) -> None:
    """Raise ConfigError if a key names a secret, because config.yaml would store the secret.

    Examples are keys that end in api_key or password. The message does not contain the value.
    """
    for word in words:
        key = key_of_word(word)
        _, _, value = word.partition("=")
        unescaped = value.replace("\\", "")
        if SECRET_KEY.fullmatch(key) or SECRET_IN_VALUE.fullmatch(unescaped):
            raise ConfigError(f"{key}: set secrets in the environment: WANDB_API_KEY, HF_TOKEN")


def check_computed(words: list[str]) -> None:
    """Raise ConfigError if an override sets a key whose value loading computes."""
    for word in words:
        if re.match(rf"{FILLED_IN}\b", key_of_word(word)):
            raise ConfigError(f"{word}: {FIXED}")


def check_choice(word: str, name: str, options: list[str]) -> None:
    if name not in options:
        raise ConfigError(f"{word} does not exist{choose_from(name, options)}")


def check_overrides(overrides: list[Override], choices: Callable[[str], list[str]]) -> None:
    """Raise ConfigError for an override that Hydra accepts but diffllm does not allow.

    Examples are removed keys and sweeps without -m. `choices(group)` returns the names of the YAML
    files in a config group.
    """
    for override in overrides:
        word = str(override.input_line)
        key = override.key_or_group
        if key in REMOVED_KEYS:
            raise ConfigError(removal(key))
        is_fixed = not key or key == "run" or re.match(r"hydra\b", key)
        if is_fixed or override.is_delete():
            raise ConfigError(f"{word}: {FIXED}")
        if key in CONFIG_GROUPS and override.is_add():
            raise ConfigError(f"{word}: {key} already exists; remove the +")
        if override.is_sweep_override():
            raise ConfigError(f"{word}: several values need -m (a sweep); {LIST_OR_TEXT}")
        if key in CONFIG_GROUPS and override.package is None:
            name = str(override.value())
            options = choices(key)
            word = f"{key}={name}"
            # The name looks like a file, a pattern of files, or a dataset of the hub.
            names_data = bool(re.search(r"[./*]", name))
            if key == "data" and name not in options and names_data:
                instead = f"use data.paths={name} for files, data.dataset={name} for a hub dataset"
                raise ConfigError(f"{word} does not exist; {instead}")
            check_choice(word, name, options)


def check_booleans(cfg: DictConfig, overrides: list[Override]) -> None:
    """Raise ConfigError if an override sets a boolean key to an integer other than 0 and 1."""
    for override in overrides:
        value = override.value()
        # OmegaConf converts any integer to a boolean without an error.
        is_other_integer = isinstance(value, int) and value not in (0, 1)
        if is_other_integer and isinstance(OmegaConf.select(cfg, override.key_or_group), bool):
            raise ConfigError(f"{override.input_line}: the value must be true or false")


def unknown_key(key: str, keys: Sequence[str]) -> str:
    if key in REMOVED_KEYS:
        return removal(key)
    # A name that other frameworks use says more than a name with similar letters.
    hint = suggestion(key) or did_you_mean(key, keys)
    return f"unknown key {key}{hint}"


def flag_suggestion(word: str) -> str:
    """Return '; did you mean optim.lr=...?' for flags of other frameworks, such as --learning-rate.

    Return '' for any other word.
    """
    name = word.partition("=")[0]
    return suggestion(name[2:]) if name.startswith("--") else ""


def key_of_word(word: str) -> str:
    return word.partition("=")[0].strip().lstrip("+~")


def implied_source(cfg: DictConfig, overrides: list[Override]) -> list[str]:
    """Return the override of the data source that other overrides imply.

    For example, return ["data=files"] for data.paths=... Return [] if an override sets data or
    data.source, if no override implies a source, or if `cfg` already has the implied source.
    Raises ConfigError if the overrides imply two sources.
    """
    keys = {override.key_or_group: override.value() for override in overrides}
    if "data" in keys or "data.source" in keys:
        return []
    source_by_key = {}
    for key, declared in class_declarations(DataConfig, "data.").items():
        if declared.implies and keys.get(key) is not None:
            source_by_key[key] = declared.implies
    nonempty = {}
    for key, source in source_by_key.items():
        if keys[key] not in ([], {}):
            nonempty[key] = source
    # Empty values count only alone: the empty list of data.paths= must not select the default
    # corpus.
    if nonempty:
        source_by_key = nonempty
    sources = set(source_by_key.values())
    if len(sources) > 1:
        choices = [f"{key} (data={source})" for key, source in source_by_key.items()]
        raise ConfigError(
            f"{' and '.join(choices)} select different data sources; remove one of them"
        )
    return [f"data={source}" for source in sources if cfg.data.source != source]


def known_keys(node: Any, prefix: str = "") -> list[str]:
    names = []
    for name in node:
        names.append(f"{prefix}{name}")
        child = node._get_node(name)
        if not isinstance(child, DictConfig):
            continue
        if not child._is_missing() and not child._is_none():
            names += known_keys(child, f"{prefix}{name}.")
    return names


def explain(error: Exception, words: list[str]) -> str:
    """Return a one-line message for an error raised while composing the typed overrides `words`.

    For an unknown key, the message suggests a similar key.
    """
    if isinstance(error, OverrideParseException):
        return explain_syntax(error.override or "")
    # Hydra wraps the error of OmegaConf, which names the key.
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = one_line(cause)
    full_key = re.search(r"full_key: (\S+)", str(cause))
    key = full_key[1] if full_key else ""
    if key in AUTO:
        text += f", null, or auto (in a YAML file: {AUTO[key]})"
    file = re.match(r"In '(\w+)/([\w.-]+)': (?:.* raised while composing config: )?", text)
    file_choice = ""
    prefix = ""
    if file:
        file_choice = f"{file[1]}={file[2]}"
        prefix = f"{file_choice}: "
    unknown = re.search(r"Key '(\S+)' (?:is not in struct|not in '\w+')", text)
    if unknown:
        return explain_unknown_key(key or unknown[1], file_choice, error, words)
    schema = re.search(r"Could not load '(\w+)/(\w+)_schema'", text)
    if schema:
        return f"{prefix}{schema[1]}={schema[2]} is not registered; import it with plugins=[module]"
    if file:
        if key:
            prefix += f"{key}: "
        return f"{prefix}{text[file.end() :]}"
    override = re.search(r"Error merging override \+*(.*)|Could not override '(.*?)'", str(error))
    culprit = key
    if override:
        culprit = override[1] or override[2]
        # Hydra names the quoted form of a word.
        typed = [word for word in words if key_of_word(word) == key_of_word(culprit)]
        culprit = typed[-1] if typed else culprit
    return f"{culprit}: {text}" if culprit else text


def explain_unknown_key(name: str, file_choice: str, error: Exception, words: list[str]) -> str:
    """Return a one-line message for an unknown key; arguments as in `explain`.

    Args:
        name: the unknown key.
        file_choice: the YAML file with the key, as GROUP=NAME; "" for a key in an override.
    """
    # The keys depend on the chosen variants, but a file with a wrong key cannot be composed.
    choices = []
    if not file_choice:
        choices = [word for word in words if key_of_word(word) in CONFIG_GROUPS]
    names = [*CONFIG_GROUPS, *known_keys(compose("train", overrides=choices))]
    if file_choice and name == file_choice.partition("=")[0]:
        # Hydra has put the content of the file below the name of the group.
        return f"{file_choice}: the first line of the YAML must be '# @package _global_'"
    prefix = f"{file_choice}: " if file_choice else ""
    override = re.search(r"Error merging override \+*([\w.]+)=", str(error))
    if override and "." not in name and override[1] != name:
        # The key is inside a list, and its name lacks the key of the list.
        prefix = f"{override[1]}: "
    # The suggestion must not be the key itself or its section.
    names = [other for other in names if other != name and not name.startswith(f"{other}.")]
    # Hydra names only the first unknown section; the last part of the key is more specific.
    typed_keys = [key_of_word(word) for word in words]
    inner_keys = [key for key in typed_keys if key.startswith(f"{name}.")]
    if inner_keys and not file_choice:
        name = inner_keys[0]
    return f"{prefix}{unknown_key(name, names)}"


def explain_syntax(word: str) -> str:
    """Return a one-line message for an override that Hydra cannot parse."""
    shown = repr(word[:LONGEST_QUOTED])
    key = key_of_word(word)
    if "=" in word and not key.isascii():
        return unknown_key(key, [*CONFIG_GROUPS, *known_keys(compose("train"))])
    if re.match(r"\+{0,2}[a-z_][\w.]*=", word):
        return f"{shown}: brackets and quotes must balance, and text in a mapping needs quotes"
    return f"{shown} is not of the form key=value{flag_suggestion(word)}"


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one line, without internals of Hydra and OmegaConf."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    internal = (
        "object_type=", "reference_type=", "full_key:", "See https://hydra.cc", "Config search",
        "provider=",
    )  # fmt: skip
    text = " ".join(line for line in lines if not line.startswith(internal))
    text = NOT_OPTIONAL.sub("must not be null", text)
    # NOT_A_SECTION also matches the messages of NOT_A_TEXT, so its turn is later.
    text = NOT_A_TEXT.sub("must be a list of text", text)
    text = NOT_A_SECTION.sub(OF_A_SECTION, text)
    text = NOT_A_LIST.sub("not a list, such as [1,2]", text)
    return NOT_A_NUMBER.sub(lambda match: f"{match[1]} is not {NUMBER_TYPES[match[2]]}", text)


class Removed(NamedTuple):
    """A config key that no longer exists.

    A saved config may still contain this key, but only with the value `default`.
    """

    default: Any
    instead: str
    """Advice on a replacement, used in the error message."""


MACHINES = "prepare a corpus on several machines with datatrove (data/README.md)"
REMOVED_KEYS = {
    "data.deduplicate": Removed(False, "remove duplicates with datatrove (data/README.md)"),
    "prepare.num_nodes": Removed(1, MACHINES),
    "prepare.node_rank": Removed(0, MACHINES),
}
"""Removed keys by dotted name; an entry may be a section, with a mapping as default."""


RENAMED = {"activation_checkpointing": {True: "full", False: "none"}}
"""Values in configs of older versions, with the present values, by dotted key."""


def removal(key: str, detail: str = "") -> str:
    return f"{key}{detail} was removed; {REMOVED_KEYS[key].instead}"


def without_removed(saved: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a saved config without removed keys, and with the present names of values.

    Raises ConfigError if a removed key has another value than its former default.
    """
    present: dict[str, Any] = {}
    for name, value in saved.items():
        key = f"{prefix}{name}"
        if key in RENAMED and isinstance(value, bool):
            present[name] = RENAMED[key][value]
        elif key in REMOVED_KEYS:
            # A run with another value cannot be repeated without the removed code.
            if value != REMOVED_KEYS[key].default:
                raise ConfigError(removal(key, f"={value}"))
        elif isinstance(value, dict):
            present[name] = without_removed(value, f"{key}.")
        else:
            present[name] = value
    return present
