"""Parse a command line (`key=value`, flags and plain words) into a dataclass."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from diffllm.core.bounds import check_bounds
from diffllm.core.errors import ConfigError, choose_from
from diffllm.core.files import replace_file, user_path
from diffllm.core.printing import echo

T = TypeVar("T")
BOOLEANS = {"true": True, "false": False}
VALUE_TEXTS = {bool: "true or false", int: "an integer", float: "a number, such as 0.5 or 1e6"}
OPTION = re.compile(r"-.*|[a-z_]+=.*", re.S)
JSON_WORD = re.compile(r"--json(=.*)?|json=.*", re.S)


REMOVED_ARGUMENTS = {
    ("EvaluateArguments", "wandb"): "take the scores from --json, or from diffllm report",
    ("StudyRunArguments", "probe"): "name finished runs for the speed: pilot=DIR",
}
"""Replacement for each removed argument, by class and name."""


def argument(text: str, default: Any = MISSING, **metadata: Any) -> Any:
    """Declare a dataclass field that the command line sets with name=VALUE.

    Args:
        text: description of the field in --help.
        metadata: bounds of the value, such as least=1 (see `core.bounds`), or these properties.
            `path=True`: check and expand the value as a path. `flag=True`: the command line sets
            a bool field with --name, and a field of another type with --name VALUE.
            `words="plain"`: the field also collects words without a key, such as file names.
            `words="overrides"`: the field collects words that match no other field.
    """
    metadata["help"] = text
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag(text: str) -> Any:
    return argument(text, False, flag=True)


def plugins_argument() -> Any:
    return argument("[module,...] with the variants, data sources or metrics of a run", "")


@dataclass(kw_only=True)
class CommandArguments:
    """Arguments of every command."""

    json: bool = flag("one JSON value on stdout, messages on stderr")


@dataclass(kw_only=True)
class RunArguments(CommandArguments):
    """Arguments of every command that opens a run."""

    run: str = argument("run directory", path=True)
    plugins: str = plugins_argument()


def parse(cls: type[T], argv: list[str], help_text: str) -> T:
    """Parse the words of a command line into the dataclass `cls`.

    If `argv` contains --help, print `help_text` and the fields, and exit. The key of a
    list[str] field may occur several times. All other fields have type str, int, float or bool, or
    the union of one such type and None. Raises ConfigError for an unknown word, an invalid value or
    a missing field.
    """
    # A field whose name is a keyword of Python, such as lambda, ends in an underscore.
    fields_by_key = {f.name.rstrip("_"): f for f in fields(cls)}  # type: ignore[arg-type]
    if "-h" in argv or "--help" in argv:
        # Commands import torch and other slow libraries after this call.
        echo(f"{help_text.strip()}\n")
        print_fields(fields_by_key)
        sys.exit(0)
    for word in argv:
        name, equals, _ = word.partition("=")
        replacement = REMOVED_ARGUMENTS.get((cls.__name__, name))
        if replacement and equals:
            raise ConfigError(f"{name}= was removed; {replacement}")
    values: dict[str, Any] = {}
    for name, text in split_words(argv, fields_by_key):
        try:
            text.encode()
        except UnicodeEncodeError:  # Python keeps undecodable bytes as surrogates
            raise ConfigError(f"{name}= must be valid UTF-8 text") from None
        field_of_name = fields_by_key[name]
        key = field_of_name.name
        if field_of_name.metadata.get("path") and text:
            text = str(user_path(text, name))
        if field_of_name.type == list[str]:
            values.setdefault(key, []).append(text)
            continue
        # Of a union such as float | None, the first type converts the text.
        value_type: Any = next(iter(get_args(field_of_name.type)), field_of_name.type)
        try:
            # bool("false") would be True.
            values[key] = BOOLEANS[text] if value_type is bool else value_type(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{name}={text!r} must be {VALUE_TEXTS[value_type]}") from None
    missing = []
    for name, f in fields_by_key.items():
        if required(f) and f.name not in values:
            missing.append(f"{name}=...")
    if missing:
        raise ConfigError(f"missing {', '.join(missing)}")
    arguments = cls(**values)
    check_bounds("", arguments)
    return arguments


def print_fields(fields_by_key: dict[str, "Field[Any]"]) -> None:
    for name, f in fields_by_key.items():
        if f.metadata.get("flag"):
            echo(f"  --{name.replace('_', '-'):<16}{f.metadata['help']}")
            continue
        suffix = ""
        if required(f):
            suffix = " (required)"
        elif f.default is not MISSING:
            suffix = f" (default {f.default!r})"
        echo(f"  {name + '=':<18}{f.metadata['help']}{suffix}")


def check_wandb_mode(mode: str) -> None:
    if mode not in ("auto", "online", "offline"):
        raise ConfigError(f"mode={mode} must be auto, online or offline")


def take_json(words: list[str]) -> tuple[bool, list[str]]:
    """Return the value of --json or json= in `words`, and the other words.

    Commands that pass their words to Hydra use this function instead of `parse`.
    """
    json_words = []
    others = []
    for word in words:
        if JSON_WORD.fullmatch(word):
            json_words.append(word)
        else:
            others.append(word)
    arguments = parse(CommandArguments, json_words, "")
    return arguments.json, others


def required(f: "Field[Any]") -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def split_words(
    argv: list[str], fields_by_key: dict[str, "Field[Any]"]
) -> Iterator[tuple[str, str]]:
    """Yield (key, value as text) for each word of `argv`.

    A field that `argument` declares with `words=` collects words without a known key; each of these
    words is yielded with the key of this field. Raises ConfigError if no field accepts a word.
    """
    collector, is_plain = "", False
    for name, f in fields_by_key.items():
        if "words" in f.metadata:
            collector, is_plain = name, f.metadata["words"] == "plain"
            break
    words = iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        key = ""
        if name.startswith("--"):
            key = name.removeprefix("--").replace("-", "_")
        if key in fields_by_key and fields_by_key[key].metadata.get("flag"):
            if equals:
                yield key, text
            elif fields_by_key[key].type is bool:
                yield key, "true"
            else:
                yield key, next(words, "")  # --name VALUE: the next word is the value
        # The name of an existing directory may look like an option.
        elif is_plain and (not OPTION.fullmatch(word) or os.path.isdir(word)):
            yield collector, word
        elif equals and name in fields_by_key:
            yield name, text
        elif collector and not is_plain:
            yield collector, word
        else:
            raise ConfigError(f"unknown argument {word!r}{word_hint(word, list(fields_by_key))}")


def word_hint(word: str, keys: list[str]) -> str:
    """Return the end of the error about an unknown word: a similar key, or run= for a directory."""
    name, equals, _ = word.partition("=")
    if "run" in keys and not equals:
        for path in (word, os.path.join("outputs", word)):
            if os.path.isdir(path):
                return f"; did you mean {shlex.quote(f'run={path}')}?"
    similar_to = f"{name}=" if equals or name[:1] == "-" else ""
    return choose_from(similar_to, [f"{key}=" for key in keys])


def write_out(out: str | Path, content: str | bytes) -> None:
    """Write `content` to the file `out`; raises ConfigError if the file cannot be written."""
    try:
        replace_file(Path(out), content)
    except OSError as error:
        raise ConfigError(
            f"out={out} cannot be written: {error.strerror}; choose another out=FILE"
        ) from None
