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
KINDS = {bool: "true or false", int: "an integer", float: "a number, such as 0.5 or 1e6"}
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
    known = {f.name.rstrip("_"): f for f in fields(cls)}  # type: ignore[arg-type]
    if "-h" in argv or "--help" in argv:
        echo(f"{help_text.strip()}\n")
        for name, f in known.items():
            default = f" (default {f.default!r})" if f.default is not MISSING else ""
            if f.metadata.get("flag"):
                echo(f"  --{name.replace('_', '-'):<16}{f.metadata['help']}")
            else:
                more = " (required)" if required(f) else default
                echo(f"  {name + '=':<18}{f.metadata['help']}{more}")
        sys.exit(0)
    values: dict[str, Any] = {}
    for word in argv:
        name = word.partition("=")[0]
        if (instead := REMOVED_ARGUMENTS.get((cls.__name__, name))) and "=" in word:
            raise ConfigError(f"{name}= was removed; {instead}")
    for name, text in split_words(argv, known):
        try:
            text.encode()
        except UnicodeEncodeError:  # Python keeps undecodable bytes as surrogates
            raise ConfigError(f"{name}= must be valid UTF-8 text") from None
        key, kind = known[name].name, known[name].type
        if known[name].metadata.get("path") and text:
            text = str(user_path(text, name))
        if kind == list[str]:
            values.setdefault(key, []).append(text)
            continue
        of: Any = next(iter(get_args(kind)), kind)  # float | None: float
        try:
            values[key] = BOOLEANS[text] if of is bool else of(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{name}={text!r} must be {KINDS[of]}") from None
    if missing := [name for name, f in known.items() if required(f) and f.name not in values]:
        raise ConfigError(f"missing {', '.join(f'{name}=...' for name in missing)}")
    made = cls(**values)
    check_bounds("", made)
    return made


def check_wandb_mode(mode: str) -> None:
    if mode not in ("auto", "online", "offline"):
        raise ConfigError(f"mode={mode} must be auto, online or offline")


def take_json(words: list[str]) -> tuple[bool, list[str]]:
    """Return the value of --json or json= in `words`, and the other words.

    Commands that pass their words to Hydra use this function instead of `parse`.
    """
    chosen = [word for word in words if JSON_WORD.fullmatch(word)]
    others = [word for word in words if not JSON_WORD.fullmatch(word)]
    return parse(CommandArguments, chosen, "").json, others


def required(f: "Field[Any]") -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def split_words(argv: list[str], known: dict[str, "Field[Any]"]) -> Iterator[tuple[str, str]]:
    """Yield (key, value as text) for each word of `argv`.

    `known` maps keys to dataclass fields. A field that `argument` declares with `words=` collects
    words without a key of `known`; each of these words is yielded with the key of this field.
    Raises ConfigError if no field accepts a word.
    """
    rest = next((name for name, f in known.items() if "words" in f.metadata), "")
    plain = bool(rest) and known[rest].metadata["words"] == "plain"
    words = iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        if key in known and known[key].metadata.get("flag"):
            yield key, text if equals else "true" if known[key].type is bool else next(words, "")
        elif plain and (not OPTION.fullmatch(word) or os.path.isdir(word)):
            yield rest, word
        elif equals and name in known:
            yield name, text
        elif rest and not plain:
            yield rest, word
        else:
            runs = (word, os.path.join("outputs", word)) if "run" in known and not equals else ()
            near = [shlex.quote(f"run={path}") for path in runs if os.path.isdir(path)]
            similar_to = f"{name}=" if equals or name[:1] == "-" else ""
            hint = choose_from(similar_to, [f"{key}=" for key in known])
            hint = f"; did you mean {near[0]}?" if near else hint
            raise ConfigError(f"unknown argument {word!r}{hint}")


def write_out(out: str | Path, content: str | bytes) -> None:
    """Write `content` to the file `out`; raises ConfigError if the file cannot be written."""
    try:
        replace_file(Path(out), content)
    except OSError as error:
        raise ConfigError(
            f"out={out} cannot be written: {error.strerror}; choose another out=FILE"
        ) from None
