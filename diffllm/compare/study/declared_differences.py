"""Words of the key `unequal`, which declare differences between the arms of a study."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffllm.compare.arms.comparability import (
    TOLERANCES,
    Difference,
    compared_values,
    shown_value,
    starting_point,
)
from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.config.compose import LENGTHS, registered_declarations
from diffllm.config.saved import flatten, yaml_dict
from diffllm.core.errors import ConfigError, did_you_mean, listed
from diffllm.core.keys import declaration_of, declarations
from diffllm.core.run_facts import fact_declarations

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
    keys = [*registered_declarations(), *fact_declarations(), *WORDS["data"]]
    names = {*WORDS}
    for key in keys:
        # A key, and all sections that contain it.
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            names.add(".".join(parts[:count]))
    # The names in these mappings are free, so they cannot be listed.
    mappings = ["data.sources", "eval.levels"]
    if plugins:
        mappings += ["data", "model.attention"]
    for i, word in enumerate(unequal):
        if word not in names and not is_within(word, mappings):
            raise ConfigError(
                f"unequal[{i}]={word} is not one of {', '.join(WORDS)}, a config key, a section, "
                f"or a fact ({', '.join(fact_declarations())}){did_you_mean(word, names)}"
            )


def settings_of(
    cfg: TrainConfig, chosen_rates: bool, previous: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the compared values of a config as texts, by dotted key, as values.json stores them.

    Omit keys that decide nothing. The key "tokens" contains the number of training tokens, and the
    key "resume" the starting point.

    Args:
        cfg: config of a run.
        chosen_rates: whether the study sets optim.lr, which is then omitted.
        previous: entry of run.json after resume=stage:PATH.
    """
    declared = declarations(cfg)
    omitted = [*LENGTHS, "optim.lr"] if chosen_rates else LENGTHS
    settings = {}
    for name, value in compared_values(flatten(yaml_dict(cfg)), declared).items():
        if name in omitted or declaration_of(name, declared).effect == "none":
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        settings[name] = f"{value:,.15g}" if is_number else shown_value(value)
    settings["tokens"] = f"{cfg.planned_tokens:,}"
    settings["resume"] = starting_point(cfg, previous=previous)
    return settings


def undeclared(differences: Iterable[Difference]) -> list[str]:
    """Return one message for each word that would declare a violated condition."""
    by_word: dict[str, list[str]] = {}
    for difference in differences:
        if difference.role == "condition":
            word = word_of(difference.key)
            by_word.setdefault(word, []).append(difference_words(difference))
    messages = []
    for word in [*WORDS, *sorted(by_word.keys() - WORDS.keys())]:
        if word in by_word:
            messages.append(
                f"arms differ in {listed(by_word[word])} (if the study intends this, add {word} to "
                "unequal)"
            )
    return messages


def word_of(name: str) -> str:
    """Return the entry of `unequal` that declares a difference in a key or fact."""
    for word, names in WORDS.items():
        if is_within(name, names):
            return word
    return name


def difference_words(difference: Difference) -> str:
    """Return text such as "optim.beta2: 0.95 in arm_a; 0.99 in arm_b"."""
    values = [f"{text} in {', '.join(arms)}" for text, arms in difference.values.items()]
    name = difference.key
    if name == "flops_per_token":
        name = "training FLOPs per token"
    is_ratio = difference.key in TOLERANCES and difference.reason
    ratio = f" ({difference.reason})" if is_ratio else ""
    return f"{name}: {listed(values)}{ratio}"
