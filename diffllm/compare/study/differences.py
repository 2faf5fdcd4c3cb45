"""Differences between the arms of a study, and the words that declare them in a study file."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from diffllm.compare.arms.comparable import (
    ATTENTION,
    Comparand,
    Difference,
    arms_by_value,
    disagrees,
    role,
    starting_point,
)
from diffllm.compare.arms.sentences import compact, percent
from diffllm.compare.report.keys import HASH, shown_value
from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.config.compose import LENGTHS, registered_declarations
from diffllm.config.matching import TOLERANCE
from diffllm.config.saved import flatten, yaml_dict
from diffllm.core.errors import ConfigError, did_you_mean, listed
from diffllm.core.keys import (
    Declaration,
    Declarations,
    declaration_of,
    declarations,
)
from diffllm.metrics.facts import fact_declarations

WORDS = {
    "parameters": (
        "parameters", "model.dim", "model.n_layers", "model.n_heads", "model.n_kv_heads",
        "model.head_dim", "model.ffn_dim", "model.vocab_size", "model.moe.n_experts",
        "model.moe.top_k", "model.moe.expert_dim", "model.moe.n_shared",
        "model.moe.n_dense_layers",
    ),
    "flops": ("flops_per_token",),
    "tokens": ("tokens",),
    "batch": ("global_batch_size", "seq_len"),
    "schedule": ("optim.schedule", "optim.decay_fraction", "optim.min_lr_ratio"),
    "warmup": ("optim.warmup_steps",),
    "weight_decay": ("optim.weight_decay",),
    "optimizer": ("optim.beta1", "optim.beta2", "optim.eps", "optim.clip_norm"),
    "data": (
        "corpus", "tokenizer", "heldout_tokens", "heldout_texts", "data", "eval.tokens",
        "eval.sequences", "eval.levels", "eval.suites_limit",
    ),
    "precision": ("compute_dtype", "precision"),
    "lr": ("optim.lr",),
}  # fmt: skip
"""Keys and facts by the word in `unequal` that declares a difference in them.

All other keys, sections and facts are declared by their names, such as model.z_loss or device.
"""
TOLERANCES = {"parameters": float(TOLERANCE), "flops_per_token": 0.02}
"""Largest allowed relative difference between arms, by fact."""
COMPUTED = {
    "tokens": Declaration("Planned training tokens.", "numbers"),
    "resume": Declaration("Starting point of training.", "numbers"),
    "heldout_texts": Declaration("Hash of the held-out documents.", "measurement"),
}
"""Compared values that are neither config keys nor facts of run.json."""
HASHES = ("corpus", "tokenizer", "heldout_texts")


def settings_of(
    cfg: TrainConfig, chosen_rates: bool, previous: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the formatted values of all config keys that a verdict can compare, by dotted key.

    Omit keys that decide nothing, and the attention variant. The key "tokens" contains the number
    of training tokens, and the key "resume" the starting point.

    Args:
        cfg: config of a run.
        chosen_rates: whether the study sets optim.lr, which is then omitted.
        previous: entry of run.json after resume=stage:PATH.
    """
    declared = declarations(cfg)
    values = flatten(yaml_dict(cfg))
    settings: dict[str, str] = {}
    for name, value in values.items():
        declaration = declaration_of(name, declared)
        if not is_compared(name, declaration) or (chosen_rates and name == "optim.lr"):
            continue
        source = declaration.follows
        if source and value == values.get(source):
            settings[name] = f"as {source}"
        else:
            settings[name] = value_words(name, value)
    tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
    settings["tokens"] = value_words("tokens", tokens)
    settings["resume"] = starting_point(cfg, previous=previous)
    return settings


def is_compared(name: str, declaration: Declaration) -> bool:
    if declaration.effect == "none" or name in LENGTHS or is_within(name, ["resolved"]):
        return False
    if name.startswith(ATTENTION) and not declaration.harmless:
        return False
    # The runs of a seed share the key `seed`. Keys that follow it can differ.
    return "seed" not in declaration.kinds or declaration.follows is not None


def known_declarations() -> dict[str, Declaration]:
    """Return the declarations of all config keys, also of plugins, and of all facts."""
    return {**registered_declarations(), **fact_declarations(), **COMPUTED}


def declaration_in_study(name: str, declared: Declarations) -> Declaration:
    """Return the declaration of a compared key; a key of a mixture's source is one of `data`."""
    parts = name.split(".")
    if parts[:2] == ["data", "sources"] and len(parts) > 3:
        name = ".".join(["data", *parts[3:]])
    return declaration_of(name, declared)


def allowed_names(unequal: Iterable[str]) -> list[str]:
    """Return the keys, sections and facts that the words in `unequal` declare."""
    allowed: list[str] = []
    for word in unequal:
        allowed += WORDS.get(word, (word,))
        if word in LENGTHS:
            allowed.append("tokens")
    return allowed


