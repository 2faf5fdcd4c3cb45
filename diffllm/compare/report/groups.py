"""Groups of rows whose losses can be compared with each other, and the names of rows."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, product
from string import ascii_uppercase

from diffllm.compare.report.keys import (
    ATTENTION,
    CHANGED,
    Keys,
    decides,
    overrides,
    shown_value,
    value_text,
)
from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run, shortlist

LONGEST = 48
"""Characters of a label; where some are longer, groups get letters that stand for what differs."""

TELLING = ("model", "steps", "seq_len", "global_batch_size", "optim.lr", "optim.warmup_steps")
"""Keys that come first where a group is described in short."""


@dataclass
class Group:
    """Rows that agree on every key that no loss can be compared across."""

    letter: str
    """"A", "B", ...; empty where there is one group."""
    rows: list[Row]
    values: dict[str, str] = field(default_factory=dict)
    """Keys that tell the group from others, and its values as text."""

    @property
    def variants(self) -> set[str]:
        return {row.keys["attention"] for row in self.rows if row.loss is not None}


def make_groups(rows: list[Row], runs: list[Run], keys: Keys) -> list[Group]:
    """The groups, those with most variants to compare first, with the labels of their rows.

    Args:
        rows: in the order that they have in a group.
        keys: of `runs`, which are all runs that were read.
    """
    together: dict[str, list[Row]] = {}
    for row in rows:
        same = shown_value([row.differing[key] for key in keys.incomparable])
        together.setdefault(same, []).append(row)
    groups = [Group("", members) for members in together.values()]
    groups.sort(key=lambda group: -to_compare(group))
    several = len(groups) > 1
    for group, letter in zip(groups, letters(), strict=False):
        group.letter = letter if several else ""
        for row in group.rows:
            row.group = group.letter
    shown_together = keys_of_model_choice(runs, keys)
    for row in rows:
        row.label = label(row, rows, shown_together)
    labels = [row.label for row in rows]
    lettered = several and (max(map(len, labels)) > LONGEST or len({*labels}) < len(labels))
    for group in groups:
        for row in group.rows if lettered else ():
            row.label = f"{group.letter}: {label(row, group.rows, set(), inside=True)}"
        if several:
            group.values = distinguishing(group.rows[0], groups, keys, shown_together)
    return groups


def letters() -> Iterable[str]:
    for length in count(1):
        yield from map("".join, product(ascii_uppercase, repeat=length))


def to_compare(group: Group) -> int:
    """How many rows can be compared: none with a single variant, or on runs that were changed."""
    if group.rows[0].differing.get(CHANGED) or len(group.variants) < 2:
        return 0
    return sum(row.loss is not None for row in group.rows)


def label(row: Row, rows: list[Row], shown_together: set[str], inside: bool = False) -> str:
    """The variant, and all else that tells the row apart: "diff_v2 lr=0.001".

    Args:
        rows: those that it has to be told from.
        shown_together: keys that `model=<choice>` stands for.
        inside: leaves out keys that all of `rows` agree on.
    """
    own, parts = overrides(row.runs[0]), []
    for key, value in row.keys.items():
        if key == "attention" or key in shown_together:
            continue
        alike = rows
        if key.startswith(ATTENTION):
            alike = [r for r in rows if r.keys["attention"] == row.keys["attention"]]
        same = all(shown_value(other.keys[key]) == shown_value(value) for other in alike)
        if same and (inside or (key.startswith(ATTENTION) and key not in own)):
            continue  # the variant's own, or none of its fields
        if key == CHANGED:
            parts += ["changed"] if value else []
            continue
        name = key.rpartition(".")[2]
        ambiguous = sum(other.rpartition(".")[2] == name for other in row.keys) > 1
        parts.append(f"{key if ambiguous else name}={value_text(key, value)}")
    if shown_together:
        parts.insert(0, f"model={row.runs[0].cfg.run.choices['model']}")
    return " ".join([row.keys["attention"], *parts])


def keys_of_model_choice(runs: list[Run], keys: Keys) -> set[str]:
    """Swept keys of `model` that the choice of `model=` decides, if it decides more than one."""
    values = [
        {**each, "choice": run.cfg.run.choices["model"]}
        for each, run in zip(keys.values, runs, strict=True)
    ]
    found = {
        key
        for key in keys.swept
        if key.startswith("model.") and not key.startswith(ATTENTION)
        if decides(["choice"], key, values)
    }
    return found if len(found) > 1 and decides(found, "choice", values) else set()


def distinguishing(
    row: Row, groups: list[Group], keys: Keys, shown_together: set[str]
) -> dict[str, str]:
    """The keys that every group has one value of, and not all the same, as text; the choice of
    `model=` and others that say most first.

    Args:
        row: any of the group that they are for.
        shown_together: keys that `model=<choice>` stands for.
    """

    def values(key: str) -> list[set[str]]:
        return [{shown_value(each.differing.get(key)) for each in group.rows} for group in groups]

    names = [*keys.incomparable, *(key for key in keys.swept if key not in keys.incomparable)]
    apart = [key for key in names if all(len(v) == 1 for v in values(key))]
    apart = [key for key in apart if len(set().union(*values(key))) > 1 and key != "attention"]
    found = {"model": row.runs[0].cfg.run.choices["model"]} if shown_together else {}
    return found | {
        key: value_text(key, row.differing.get(key)) for key in sorted(apart, key=telling)
    }


def telling(key: str) -> tuple[int, str]:
    return (*TELLING, key).index(key), key


def in_short(group: Group, width: int) -> str:
    """ "model=tiny steps=120 and 3 more", what tells it from other groups, in about that many
    characters."""
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in group.values.items()]
    shown = 1
    while shown < len(parts) and len(" ".join(parts[: shown + 1])) <= width:
        shown += 1
    return " ".join(parts[:shown]) + (f" and {n} more" if (n := len(parts) - shown) else "")


def apart_text(groups: list[Group], incomparable: list[str], most: int = 5) -> str:
    """Which keys keep rows from being compared."""
    return (
        f"{len(groups)} groups of rows that cannot be compared with each other; they differ in "
        f"{shortlist(keys_apart(groups, incomparable), most)}"
    )


def keys_apart(groups: list[Group], incomparable: list[str]) -> list[str]:
    """The keys that keep groups apart, `model` for those that its choice decides."""
    keys = set(incomparable)
    if groups and "model" in groups[0].values:
        keys = {key for key in keys if not key.startswith("model.")} | {"model"}
    return sorted(keys, key=telling)


def differing_keys(groups: list[Group], incomparable: list[str]) -> dict[str, dict[str, list[str]]]:
    """Keys that no loss can be compared across: each value, as text, and the labels of its rows."""
    found: dict[str, dict[str, list[str]]] = {key: {} for key in incomparable}
    for group in groups:
        for key in incomparable:
            labels = found[key].setdefault(group.values[key], [])
            labels += [row.label for row in group.rows]
    return found
