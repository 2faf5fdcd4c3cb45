"""Groups of rows whose losses can be compared with each other, and the names of rows."""

from dataclasses import dataclass, field
from string import ascii_uppercase
from textwrap import shorten

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

TELLING = ("model", "steps", "seq_len", "global_batch_size", "optim.lr", "optim.warmup_steps")
"""Keys that a short description of a group names first."""


@dataclass
class Group:
    """Rows that agree on every key that no loss can be compared across."""

    letter: str
    rows: list[Row]
    values: dict[str, str] = field(default_factory=dict)
    """Keys that tell the group from others, and its values as text."""


def make_groups(rows: list[Row], runs: list[Run], keys: Keys) -> list[Group]:
    """The groups, those with most variants to compare first, with the labels of their rows."""
    together: dict[str, list[Row]] = {}
    for row in rows:
        same = shown_value([row.differing[key] for key in keys.incomparable])
        together.setdefault(same, []).append(row)
    groups = [Group("", members) for members in together.values()]
    groups.sort(key=rows_to_compare, reverse=True)
    several = len(groups) > 1
    for i, group in enumerate(groups):
        group.letter = ascii_uppercase[i % 26] * (i // 26 + 1) if several else ""
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


def rows_to_compare(group: Group) -> int:
    variants = [row.keys["attention"] for row in group.rows if row.loss is not None]
    changed = group.rows[0].differing.get(CHANGED)
    return 0 if changed or len({*variants}) < 2 else len(variants)


def label(row: Row, rows: list[Row], shown_together: set[str], inside: bool = False) -> str:
    """The variant, and all else that tells the row apart from `rows`: "diff_v2 lr=0.001".

    Args:
        shown_together: keys that `model=<choice>` stands for.
        inside: omit keys that all of `rows` agree on.
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
    of_model = (k for k in keys.swept if k.startswith("model.") and not k.startswith(ATTENTION))
    found = {key for key in of_model if decides(["choice"], key, values)}
    return found if len(found) > 1 and decides(found, "choice", values) else set()


def distinguishing(
    row: Row, groups: list[Group], keys: Keys, shown_together: set[str]
) -> dict[str, str]:
    """The keys with one value per group, not the same in all, as text; the most telling first."""
    found = {"model": row.runs[0].cfg.run.choices["model"]} if shown_together else {}
    for key in sorted({*keys.incomparable, *keys.swept} - {"attention"}, key=telling):
        values = [{shown_value(r.differing.get(key)) for r in group.rows} for group in groups]
        if {*map(len, values)} == {1} and len(set.union(*values)) > 1:
            found[key] = value_text(key, row.differing.get(key))
    return found


def telling(key: str) -> tuple[int, str]:
    return (*TELLING, key).index(key), key


def in_short(group: Group, width: int) -> str:
    parts = (f"{key.rpartition('.')[2]}={value}" for key, value in group.values.items())
    return shorten(" ".join(parts), width, placeholder=" ...")


def keys_apart(groups: list[Group], incomparable: list[str], most: int) -> str:
    keys = set(incomparable)
    if groups and "model" in groups[0].values:
        keys = {key for key in keys if not key.startswith("model.")} | {"model"}
    return shortlist(sorted(keys, key=telling), most)


def apart_text(groups: list[Group], incomparable: list[str]) -> str:
    return (
        f"{len(groups)} groups of rows that cannot be compared with each other; they differ in "
        f"{keys_apart(groups, incomparable, 5)}"
    )
