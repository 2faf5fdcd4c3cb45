"""The rule of comparability: which differences between runs a comparison of these runs allows.

Runs are compared if they differ only in the attention variant, in keys without influence on the
compared value, and in differences that a report or study declares. All other keys are conditions:
compared runs must agree in them. The effect of a key decides, see `core.keys`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diffllm.compare.arms.sentences import compact, percent, range_text
from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.config.compose import registered_declarations
from diffllm.config.matching import TOLERANCE
from diffllm.core.files import user_path
from diffllm.core.keys import UNDECLARED, Declaration, Declarations, declaration_of
from diffllm.core.run_facts import fact_declarations

ATTENTION_PREFIX = "model.attention."
CHANGED = "changed"
"""Name for the config changes after the start of a run; not a config key."""
COMPUTED_VALUES = {
    **dict.fromkeys(("attention", "resume", "plugins", "tokens", "budget", CHANGED), UNDECLARED),
    "heldout_texts": Declaration(effect="measurement"),
}
"""Compared values that are neither config keys nor facts of run.json.

These are the attention variant, the starting point, the versions of plugins that several runs use
in different versions, the planned training tokens, the budget that determines them, the changes
during the run, and the hash of the held-out documents.
"""
TOLERANCES = {"parameters": float(TOLERANCE), "flops_per_token": 0.02}
"""Largest relative difference between arms that is ignored, by fact."""
HASHES = ("corpus", "tokenizer", "heldout_texts", "code")
"""Values that are hashes. Texts show the first HASH digits."""
HASH = 8
SOURCE = re.compile(r"data\.sources\.[^.]+(?=\.)")
"""Source of a mixture; its keys are declared like the keys of `data`."""
NOT_SET = "not set"
"""Text of a key that the config of a run does not have."""
INITIAL_VALUES = "initial values"
"""Starting point of a run that does not load another model."""
Role = Literal["question", "condition", "declared", "harmless"]
"""Role of a key in a comparison.

