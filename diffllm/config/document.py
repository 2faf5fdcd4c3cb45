"""python -m diffllm.config.document: every choice and key as docs/configuration.md."""

import re

from omegaconf import OmegaConf

from diffllm.config.compose import compose_config, variants
from diffllm.config.help import Key, Section, choices, sections_of
from diffllm.printing import echo

HEAD = """\
# Configuration

Made by `make docs` from the comments in `conf/` and the docstrings of the config's dataclasses.

A run is a choice in every group and values for keys: `python train.py model=small_125m
attention=diff_v2 optim.lr=6e-4`. `python train.py --help` prints the same for given
choices. Of defaults, the YAML of each choice, `experiment=` and the command line, what comes later
is stronger.
"""
SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")
MORE_SIZES = ("moe.n_experts", "moe.top_k", "moe.expert_dim")


def document() -> str:
    """The page: choices, shapes of the models, keys, and those of single variants."""
    parts = [HEAD, "## Choices\n"]
    for group, options in choices().items():
        rows = "\n".join(f"| `{group}={name}` | {cell(words)} |" for name, words in options.items())
        parts.append(f"| `{group}=` | |\n|---|---|\n{rows}\n")
    parts += ["## Shapes of the models\n", shapes(), "## Keys\n"]
    sections = list(sections_of(compose_config(["experiment=none"])))
    for section in sections:
        if section.name == "model.attention":
            parts += attention_sections()
        else:
            heading = f"### {section.name}\n\n{section.title}\n" if section.name else ""
            parts.append(heading + ("\n" if heading else "") + table(section.keys))
    return "\n".join(parts)


def shapes() -> str:
    """A table of the models' sizes."""
    head = ["`model=`", *SIZES, *MORE_SIZES, "optim.lr"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in choices()["model"]:
        cfg = compose_config([f"model={name}"])
        keys = (*SIZES, *MORE_SIZES) if cfg.model.moe.n_experts else SIZES
        shown = [f"{OmegaConf.select(cfg.model, key) or 0:,}" for key in keys]
        shown += [""] * (len(head) - 2 - len(shown)) + [f"{cfg.optim.lr:g}"]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def attention_sections() -> list[str]:
    """A table for each class of variants, with the names that it stands behind."""
    names: dict[type, list[str]] = {}
    sections: dict[type, Section] = {}
    for name in variants():
        cfg = compose_config([f"attention={name}"])
        (section,) = (s for s in sections_of(cfg) if s.name == "model.attention")
        names.setdefault(section.config, []).append(name)
        sections.setdefault(section.config, section)  # the plainest name comes first
    return [
        f"### model.attention of {', '.join(names[config])}\n\n{section.title}\n\n"
        + table(section.keys)
        for config, section in sections.items()
    ]


def table(keys: list[Key]) -> str:
    """A table of keys."""
    head = "| Key | Default | Meaning |\n|---|---|---|\n"
    return head + "".join(
        f"| `{key.name}` | `{key.default}` | {cell(words_of(key))} |\n" for key in keys
    )


def words_of(key: Key) -> str:
    values = ", ".join(f"`{value}`" for value in key.allowed)
    return " ".join(filter(None, [key.meaning, f"Values: {values}." if values else ""]))


def cell(text: str) -> str:
    return re.sub(r"([|*])", r"\\\1", text)


if __name__ == "__main__":
    echo(document(), end="")
