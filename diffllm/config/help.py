"""Describe all config groups and keys, for `train.py --help` and docs/configuration.md."""

import inspect
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

from omegaconf import DictConfig, Node, OmegaConf

from diffllm.config.compose import compose_config, yaml_names
from diffllm.config.overrides import AUTO, CONFIG_GROUPS, FILLED_IN
from diffllm.config.plugins import config_directory, directories
from diffllm.core.keys import UNDECLARED, Effect, declared_in
from diffllm.model.attention.base import AttentionConfig

SENTENCE = re.compile(r"(?<=\.)\s+")
OF_STEPS = re.compile(r"\$\{of_steps:([\d.]+),\s*(\d+)\}")
ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+),\s*'?([^'}]*)'?\}")
FLAGS = {
    "-m, --multirun": "a sweep: one run per combination of values, such as seed=0,1,2",
    "--config-dir DIR": "a directory of extra YAMLs, for plugins=[my_variant] attention=my_variant",
    "--cfg job": "print the composed config and exit; --resolve also resolves ${...}",
    "--json": "print the summary, or the states of the runs of a sweep, as JSON on stdout",
    "--help": "print this list, with the defaults of the given choices",
}
USAGE = """\
usage: python train.py [choice or key]...      one process, or under torchrun; also: diffllm train
       python train.py -m [choice or key]...   a sweep
"""


class Key(NamedTuple):
    """Description of a config key; `name` is the dotted key, such as "optim.lr"."""

    name: str
    default: str
    """The default in override notation, or in words if the value depends on another key."""
    allowed: list[str]
    meaning: str
    effect: Effect

    @property
    def line(self) -> str:
        sentence = first_sentence(self.meaning)
        if not self.allowed:
            return sentence
        allowed = f"({', '.join(self.allowed)})"
        return f"{sentence} {allowed}" if sentence else allowed


class KeySection(NamedTuple):
    """The keys that belong to one config dataclass."""

    name: str
    """Prefix of the keys, such as "optim"; "" for keys without a prefix."""
    config: type

    keys: list[Key]

    @property
    def title(self) -> str:
        return first_sentence(first_paragraph(self.config))


def help_text(overrides: list[str]) -> str:
    """Return the text of `train.py --help`: usage, options of each config group, and all keys.

    The default of each key is its value in the config composed from `overrides`. Raises ConfigError
    for an invalid override.
    """
    cfg = compose_config(overrides or ["experiment=none"])
    parts = [USAGE + "\n" + rows(FLAGS.items())]
    parts.append("Choices, such as attention=standard; each is a YAML file in conf/")
    for group, options in choices().items():
        parts.append(f"{group}={cfg.resolved.choices[group]}\n{rows(options.items())}")
    parts.append(
        "Keys, such as optim.lr=1e-3, with their defaults; docs/configuration.md also has the "
        "effect of each key"
    )
    parts += map(section_text, sections_of(cfg))
    return "\n\n".join(parts)


def sections_text(names: Sequence[str]) -> str:
    sections = sections_of(compose_config(["experiment=none"]))
    return "\n\n".join(section_text(section) for section in sections if section.name in names)


def section_text(section: KeySection) -> str:
    lines = rows((f"{key.name}={key.default}", key.line) for key in section.keys)
    return f"{section.name}: {section.title}\n{lines}" if section.name else lines


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Format pairs (name, description) as two columns; wrap lines to the width of a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    indent = " " * 38
    lines = []
    for name, words in pairs:
        first = f"  {name:<34}  "
        if len(first) > len(indent):
            lines.append(first.rstrip())
            first = indent
        lines += textwrap.wrap(
            words, max(width, 74), initial_indent=first, subsequent_indent=indent
        ) or [first.rstrip()]
    return "\n".join(lines)


def choices() -> dict[str, dict[str, str]]:
    """Return {config group: {YAML file name: first sentence of the comment in this file}}."""
    by_group: dict[str, dict[str, str]] = {}
    for group in CONFIG_GROUPS:
        by_group[group] = {}
        for name in yaml_names(group):
            by_group[group][name] = first_sentence(yaml_comment(group, name)).rstrip(".:")
    return by_group


def sections_of(cfg: DictConfig, name: str = "") -> Iterator[KeySection]:
    """Yield one KeySection for the dataclass of `cfg` and one for each nested dataclass.

    `name` is the dotted key of `cfg`, or "" for the whole config.
    """
    config = OmegaConf.get_type(cfg)
    assert isinstance(config, type)
    hints = get_type_hints(config)
    keys = []
    nested_sections = []
    for field in fields(config):
        full = f"{name}.{field.name}" if name else field.name
        node = cfg._get_node(field.name)
        if full == FILLED_IN:
            continue
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            nested_sections.append((node, full))
            continue
        declared = hints[field.name]
        kinds = [kind for kind in (declared, *get_args(declared)) if isinstance(kind, EnumType)]
        allowed = list(kinds[0].__members__) if kinds else []
        # A plugin can replace the default of a key without `key`.
        declared = declared_in(config, field.name) or UNDECLARED
        keys.append(Key(full, default_text(node), allowed, declared.help, declared.effect))
    yield KeySection(name, config, keys)
    for node, full in nested_sections:
        yield from sections_of(node, full)


def first_sentence(text: str) -> str:
    return SENTENCE.split(" ".join(text.split()))[0]


def default_text(node: Any) -> str:
    value = node._value()
    if isinstance(value, Node):
        # The value of a union is a node.
        value = value._value()
    if isinstance(value, str):
        share = OF_STEPS.fullmatch(value)
        if share:
            return f"{float(share[1]):.0%} of steps, at most {int(share[2]):,}"
        if value in AUTO.values():
            return "auto"
        variable = ENVIRONMENT.fullmatch(value)
        if variable:
            return f"${variable[1]} or {variable[2]}"
        value = re.sub(r"\$\{([\w.]+)\}", r"\1", value)
        return value if value == value.strip() else repr(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(default_text(item) for item in value)}]"
    if isinstance(value, dict):
        return str(value)
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def variant_line(name: str, config: AttentionConfig) -> str:
    """Return the comment in the variant's YAML file.

    If the file has no comment, return the first docstring paragraph of the class of `config`.
    """
    return yaml_comment("attention", name) or first_paragraph(type(config))


@cache
def yaml_comment(group: str, name: str) -> str:
    """Return the comment at the top of the file `group`/`name`.yaml as one line.

    Omit the line with @package, and indented lines, because they contain example commands. If the
    file is missing or has no comment at the top, return "".
    """
    text = ""
    for directory in (config_directory(), *directories()):
        file = directory / group / f"{name}.yaml"
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            break
    sentences = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("# @package", "#  ")):
            sentences.append(line.lstrip("# "))
    return " ".join(sentences)


def first_paragraph(cls: type) -> str:
    """Return the first docstring paragraph on one line; "" for a docstring made by @dataclass."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("\n\n")[0]
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split())