def check_unequal(unequal: Sequence[str], plugins: bool) -> None:
    """Raise ConfigError for an entry of `unequal` that is no word, key, section or fact.

    Args:
        unequal: entries of the study file.
        plugins: whether the study loads plugins, whose keys are not yet known.
    """
    declared = known_declarations()
    names = {*WORDS, *declared}
    for name in declared:
        parts = name.split(".")
        names |= {".".join(parts[:i]) for i in range(1, len(parts))}
    mappings = ["data.sources", "eval.levels"]
    if plugins:
        mappings += ["data", "model.attention"]
    for i, word in enumerate(unequal):
        if word not in names and not is_within(word, mappings):
            raise ConfigError(
                f"unequal[{i}]={word} is not one of {', '.join(WORDS)}, a config key, a section, "
                f"or a fact ({', '.join(fact_declarations())}){did_you_mean(word, names)}"
            )


def differences(
    runs: Sequence[Comparand],
    allowed: Collection[str],
    measures_time: bool = False,
    reads_curve: bool = True,
) -> list[Difference]:
    """Return the keys and facts in which arms differ, with the role of each.

    Keys that a fact determines are ignored if all runs have the fact. Differences of parameters and
    FLOPs within `TOLERANCES` are ignored. For the arguments, see `role`.
    """
    declared = known_declarations()
    known_facts = {
        name
        for name in fact_declarations()
        if all(run.values.get(name) is not None for run in runs)
    }
    names = {name for run in runs for name in run.values}
    result = []
    for name in sorted(names):
        declaration = declaration_in_study(name, declared)
        if declaration.fact in known_facts:
            continue
        recorded = [run for run in runs if name in run.values]
        texts = [(run.arm, run.seed, exact_value(name, run)) for run in runs]
        if name in COMPUTED or name.startswith(ATTENTION):
            # Diverged runs have no documents, and attention variants have different keys.
            texts = [(run.arm, run.seed, exact_value(name, run)) for run in recorded]
        apart = largest_ratio(name, recorded)
        is_within_tolerance = apart is not None and apart <= TOLERANCES[name] * (1 + 1e-9)
        if is_within_tolerance or not disagrees(texts):
            continue
        part = role(name, declaration, "study", allowed, measures_time, reads_curve)
        exact_values = arms_by_value(texts)
        values = {shortened(name, text): arms for text, arms in exact_values.items()}
        if len(values) < len(exact_values):  # two hashes with the same start
            values = exact_values
        result.append(Difference(name, part, values))
    return result


def largest_ratio(name: str, runs: Sequence[Comparand]) -> float | None:
    """Return max / min - 1 of a fact with a tolerance; None for other keys and unknown values."""
    values = [run.values[name] for run in runs]
    if name not in TOLERANCES or not all(isinstance(value, int | float) for value in values):
        return None
    ratio: float = max(values) / min(values) - 1
    return ratio


def undeclared(
    runs: Sequence[Comparand],
    allowed: Collection[str],
    measures_time: bool = False,
    reads_curve: bool = True,
) -> list[str]:
    """Return one message for each word that would declare a violated condition, see `role`."""
    by_word: dict[str, list[str]] = {}
    for difference in differences(runs, allowed, measures_time, reads_curve):
        if difference.role == "condition":
            text = difference_words(difference, runs)
            by_word.setdefault(word_of(difference.key), []).append(text)
    order = [*WORDS, *sorted(by_word.keys() - WORDS.keys())]
    return [
        f"arms differ in {listed(by_word[word])} (if the study intends this, add {word} to unequal)"
        for word in order
        if word in by_word
    ]


def word_of(name: str) -> str:
    """Return the entry of `unequal` that declares a difference in a key or fact."""
    for word, names in WORDS.items():
        if is_within(name, names):
            return word
    return name


def difference_words(difference: Difference, runs: Sequence[Comparand]) -> str:
    """Return text such as "optim.beta2: 0.95 in arm_a; 0.99 in arm_b"."""
    key = difference.key
    apart = largest_ratio(key, [run for run in runs if key in run.values])
    ends = f" (largest {percent(apart)} above smallest)" if apart else ""
    values = [f"{text} in {', '.join(arms)}" for text, arms in difference.values.items()]
    name = "training FLOPs per token" if key == "flops_per_token" else key
    return f"{name}: {listed(values)}{ends}"


def exact_value(name: str, run: Comparand) -> str:
    """Return a value as text; "not set" if the config of the run does not have the key."""
    return value_words(name, run.values[name]) if name in run.values else "not set"


def value_words(name: str, value: Any) -> str:
    if value is None and name in fact_declarations():
        return "unknown"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return compact(value) if name in TOLERANCES else f"{value:,.15g}"
    return shown_value(value)


def shortened(name: str, text: str) -> str:
    return text[:HASH] if name in HASHES else text
