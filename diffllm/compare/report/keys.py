"""Find the config keys and the facts of run.json that distinguish the rows of a report."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from diffllm.compare.arms.budget import planned_budgets, without_length
from diffllm.compare.arms.comparability import (
    ATTENTION_PREFIX,
    CHANGED,
    COMPUTED_VALUES,
    REPORT,
    Comparand,
    compared_values,
    conditions_of,
    differences,
    role,
    shown_value,
    starting_point,
    text_of_values,
)
from diffllm.compare.arms.heldout import HELDOUT
from diffllm.compare.arms.run import Run
from diffllm.compare.report.seed_facts import with_facts_of_seeds
from diffllm.config import TrainConfig
from diffllm.config.changes import is_fixed
from diffllm.config.compose import variant_config
from diffllm.config.plugin_code import several_versions, versions_text
from diffllm.config.saved import flatten, yaml_dict
from diffllm.core.keys import (
    Declaration,
    Declarations,
    class_declarations,
    declaration_of,
    strictest,
)
from diffllm.core.run_facts import fact_declarations, facts_of, machine_facts

SEEDS = [
    name for name, declared in class_declarations(TrainConfig).items() if "seed" in declared.kinds
]
"""Keys in which runs of one row differ; `Run.seeds` contains their values."""
FACTS = [
    name
    for name, declared in fact_declarations().items()
    if role(name, declared, REPORT) == "condition"
]
"""Facts of run.json that must agree in compared rows."""
HEADLINE = ("model", "steps", "seq_len", "global_batch_size", "optim.lr", "optim.warmup_steps")
"""Keys that settings and short descriptions of groups name first; model is the chosen YAML."""
MATCHES = ("model.match_params_to", "model.match_flops_to")
"""Keys whose values are names of attention variants, see `count_targets_as_matched`."""
CAUSES = {
    "tokenizer": ("corpus",),
    HELDOUT: ("data.heldout_fraction", "tokenizer", "corpus"),
    "eval.tokens": ("steps", "global_batch_size", "seq_len"),
}
"""Keys and facts that can explain a difference in a fact or key; a label then shows only these.

The config keys of a fact can explain the fact as well, but their declarations state this. No
declaration states that one fact influences another, or that eval.tokens=auto depends on the run's
number of tokens.
"""


@dataclass(frozen=True)
class Keys:
    """Keys (config keys or names of entries of run.json) that differ between runs."""

    swept: list[str]
    """Keys that distinguish the rows of a report."""
    incomparable: list[str]
    """Keys that must have equal values in two runs to compare the runs."""
    values: list[dict[str, Any]]
    """Values of all these keys per run; None if the run's attention variant lacks the key."""
    of_model: set[str]
    """Keys of `swept` that `model=<choice>` sets, see `keys_of_model_choice`."""


def distinguish(runs: list[Run]) -> Keys:
    """Return the config keys and entries of run.json in which runs differ, with their values.

    Omit seeds, keys without influence on the loss, and keys whose values follow from another key.
    A run without an entry of run.json that a key determines is not comparable to a run with the
    entry. If all runs lack the entry, the config keys are compared instead.
    """
    declared = all_declarations(runs)
    values = distinguishing_values(runs)
    # Two variants have different fields below `model.attention`, with different defaults. Only
    # overrides of these defaults distinguish rows of one variant.
    differing = overridden_keys(runs) | deciding_differences(values, declared)
    values = with_facts_of_seeds(values, runs, differing, declared)
    # Facts of the machine no longer differ if the runs of each seed agree.
    for fact in machine_facts():
        if not has_differences(fact, values):
            differing.discard(fact)
    explained = explained_names(differing, values, declared)

    # The attention variant is the first part of every label, even if all runs have the same.
    swept = ["attention", *sorted(differing - explained - {"attention"})]
    # Groups of comparable rows need all conditions, also those that another key explains.
    incomparable = conditions_of(differing, declared)
    names = [*swept, *incomparable]
    values_of_runs = []
    for run_values in values:
        values_of_runs.append({name: run_values.get(name) for name in names})
    of_model = keys_of_model_choice(runs, swept, values)
    return Keys(swept, incomparable, values_of_runs, of_model)