question: the attention variant and its settings, which the comparison is about.
condition: the compared runs must agree in the key.
declared: the report or study allows the difference, and shows it.
harmless: the key has no influence on the compared value.
"""


class Terms(NamedTuple):
    """Terms of a comparison, which decide the roles of keys."""

    place: Literal["report", "study"]
    allowed: Collection[str] = ()
    """Keys, facts and sections that a study declares as differences."""
    measures_time: bool = False
    """Whether the compared value is a time or a speed."""
    reads_curve: bool = True
    """Whether a study compares values that are logged during training.

    Otherwise, as in a report, the steps of logged values do not matter.
    """


REPORT = Terms("report")


class Comparand(NamedTuple):
    """A run in a comparison: its arm or row, its seed, and its config keys and facts by name."""

    arm: str
    seed: int
    values: Mapping[str, Any]
    """Raw values, or texts of `exact_text`. See `compared_values` for the config keys."""


class Difference(NamedTuple):
    """A key in which compared arms differ."""

    key: str
    role: Role
    values: dict[str, list[str]]
    """The arms with each value, by the value as text."""
    reason: str
    """Reason for the role; for a fact in TOLERANCES, the ratio of the values, if all are known."""


def differences(
    runs: Sequence[Comparand], terms: Terms, declared: Declarations | None = None
) -> list[Difference]:
    """Return all keys and facts in which arms differ, sorted by name.

    If run.json contains the fact that a key determines, the fact is compared in place of the key.
    Differences within `TOLERANCES` are ignored.

    Args:
        runs: the runs of all arms.
        terms: terms of the comparison.
        declared: declarations of the keys and facts; default: of all registered keys.
    """
    if declared is None:
        declared = {**registered_declarations(), **fact_declarations(), **COMPUTED_VALUES}
    names: set[str] = set()
    for run in runs:
        names |= run.values.keys()
    result = []
    for name in sorted(names):
        key = name if name in declared else SOURCE.sub("data", name)
        declaration = declaration_of(key, declared)
        key_role = role(name, declaration, terms)
        reason = reason_of(key_role, declaration)
        if name in TOLERANCES:
            ratio = largest_ratio(name, runs)
            # The second tolerance is for the rounding of the ratio itself.
            if ratio is not None and ratio <= TOLERANCES[name] * (1 + 1e-9):
                continue
            reason = f"largest {percent(ratio)} above smallest" if ratio else ""
        # Different keys can give equal facts, such as data.paths of equal corpora. Runs
        # of older versions do not record every fact, and are compared by the key.
        fact = declaration.fact or ""
        without_fact = [run for run in runs if run.values.get(fact) is None]
        values = differing_values(name, without_fact)
        if not values and fact:
            values = differing_values(name, runs)
            key_role, reason = "harmless", f"{fact} is compared instead"
        if values:
            result.append(Difference(name, key_role, values, reason))
    return result


def role(name: str, declared: Declaration, terms: Terms) -> Role:
    """Return the role of a config key or fact in a comparison.

    Args:
        name: dotted config key, or name of a fact in run.json.
        declared: the declaration of the key or fact.
        terms: terms of the comparison.
    """
    if declared.effect == "none" or (declared.effect == "speed" and not terms.measures_time):
        return "harmless"
    is_of_attention = name == "attention" or name.startswith(ATTENTION_PREFIX)
    if is_of_attention and declared.effect != "speed":
        return "question"
    if is_within(name, terms.allowed) or terms.place in declared.may_differ:
        return "declared"
    if declared.effect == "logging" and (terms.place == "report" or not terms.reads_curve):
        return "harmless"
    return "condition"


def conditions_of(names: Collection[str], declared: Declarations) -> list[str]:
    """Return the names of keys and facts that must agree in compared rows of a report, sorted."""
    conditions = []
    for name in sorted(names):
        if role(name, declaration_of(name, declared), REPORT) == "condition":
            conditions.append(name)
    return conditions


def reason_of(key_role: Role, declared: Declaration) -> str:
    if key_role == "question":
        return "setting of the attention variant"
    if key_role == "condition":
        return "runs with different values are not compared"
    if key_role == "declared":
        return "runs may differ"
    if declared.effect == "speed":
        return "decides only speed"
    if declared.effect == "logging":
        return "decides only which values are logged, and how often"
    if "path" in declared.kinds:
        return "decides only where files are"
    return "has no influence on training and evaluation"


def compared_values(config: Mapping[str, Any], declared: Declarations) -> dict[str, Any]:
    """Return the values of a config that a comparison can compare, by dotted key.

    Omit the seed, the settings of the attention variant, and the section `resolved`, whose values
    follow from other keys. If a key has the value of the key that its default refers to, its value
    is a text such as "as seed".

    Args:
        config: value by dotted key.
        declared: declarations of these keys.
    """
    values = {}
    for name, value in config.items():
        declaration = declaration_of(name, declared)
        source = declaration.follows
        # The runs of a seed share the key `seed`. Keys that follow `seed` can differ.
        is_seed = "seed" in declaration.kinds and not source
        is_of_variant = name.startswith(ATTENTION_PREFIX) and not declaration.harmless
        if is_seed or is_of_variant or is_within(name, ["resolved"]):
            continue
        values[name] = value
        if source and value == config.get(source):
            values[name] = f"as {source}"
    return values


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
    is_of_run = False
    if run is not None:
        is_of_run = Path(cfg.resume).absolute().is_relative_to(run.absolute())
    if is_of_run or cfg.resume in ("auto", "never"):
        return INITIAL_VALUES
    return cfg.resume


def differing_values(name: str, runs: Sequence[Comparand]) -> dict[str, list[str]]:
    """Return the arms with each value, by the value as text; {} if the arms agree."""
    if name in COMPUTED_VALUES or name.startswith(ATTENTION_PREFIX):
        # Diverged runs have no documents, and attention variants have different keys.
        runs = [run for run in runs if name in run.values]
    texts = []
    for run in runs:
        text = exact_text(name, run.values[name]) if name in run.values else NOT_SET
        texts.append((run.arm, run.seed, text))
    if not disagrees(texts):
        return {}
    if name in TOLERANCES:
        # Seeds of an arm can differ slightly, for example in FLOPs with document masks.
        texts = []
        for run in runs:
            texts.append((run.arm, run.seed, range_of_arm(name, run.arm, runs)))
    values: dict[str, list[str]] = {}
    for arm, _, text in texts:
        arms = values.setdefault(shortened(name, text), [])
        if arm not in arms:
            arms.append(arm)
    # A key with the value null decides as little as a key that a config does not have.
    return {} if values.keys() <= {NOT_SET, "null"} else values


def range_of_arm(name: str, arm: str, runs: Sequence[Comparand]) -> str:
    """Return the smallest and the largest value of a number in the runs of an arm, as text."""
    values = [run.values.get(name) for run in runs if run.arm == arm]
    return exact_text(name, None) if None in values else range_text(values)


def disagrees(runs: Sequence[tuple[str, int, str]]) -> bool:
    """Return whether arms differ in a value, given as (arm, seed, value) of each run.

    Two arms agree if their runs of each common seed agree. Values may differ between seeds: for
    example, seeds 0 to 3 of all arms may have run with an earlier version of the code. Arms without
    a common seed agree if they have the same values.
    """
    # Most keys are equal in all runs, and a report can have many runs.
    if len({value for _, _, value in runs}) < 2:
        return False
    by_arm: dict[str, dict[int, set[str]]] = {}
    for arm, seed, value in runs:
        values_by_seed = by_arm.setdefault(arm, {})
        values_by_seed.setdefault(seed, set()).add(value)
    for first, second in combinations(by_arm.values(), 2):
        common_seeds = first.keys() & second.keys()
        if any(first[seed] != second[seed] for seed in common_seeds):
            return True
        if common_seeds:
            continue
        first_values: set[str] = set().union(*first.values())
        second_values: set[str] = set().union(*second.values())
        if first_values != second_values:
            return True
    return False


def largest_ratio(name: str, runs: Sequence[Comparand]) -> float | None:
    """Return max / min - 1 of a fact with a tolerance; None if a value is unknown."""
    numbers = []
    for run in runs:
        value = run.values.get(name)
        if not isinstance(value, int | float):
            return None
        numbers.append(value)
    return max(numbers) / min(numbers) - 1


def exact_text(name: str, value: Any) -> str:
    """Return a value as an override spells it; "unknown" if run.json does not contain a fact."""
    if name == CHANGED:
        return "; ".join(value) if value else "nothing"
    if value is None and name in fact_declarations():
        return "unknown"
    if name in TOLERANCES and not isinstance(value, str):
        return compact(value)
    return f"{value:.15g}" if isinstance(value, float) else shown_value(value)


def value_text(name: str, value: Any) -> str:
    """Return `exact_text`; of a hash, return its start."""
    return shortened(name, exact_text(name, value))


def shortened(name: str, text: str) -> str:
    return text[:HASH] if name in HASHES else text


def shown_value(value: Any) -> str:
    """Return a value as YAML spells it; lists contain no spaces."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown_value, value))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def text_of_values(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a text that is equal for two runs with equal values of `names`."""
    return shown_value([values.get(name) for name in names])
