"""The rule of comparability: which differences between runs a comparison of these runs allows.

Runs are compared if they differ only in the attention variant, in keys without influence on the
compared value, and in differences that a report or study declares. All other keys are conditions:
compared runs must agree in them. The effect of a key decides, see `core.keys`.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.core.files import user_path
from diffllm.core.keys import Declaration

ATTENTION = "model.attention."
INITIAL_VALUES = "initial values"
"""Starting point of a run that does not load another model."""
Role = Literal["question", "condition", "declared", "harmless"]
"""Role of a key in a comparison.

question: the attention variant and its settings, which the comparison is about.
condition: the compared runs must agree in the key.
declared: the report or study allows the difference, and shows it.
harmless: the key has no influence on the compared value.
"""


class Comparand(NamedTuple):
    """A run in a comparison: its arm or row, its seed, and its config keys and facts by name."""

    arm: str
    seed: int
    values: Mapping[str, Any]


class Difference(NamedTuple):
    """A key in which compared arms differ."""

    key: str
    role: Role
    values: dict[str, list[str]]
    """The arms with each value, by the value as text."""
    reason: str = ""
    """Reason for the role, for readers of a page."""


def role(
    name: str,
    declared: Declaration,
    place: Literal["report", "study"],
    allowed: Collection[str] = (),
    measures_time: bool = False,
    reads_curve: bool = True,
) -> Role:
    """Return the role of a config key or fact in a comparison.

    Args:
        name: dotted config key, or name of a fact in run.json.
        declared: the declaration of the key or fact.
        place: kind of the comparison.
        allowed: keys, facts and sections that the study or sweep declares as differences.
        measures_time: whether the compared value is a time or a speed.
        reads_curve: whether a study compares values that are logged during training. Otherwise, as
            in a report, the steps of logged values do not matter.
    """
    if declared.effect == "none" or (declared.effect == "speed" and not measures_time):
        return "harmless"
    is_of_attention = name == "attention" or name.startswith(ATTENTION)
    if is_of_attention and declared.effect != "speed":
        return "question"
    if is_within(name, allowed) or place in declared.may_differ:
        return "declared"
    if declared.effect == "logging" and (place == "report" or not reads_curve):
        return "harmless"
    return "condition"


def starting_point(
    cfg: TrainConfig, run: Path | None = None, previous: Mapping[str, Any] | None = None
) -> str:
    """Return the starting point of a run: initial values, a stage, or the value of `resume`.

    A checkpoint of the run itself continues the run, so that its starting point is the initial
    values. Each arm and seed continues its own stage, so that the path of the stage does not
    matter.

    Args:
        run: run directory; default: run.dir, if this key is set.
        previous: entry of run.json after resume=stage:PATH.
    """
    if previous:
        return f"stage after {previous['tokens']:,} tokens"
    if cfg.resume.startswith("stage:"):
        return "stage"
    if run is None and cfg.run.dir is not None:
        run = user_path(cfg.run.dir, "run.dir")
    inside = run is not None and Path(cfg.resume).absolute().is_relative_to(run.absolute())
    return INITIAL_VALUES if inside or cfg.resume in ("auto", "never") else cfg.resume


def arms_by_value(runs: Sequence[tuple[str, int, str]]) -> dict[str, list[str]]:
    """Return the arms with each value, from (arm, seed, value) of each run."""
    arms: dict[str, list[str]] = {}
    for arm, _, value in runs:
        names = arms.setdefault(value, [])
        if arm not in names:
            names.append(arm)
    return arms


def disagrees(runs: Sequence[tuple[str, int, str]]) -> bool:
    """Return whether arms differ in a value, given as (arm, seed, value) of each run.

    Two arms agree if their runs of each common seed agree. Values may differ between seeds: for
    example, seeds 0 to 3 of all arms may have run with an earlier version of the code. Arms without
    a common seed agree if they have the same values.
    """
    by_arm: dict[str, dict[int, set[str]]] = {}
    for arm, seed, value in runs:
        by_arm.setdefault(arm, {}).setdefault(seed, set()).add(value)
    for first, second in combinations(by_arm.values(), 2):
        common_seeds = first.keys() & second.keys()
        if any(first[seed] != second[seed] for seed in common_seeds):
            return True
        if not common_seeds and set().union(*first.values()) != set().union(*second.values()):
            return True
    return False