def keys_of_model_choice(
    runs: list[Run], swept: list[str], values: Sequence[dict[str, Any]]
) -> set[str]:
    """Return the config keys that `model=<choice>` sets, such as model.dim for `model=mini`.

    Return only keys that differ between runs. Labels show `model=<choice>` instead of these keys.
    Return an empty set if only one key is found, or if two choices have the same values of all
    found keys.

    Args:
        values: for each run, the values by name.
    """
    values_and_choice = []
    for run, run_values in zip(runs, values, strict=True):
        choice = run.cfg.resolved.choices["model"]
        values_and_choice.append(run_values | {"choice": choice})
    # The choice must determine the keys, and the keys the choice: a label with the choice alone
    # then says as much as a label with all keys.
    determined = set()
    for key in swept:
        is_of_model = key.startswith("model.") and not key.startswith(ATTENTION_PREFIX)
        if is_of_model and can_determine(["choice"], key, values_and_choice):
            determined.add(key)
    if len(determined) > 1 and can_determine(determined, "choice", values_and_choice):
        return determined
    return set()


def overridden_keys(runs: Sequence[Run]) -> set[str]:
    names: set[str] = set()
    for run in runs:
        names.update(overrides(run))
    return names


def deciding_differences(values: list[dict[str, Any]], declared: Declarations) -> set[str]:
    """Return the names in which runs differ, if different values mean different rows.

    Args:
        values: for each run, the values by name.
    """
    # With one arm per run, and one seed, any two runs with different values differ.
    comparands = [Comparand(str(i), 0, run_values) for i, run_values in enumerate(values)]
    names = set()
    for difference in differences(comparands, REPORT, declared):
        name = difference.key
        declaration = declaration_of(name, declared)
        if difference.role == "harmless" and not can_explain_fact(name, declaration.fact, values):
            continue
        if is_deciding(name, declaration):
            names.add(name)
    return names


def all_declarations(runs: list[Run]) -> dict[str, Declaration]:
    """Return the declarations of the runs' config keys, plug-ins included, and of all facts."""
    of_runs = [run.declarations for run in runs]
    return strictest([COMPUTED_VALUES, fact_declarations(), *of_runs])


def is_deciding(key: str, declared: Declaration) -> bool:
    """Return whether runs with different values of a key or fact are in different rows."""
    if key in fact_declarations():
        return key in FACTS
    key_role = role(key, declared, REPORT)
    if key_role == "declared":
        # Keys that may change at resume do not define a row.
        return is_fixed(declared)
    return key not in SEEDS and key_role != "harmless"


def values_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the values of runs that a report compares, by config key, fact or computed name.

    Overrides of the variant's defaults below `model.attention` are omitted; see `overrides`.
    """
    several = several_versions([run.plugin_code for run in runs])
    result = []
    for run in runs:
        values = compared_values(run.config, run.declarations)
        values |= vars(facts_of(run.facts))
        values["attention"] = run.variant
        values["resume"] = starting_point(run.cfg, run.path, run.facts.get("previous"))
        values[CHANGED] = run.changes if run.changes else None
        # Plugins of which all runs use one version do not distinguish runs.
        names = run.plugin_code.keys() & several.keys()
        versions = versions_text(run.plugin_code, names)
        values["plugins"] = versions if versions else None
        result.append(values)
    return result


def distinguishing_values(runs: list[Run]) -> list[dict[str, Any]]:
    """Return `values_of(runs)` with overrides of the variants, and before matches and budgets."""
    overridden = overridden_keys(runs)
    plans = planned_budgets(runs)
    result = []
    for run, values, plan in zip(runs, values_of(runs), plans, strict=True):
        for name in overridden:
            values[name] = run.config.get(name)
        matched = run.cfg.resolved.matched
        if matched:
            # The solved width follows from the match; the target's width is the setting.
            values[f"model.{matched.key}"] = matched.target_ffn_dim
        result.append(without_length(values, plan))
    return count_targets_as_matched(result)


def count_targets_as_matched(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set model.match_params_to=V in runs of variant V if runs of other variants have this setting.

    Do the same for model.match_flops_to. If a run of variant V already has a value of the key,
    change no run of variant V.

    Args:
        values: for each run, the config values by key.
    """
    counted = list(values)
    for match in MATCHES:
        targets = set()
        matched_variants = set()
        for run_values in values:
            if run_values[match] is not None:
                targets.add(run_values[match])
                matched_variants.add(run_values["attention"])
        targets -= matched_variants
        for i, run_values in enumerate(values):
            has_match = any(run_values[key] is not None for key in MATCHES)
            if run_values["attention"] in targets and not has_match:
                counted[i] = counted[i] | {match: run_values["attention"]}
    return counted


