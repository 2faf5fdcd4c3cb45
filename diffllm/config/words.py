"""Overrides as users type them, and their form in the grammar of Hydra.

Hydra reads run.name=1.10 as a number and rejects run.name=a(1). `for_hydra` therefore quotes the
values of all keys that the config schema declares as text.
"""

import json
import re
import shlex
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from diffllm.config.overrides import AUTO, CONFIG_GROUPS, check_shared
from diffllm.config.schema import TrainConfig
from diffllm.config.yaml_file import read_yaml
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.registry import SCHEMAS
from diffllm.core.typed import without_null
from diffllm.data.curriculum import check_sizes

OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w./-]*)=(.*)", re.ASCII | re.DOTALL)
"""An override: prefix, key and value."""
QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
QUOTED_VALUE = re.compile(rf"\s*{QUOTED}\s*", re.DOTALL)
FUNCTION = re.compile(r"(choice|glob|interval|range|shuffle|sort|tag)\((.*)\)", re.DOTALL)
"""A sweep in the syntax of Hydra: the name of the function and its arguments."""
INTERPOLATION = re.compile(r"\$\{.*\}", re.DOTALL)
VALUE_BOUNDARY = re.compile(rf"(?:^|[\[{{(,:])(?:\s*{QUOTED})?|[\])}}]", re.DOTALL)
"""A bracket, comma or colon, with the quoted text that follows. Other quotes are apostrophes."""
SUFFIXES = (".yaml", ".yml")
LONGEST_SHOWN = 200


class NotPlain(Exception):
    """The grammar of overrides gives a text another meaning, unless the text is in quotes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def for_hydra(word: str) -> str:
    """Return an override in the syntax of Hydra.

    Quote text, as `quote_text` does. Add the prefix ++ for a key that holds a mapping with
    arbitrary names, so that Hydra accepts new entries. Replace the word auto by the interpolation
    that computes the number. Raises ConfigError if text needs quotes.
    """
    match = OVERRIDE.fullmatch(word)
    if match is None:
        return word
    prefix, key, value = match.groups()
    if key in AUTO and value == "auto":
        return f"{prefix}{key}={AUTO[key]}"
    if get_origin(declared_type(key)) is dict and not prefix:
        word = f"++{word}"
    return quote_text(word)


def quote_text(word: str, sweep: bool = False) -> str:
    """Return an override with quotes around all text, such as run.name="1.10".

    Values of text keys, items of lists of text, and text in mappings are text as typed, except for
    null, quoted text, and an interpolation in place of a list. OmegaConf also resolves quoted
    interpolations. Words whose key is unknown or holds no text are returned unchanged. Raises
    ConfigError, with the override to type instead, if the grammar gives a text another meaning.

    Args:
        sweep: whether commas separate the values of a sweep.
    """
    match = OVERRIDE.fullmatch(word)
    if match is None:
        return word
    prefix, key, value = match.groups()
    kind = declared_type(key)
    if kind is not str and not is_container(kind):
        return word
    convert = quote_sweep if sweep else quote_value
    try:
        return f"{prefix}{key}={convert(value, kind)}"
    except NotPlain as error:
        if kind == list[str] and len(split(value)) > 1:
            needs = "a sweep needs -m, text with a comma needs quotes, and a list needs brackets"
            correct = with_brackets(value)
        else:
            needs = "a list needs brackets, a sweep needs -m, and the text needs quotes"
            correct = value.replace(error.text, quoted(error.text), 1)
        raise ConfigError(
            f"{word[:LONGEST_SHOWN]!r} is ambiguous: {needs}: "
            f"{shlex.quote(f'{prefix}{key}={correct}')}"
        ) from None


def with_brackets(text: str) -> str:
    """Return texts and lists of text between commas as one list, such as [a,b,c] for [a,b],c."""
    items = []
    for part in split(text):
        is_list = part.startswith("[") and part.endswith("]")
        items += split(part[1:-1]) if is_list else [part]
    typed = []
    for item in items:
        if not item:
            continue
        item_text = unquoted(item)
        has_bracket = re.search(r"[()\[\]{}:]", item_text)
        typed.append(quoted(item_text) if has_bracket else typed_text(item_text))
    return f"[{','.join(typed)}]"


def quote_sweep(text: str, kind: Any) -> str:
    """Return the values of a sweep with quotes around all text.

    Raises NotPlain for functions of Hydra that could change text: shuffle, sort and tag.
    """
    function = FUNCTION.fullmatch(text)
    if function:
        name, arguments = function.groups()
        if name == "choice":
            return f"choice({quote_sweep(arguments, kind)})"
        if name in ("shuffle", "sort", "tag") and kind is str:
            raise NotPlain(text)
        return text
    values = [quote_value(part, kind) for part in split(text)]
    return ",".join(values)


def quote_value(text: str, kind: Any) -> str:
    """Return a value of type `kind` with quotes around all text.

    Raises NotPlain for unquoted text with a comma, with a quote or bracket at the start, or in the
    form of a sweep function such as choice(...).
    """
    bare = text.strip()
    if kind is str:
        if bare == "null" or QUOTED_VALUE.fullmatch(text):
            return text
        if "," in text or bare.startswith(("'", '"', "[", "{")) or FUNCTION.fullmatch(bare):
            raise NotPlain(text)
        return quoted(text)
    ends = bare[:1] + bare[-1:]
    if get_origin(kind) is list:
        (item_type,) = get_args(kind)
        if ends == "[]":
            items = split(bare[1:-1])
        elif item_type is not str or bare == "null" or INTERPOLATION.fullmatch(bare):
            return text
        else:
            # A single text needs no brackets.
            items = [text] if bare else []
        values = [quote_value(item, item_type) for item in items]
        return f"[{','.join(values)}]"
    if is_container(kind) and ends == "{}":
        entries = [quote_entry(entry, kind) for entry in split(bare[1:-1])]
        return f"{{{','.join(entries)}}}"
    return text


def quote_entry(entry: str, kind: Any) -> str:
    name, colon, value = entry.partition(":")
    value_type = type_of_entry(kind, name.strip())
    return f"{name}{colon}{quote_value(value.strip(), value_type)}"


def split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quoted text; strip white space."""
    parts = []
    start = depth = 0
    for match in VALUE_BOUNDARY.finditer(text):
        character = match[0][:1]
        if character in ("[", "{", "("):
            depth += 1
        elif character in ("]", "}", ")"):
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.start() + 1
    if parts or text.strip():
        parts.append(text[start:])
    return [part.strip() for part in parts]


