"""Settings that must be equal in all arms of a study, unless the study declares a difference."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from diffllm.compare.report.keys import FACTS, HASH, keys_of_fact, shown_value
from diffllm.compare.report.numbers import compact, percent
from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.config.matching import TOLERANCE
from diffllm.core.errors import listed
from diffllm.core.keys import class_declarations

Values = Mapping[str, Any]
"""Facts of run.json and settings of a run, by name or dotted key."""


class Condition(NamedTuple):
    """The requirement that each key in `keys` has the same value in all arms of a study."""

    keys: tuple[str, ...]
    tolerance: float = 0.0
    """Largest allowed relative difference between numbers."""


CONDITIONS = {
    "parameters": Condition(("parameters",), float(TOLERANCE)),
    "flops": Condition(("flops_per_token",), 0.02),
    "tokens": Condition(("tokens",)),
    "batch": Condition(("global_batch_size", "seq_len")),
    "schedule": Condition(("optim.schedule", "optim.decay_fraction", "optim.min_lr_ratio")),
    "warmup": Condition(("optim.warmup_steps",)),
    "weight_decay": Condition(("optim.weight_decay",)),
    "optimizer": Condition(("optim.beta1", "optim.beta2", "optim.eps", "optim.clip_norm")),
    "data": Condition(
        ("corpus", "tokenizer", "heldout_tokens", "heldout_texts", "data", "eval.tokens",
         "eval.sequences", "eval.levels", "eval.suites_limit")
    ),
    "precision": Condition(("compute_dtype", "precision")),
    "torch": Condition(("torch",)),
}  # fmt: skip
"""By the word in `unequal` that declares a difference."""
RECORDED = (
    "parameters", "flops_per_token", "corpus", "tokenizer", "heldout_tokens", "compute_dtype",
    "torch",
)  # fmt: skip
"""Facts of run.json among the conditions."""
HASHES = ("corpus", "tokenizer", "heldout_texts")
DECLARED = class_declarations(TrainConfig)
UNREAD = [name for name, key in DECLARED.items() if key.resumable and name.startswith("data.")]


def settings_of(config: Values) -> dict[str, str]:
    """Return {config key: formatted value} for the settings that must be equal in all arms.

    The result also contains the key "tokens" for the number of training tokens.
    """
    keys = [key for condition in CONDITIONS.values() for key in condition.keys]
    tokens = config["steps"] * config["global_batch_size"] * config["seq_len"]
    values = {**config, "tokens": tokens}
    return {
        key: value_words(key, value)
        for key, value in values.items()
        if is_within(key, keys) and not is_within(key, UNREAD)
    }


def undeclared(arms: Mapping[str, Iterable[Values]], declared: Iterable[str]) -> list[str]:
    """Return one message for each condition that the arms violate and that is not in `declared`.

    Args:
        arms: for each arm, the settings and run.json entries of each of its runs.
        declared: conditions that the study file lists under `unequal`, such as "batch".
    """
    placed = [(arm, values) for arm, runs in arms.items() for values in runs]
    settled = {
        key
        for fact in FACTS
        for keys in [keys_of_fact(fact, DECLARED)]
        if all(values.get(fact) is not None for _, values in placed)
        for key in keys
    }
    problems = []
    for word, condition in CONDITIONS.items():
        if word in {*declared}:
            continue
        names = {key for _, values in placed for key in values if is_within(key, condition.keys)}
        said = [differing(key, placed, condition.tolerance) for key in sorted(names - settled)]
        if found := [text for text in said if text]:
            add = f"if the study intends this, add {word} to unequal"
            problems.append(f"arms differ in {listed(found)} ({add})")
    return problems


def differing(key: str, runs: list[tuple[str, Values]], tolerance: float) -> str:
    """Describe how the values of `key` differ between arms, or return "" if they are equal.

    Example: "optim.beta2: 0.95 in arm_a; 0.99 in arm_b". `runs` contains (arm, settings) of each
    run; runs without `key` are ignored. Numbers are equal if max / min - 1 <= `tolerance`.
    """
    known = [(arm, values[key]) for arm, values in runs if key in values]
    numbers = [value for _, value in known if isinstance(value, int | float)]
    apart = 0.0
    if tolerance and len(numbers) == len(known):
        apart = max(numbers) / min(numbers) - 1
        if apart <= tolerance * (1 + 1e-9):  # allow for rounding of the ratio
            return ""
    by_value: dict[str, list[str]] = {}
    for arm, value in known:
        by_value.setdefault(value_words(key, value), []).append(arm)
    if len(by_value) < 2:
        return ""
    ends = f" (largest {percent(apart)} above smallest)" if apart else ""
    said = [f"{text} in {', '.join(dict.fromkeys(arms))}" for text, arms in by_value.items()]
    name = "training FLOPs per token" if key == "flops_per_token" else key
    return f"{name}: {listed(said)}{ends}"


def value_words(key: str, value: Any) -> str:
    if value is None and key in RECORDED:
        return "unknown"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return compact(value) if key in ("parameters", "flops_per_token") else f"{value:,.15g}"
    return value[:HASH] if key in HASHES and isinstance(value, str) else shown_value(value)