def keys_of_fact(fact: str, declared: Declarations) -> set[str]:
    """Return the config keys that are not compared between runs with equal values of `fact`."""
    return {name for name, declaration in declared.items() if declaration.fact == fact}


def can_explain_fact(key: str, fact: str | None, values: list[dict[str, Any]]) -> bool:
    """Return whether a key explains the different values of the fact that is compared instead."""
    if fact not in FACTS:
        return False
    recorded = [run_values for run_values in values if run_values[fact] is not None]
    return can_determine([fact], key, recorded)


def causes_of(name: str, declared: Declarations) -> set[str]:
    """Return the keys and facts that can explain a difference in a fact or key."""
    causes = keys_of_fact(name, declared)
    for key in list(causes):  # a copy, because the loop adds causes
        source = declared[key].follows
        if source:
            causes.add(source)
    for cause in CAUSES.get(name, ()):
        causes.add(cause)
        if cause in FACTS:
            causes |= causes_of(cause, declared)
    return causes


def explained_names(
    differing: set[str], values: list[dict[str, Any]], declared: Declarations
) -> set[str]:
    """Return the facts and keys of `differing` whose values other keys of `differing` determine."""
    names = set()
    for name in differing.intersection([*FACTS, *CAUSES]):
        causes = differing & causes_of(name, declared)
        if can_determine(causes, name, values):
            names.add(name)
    return names


def overrides(run: Run) -> dict[str, Any]:
    """Return the `model.attention` keys, with values, that differ from the variant's defaults.

    Omit keys that decide only speed.
    """
    defaults = variant_keys(run.variant, run.cfg.resolved.schemas["attention"])
    changed = {}
    for key, default in defaults.items():
        declared = declaration_of(key, run.declarations)
        if run.config[key] != default and is_deciding(key, declared):
            changed[key] = run.config[key]
    return changed


@cache
def default_values() -> dict[str, Any]:
    """Return the defaults of the config classes, by key."""
    return flatten(yaml_dict(TrainConfig()))


@cache
def variant_keys(variant: str, schema: str) -> dict[str, Any]:
    attention = OmegaConf.structured(variant_config(variant, schema))
    content = OmegaConf.to_container(attention, enum_to_str=True)
    return flatten(content, ATTENTION_PREFIX)  # type: ignore[arg-type]


def has_differences(key: str, values: Sequence[Mapping[str, Any]]) -> bool:
    texts = {shown_value(run_values.get(key)) for run_values in values}
    return len(texts) > 1


def can_determine(keys: Collection[str], key: str, values: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the values of `keys` determine the value of `key` in all runs.

    This is true if any two runs with equal values of `keys` also have equal values of `key`. If all
    runs have the same value of `key`, return False. `values` contains one dict per run, from key to
    value.
    """
    causes = sorted(keys)
    first_texts: dict[str, str] = {}
    for run_values in values:
        cause = text_of_values(causes, run_values)
        text = shown_value(run_values.get(key))
        if text != first_texts.setdefault(cause, text):
            return False
    return has_differences(key, values)