def declared_type(key: str) -> Any:
    """Return the declared type of a dotted config key, without None.

    Return None for an unknown key, a config group, and a union such as `int | str`.
    """
    if key in CONFIG_GROUPS:
        return None
    kind: Any = TrainConfig
    if key.startswith("hydra.launcher."):
        key = key.removeprefix("hydra.launcher.")
        kind = launcher_config()
    for name in key.split("."):
        kind = type_of_entry(kind, name)
    return kind


def type_of_entry(kind: Any, name: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        # A variant or a plugin can add keys to a section.
        subclasses = [cls for cls in SCHEMAS.values() if issubclass(cls, kind)]
        classes = [kind, *subclasses]
        for cls in classes:
            types = field_types(cls)
            if name in types:
                return types[name]
    if get_origin(kind) is not dict:
        return None
    _, value_type = get_args(kind)
    return value_type


@cache
def field_types(cls: type) -> dict[str, Any]:
    types = {}
    for name, kind in get_type_hints(cls).items():
        kind = without_null(kind)
        types[name] = None if get_origin(kind) in (Union, UnionType) else kind
    return types


def launcher_config() -> type | None:
    """Return the dataclass of hydra.launcher for SLURM; None without the submitit plugin."""
    launchers = ConfigStore.instance().repo["hydra"].get("launcher", {})
    stored = launchers.get("submitit_slurm.yaml")
    return OmegaConf.get_type(stored.node) if stored else None


def is_container(kind: Any) -> bool:
    return is_dataclass(kind) or get_origin(kind) in (list, dict)


def parsed_override(word: str, loader: ConfigLoader | None = None) -> Override:
    """Parse an override in the syntax of Hydra; `loader` lists the YAML files for glob(...).

    If Hydra cannot parse the value of a key that holds a number or a choice, return the value as
    text, so that the check of the type names the value.
    """
    parser = OverridesParser.create(loader)
    try:
        return parser.parse_overrides([word])[0]
    except ValueError as error:
        # Python refuses to convert thousands of digits to an integer.
        raise ConfigError(f"{word[:40]}...: {error}") from None
    except OverrideParseException:
        match = OVERRIDE.fullmatch(word)
        if match is None or is_container(declared_type(match[2])):
            raise
        prefix, key, value = match.groups()
        return parser.parse_overrides([f"{prefix}{key}={quoted(value)}"])[0]


def quoted(text: str) -> str:
    return str(QuotedString(text, Quote.double).with_quotes())


def unquoted(text: str) -> str:
    """Return the text inside quotes, or `text` if it is not in quotes."""
    if not QUOTED_VALUE.fullmatch(text):
        return text
    value = OverridesParser.create().parse_rule(text.strip(), "primitive")
    assert isinstance(value, QuotedString)
    return value.text


def former_text(text: str) -> str:
    """Return the text that older versions made of the value of a text key, such as 1.1 of 1.10."""
    value = parsed_override(f"run.name={text}").value()
    return str(value) if isinstance(value, int | float) else text


def typed_text(text: str) -> str:
    """Return `text` as a user must type it for a text key: in quotes only if necessary."""
    try:
        is_plain = quote_value(text, str) == quoted(text)
    except NotPlain:
        is_plain = False
    return text if is_plain else quoted(text)


def typed_override(key: str, text: str) -> str:
    return f"{key}={typed_text(text)}"


def printed_override(key: str, text: str) -> str:
    """Return KEY=TEXT for a command line, quoted for the override and for a shell if necessary."""
    return shlex.quote(typed_override(key, text))


def as_text(value: Any) -> str:
    """Return a value from a YAML file as text in the syntax of overrides."""
    if isinstance(value, dict):
        entries = [f"{key}: {as_text(entry)}" for key, entry in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, str):
        return quoted(value)
    return json.dumps(value, default=str)


def check_texts(content: Any, file: Path, section: str = "") -> None:
    """Raise ConfigError if a YAML file gives a text key a number or a boolean.

    YAML reads 1.10 as the number 1.1 and 12e4567 as infinity, so the text in the file is lost.

    Args:
        content: parsed content of `file`.
        section: dotted config key of `content`; "" for the whole config.
    """
    kind: Any = TrainConfig
    for name in section.split("."):
        # The section "" has one empty name.
        if name:
            kind = type_of_entry(kind, name)
    check_text(content, kind, section, file)


def check_text(value: Any, kind: Any, key: str, file: Path) -> None:
    if isinstance(value, dict):
        for name, entry in value.items():
            inner = f"{key}.{name}" if key else str(name)
            if inner.startswith("hydra."):
                # The entries of a sweep have config keys as names, perhaps with a prefix.
                config_key = inner.removeprefix("hydra.sweeper.params.").lstrip("+")
                entry_type = declared_type(config_key)
            else:
                entry_type = type_of_entry(kind, str(name))
            check_text(entry, entry_type, inner, file)
    elif isinstance(value, list):
        # The values of a sweep are a list, too: then each item has the type of the key.
        item_type = get_args(kind)[0] if get_origin(kind) is list else kind
        for i, item in enumerate(value):
            check_text(item, item_type, f"{key}[{i}]", file)
    elif kind in (str, list[str]) and isinstance(value, int | float):
        raise ConfigError(
            f"{file}: {key} must be text, but YAML reads {value!r} without quotes; "
            "put the value in quotes"
        )


def with_recipe(word: str) -> list[str]:
    """Return the overrides that replace the command-line override `word`.

    If `word` has the form data=FILE.yaml, return one override for each key in FILE.yaml. Otherwise,
    return [word]. Raises ConfigError for a missing or invalid file.
    """
    key, _, text = word.partition("=")
    path = unquoted(text)
    # A sweep over several files; in quotes, the comma is a part of the path.
    has_several = "," in text and path == text
    if key != "data" or not path.endswith(SUFFIXES) or has_several:
        return [word]
    file = user_path(path, key)
    content, _ = read_yaml(file)
    if not content:
        raise ConfigError(f"{word} is an empty file; add keys of the data config, such as sources")
    check_texts(content, file, "data")
    # Hydra needs about 10 ms per entry, so count the entries before composing.
    sizes = []
    for name in ("sources", "curriculum"):
        entries = content.get(name)
        sizes.append(len(entries) if isinstance(entries, dict | list) else 0)
    check_sizes(*sizes)
    default = "mixture" if "sources" in content else None
    source = content.pop("source", default)
    words = []
    if source:
        words.append(f"data={source}")
    for name, value in content.items():
        words.append(f"data.{name}={as_text(value)}")
    check_shared(words, word)
    return words
