"""`key=value` arguments into a dataclass, values taken verbatim."""

import difflib
import os
import sys
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar, get_args

from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.printing import echo

T = TypeVar("T")
BOOLEANS = {"true": True, "false": False}


def plugins_field() -> Any:
    """Make the field `plugins`; `tools.main` has imported what it names before it is parsed."""
    text = "[module,...] that register what a run was made with, or metrics"
    return field(default="", metadata={"help": text})


def a_path(text: str) -> dict[str, Any]:
    """Make the metadata of a field for a path, which `parse` checks and expands."""
    return {"help": text, "path": True}


def parse(cls: type[T], argv: list[str], what: str) -> T:
    """Make an instance of the dataclass `cls` from `key=value` words.

    Fields are str, int, float or bool, or one of them or None, or list[str], whose key may come
    several times; a field's `metadata["help"]` says what it is, and a field that ends in "_"
    because its key is a Python keyword loses it. `--help` prints `what`, then them, and exits.
    Raises ConfigError for a key that is unknown or missing, and a value of the wrong type.
    """
    known = {f.name.rstrip("_"): f for f in fields(cls)}  # type: ignore[arg-type]
    if "-h" in argv or "--help" in argv:
        echo(f"{what.strip()}\n")
        for name, f in known.items():
            default = "required" if f.default is MISSING else f"default {f.default!r}"
            echo(f"  {name + '=':<18}{f.metadata.get('help', '')} ({default})")
        sys.exit(0)
    values: dict[str, Any] = {}
    for word in argv:
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            if not equals and "run" in known and os.path.isdir(word):
                raise ConfigError(f"unknown argument {word!r}; did you mean run={word}?")
            hint = f"; did you mean {close[0]}=?" if close else f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown argument {word!r}{hint}")
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes that the shell handed over undecoded
            raise ConfigError(f"{name}= is not valid UTF-8") from None
        key, kind = known[name].name, known[name].type
        if known[name].metadata.get("path") and text:
            text = str(user_path(text, name))
        if kind == list[str]:
            values.setdefault(key, []).append(text)
            continue
        of: Any = next(iter(get_args(kind)), kind)  # float | None: float
        try:
            values[key] = BOOLEANS[text] if of is bool else of(text)
        except KeyError:
            raise ConfigError(f"{name}={text!r} must be true or false") from None
        except ValueError:
            raise ConfigError(f"{name}={text!r} is not {of.__name__}") from None
    missing = [n for n, f in known.items() if f.default is MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"missing {', '.join(f'{name}=...' for name in missing)}")
    return cls(**values)
