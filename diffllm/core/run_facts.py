"""Facts of a run that are not config keys, such as its device: entries of run.json.

Facts are declared like config keys, so that reports and studies treat both in the same way.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from diffllm.core.keys import Declaration, declaration, key


@dataclass(frozen=True)
class RunFacts:
    """Facts that reports and studies compare; None if run.json does not contain the fact."""

    parameters: float | None = key(
        None,
        above=0,
        effect="numbers",
        may_differ="report",
        help="Number of parameters.",
    )
    flops_per_token: float | None = key(
        None,
        above=0,
        effect="numbers",
        may_differ="report",
        help="Training FLOPs per token, without document masks.",
    )
    corpus: str | None = key(None, effect="order", help="Hash of the corpus.")
    corpus_note: str | None = key(
        None,
        effect="none",
        help="Differences from the reference corpus.",
    )
    tokenizer: str | None = key(None, effect="order", help="Hash of the tokenizer's pieces.")
    compute_dtype: str | None = key(None, effect="numbers", help="Dtype of matrix products.")
    heldout_tokens: float | None = key(
        None,
        effect="measurement",
        help="Held-out tokens of the final loss.",
    )
    code: str | None = key(
        None,
        effect="numbers",
        may_differ="report",
        help="Hash of the source files of diffllm.",
    )
    torch: str | None = key(
        None,
        effect="numbers",
        kind="machine",
        help="Version of torch.",
    )
    python: str | None = key(None, effect="none", kind="machine", help="Version of Python.")
    device: str | None = key(
        None,
        effect="speed",
        kind="machine",
        help='"CPU", or the name of the GPU.',
    )
    ranks: float | None = key(None, effect="speed", kind="machine", help="World size.")
    compiled: bool | None = key(
        None,
        effect="speed",
        kind="machine",
        help="Whether torch.compile compiled the blocks.",
    )


NESTED = {"code": ("diffllm", "hash"), "python": ("environment", "python")}
"""Facts that run.json contains in an object: names of the object and of the entry in the object."""


@cache
def fact_declarations() -> dict[str, Declaration]:
    """Return the declarations of all facts, by the name of the fact."""
    return {fact.name: declaration(fact) for fact in fields(RunFacts)}


def machine_facts() -> tuple[str, ...]:
    """Return the facts of the machine that must agree to compare times."""
    names = []
    for name, declared in fact_declarations().items():
        if "machine" in declared.kinds and declared.effect != "none":
            names.append(name)
    return tuple(names)


@cache
def fact_types() -> dict[str, tuple[type, ...]]:
    """Return the types of the values of each fact, without NoneType."""
    types: dict[str, tuple[type, ...]] = {}
    for name, hint in get_type_hints(RunFacts).items():
        kind, _ = get_args(hint)
        # JSON may contain a number of type float as an integer.
        types[name] = (int, float) if kind is float else (kind,)
    return types


def positive_facts() -> list[str]:
    """Return the facts that are greater than 0."""
    return [fact.name for fact in fields(RunFacts) if fact.metadata.get("above") == 0]


def facts_of(record: dict[str, Any]) -> RunFacts:
    """Return the facts in `record`, the content of run.json; values of a wrong type become None."""
    values = {}
    for name, types in fact_types().items():
        value = record.get(name)
        if name in NESTED:
            section, entry = NESTED[name]
            value = (record.get(section) or {}).get(entry)
        # Not isinstance, because Python counts booleans as integers.
        values[name] = value if type(value) in types else None
    return RunFacts(**values)
