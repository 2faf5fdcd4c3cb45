"""Find the config keys and the entries of run.json that differ between runs."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from diffllm.compare.report.runs import Run
from diffllm.config import TrainConfig
from diffllm.config.compose import variant_config
from diffllm.config.plugins import several_versions, versions_text
from diffllm.config.saved import flatten
from diffllm.core.keys import class_declarations
from diffllm.model.attention.diff_v1 import DiffV1Config

HASH = 8
SEEDS = ("seed", "model.init_seed")
ATTENTION = "model.attention."
FOLLOWS = {"model.seq_len": "seq_len", "data.vocab_size": "model.vocab_size"}
"""Keys whose default is the value of another key."""

CORPUS = (
    "data.source", "data.dataset", "data.name", "data.split", "data.revision", "data.paths",
    "data.text_column", "data.sample_by",
)  # fmt: skip
TOKENIZER = ("data.tokenizer", "data.eos_token", "data.vocab_size", "data.tokenizer_sample_bytes")
HELDOUT = "heldout_tokens"
"""Number of tokens of the final held-out loss; unknown in runs of older versions."""
HELDOUT_SPLIT = "heldout_split_tokens"
"""Number of tokens of the whole held-out split; unknown in runs of older versions."""
FACTS = {
    "corpus": CORPUS, "tokenizer": TOKENIZER, "compute_dtype": ("precision",),
    HELDOUT: ("eval.tokens",),
}  # fmt: skip
"""Facts of run.json, and the config keys that do not matter between runs of equal facts."""
FROM_CORPUS = (*TOKENIZER, "model.vocab_size", "corpus", *CORPUS)
CAUSES = {
    **FACTS, "tokenizer": FROM_CORPUS,
    HELDOUT: ("eval.tokens", "data.heldout_fraction", "tokenizer", *FROM_CORPUS),
    "eval.tokens": ("steps", "global_batch_size", "seq_len"),
}  # fmt: skip
"""Keys that explain a difference in a fact or key: a label then shows the causes alone."""

MATCHES = ("model.match_params_to", "model.match_flops_to")
PLUGINS = "plugins"
CHANGED = "changed"
"""Name for the config changes after the start of a run; not a config key."""
DECLARED = class_declarations(TrainConfig) | class_declarations(DiffV1Config, ATTENTION)
FREE = [name for name, declared in DECLARED.items() if declared.resumable] + ["resolved"]
IGNORED = {*FREE, "run", "eval.interval", *SEEDS} - {
    "eval", "resume", *CORPUS, *TOKENIZER, "precision",
}  # fmt: skip

INCOMPARABLE = (
    "data", "eval", "resume", "steps", "seq_len", "global_batch_size", "precision", "model",
    "optim.schedule", "optim.warmup_steps", "optim.decay_fraction", "optim.min_lr_ratio", *FACTS,
    PLUGINS, CHANGED,
)  # fmt: skip
SWEEPABLE = (
    "model.ffn_dim", *MATCHES, "model.init_std", "model.z_loss", "model.attention",
    "model.moe.expert_dim", "model.moe.bias_update_rate", "model.moe.balance_loss",
    "model.moe.balance_over", "model.moe.router_z_loss",
)  # fmt: skip

SPEED = (
    "device", "ranks", "torch", "micro_batch_size", "compile", "compiled",
    "activation_checkpointing",
    "model.attention.backend", "model.attention.values", "model.loss_chunk", "data.num_workers",
    "parallel.replicate", "parallel.shard", "parallel.expert", "parallel.context",
    "parallel.reduce",
)  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """Keys (config keys or names of entries of run.json) that differ between runs."""

    swept: list[str]
    """Keys that distinguish the rows of a report."""
    incomparable: list[str]
    """Keys that must have equal values in two runs to compare the runs."""
    values: list[dict[str, Any]]
    """Values of all these keys per run; None if the run's attention variant lacks the key."""


def distinguish(runs: list[Run]) -> Keys:
    """Return the config keys and entries of run.json in which runs differ, with their values.

    Omit seeds, keys that affect only speed or file locations, and keys whose values follow from
    another key. Some entries of run.json, such as the hash of the corpus, are compared instead of
    the config keys that determine them. A run without such an entry is not comparable to a run with
    the entry. If all runs lack the entry, compare the config keys.
    """
    values = [deciding_values(run) for run in runs]
    several = several_versions([run.plugin_code for run in runs])
    for each, run in zip(values, runs, strict=True):
        own = several.keys() & run.plugin_code.keys()
        each[PLUGINS] = versions_text(run.plugin_code, own) or None
    count_targets_as_matched(values)
    for key, source in FOLLOWS.items():
        if all(each[key] == each[source] for each in values):
            for each in values:
                del each[key]
    hidden = set()
    for fact, keys in FACTS.items():
        known = [each for each in values if each[fact] is not None]
        unknown = [each for each in values if each[fact] is None]
        hidden |= {
            key
            for key in keys
            if known and not determine([fact], key, known) and not differs(key, unknown)
        }
    names = {key for each in values for key in each} - hidden
    differing = {key for key in names if differs(key, values)}
    follow = {
        fact
        for fact, causes in CAUSES.items()
        if fact in differing and determine(differing.intersection(causes), fact, values)
    }
    overridden = {key for run in runs for key in overrides(run)}
    differing = {k for k in differing if not k.startswith(ATTENTION)} | overridden
    swept = ["attention", *sorted(differing - follow - {"attention"})]
    incomparable = sorted(
        key for key in differing if within(key, INCOMPARABLE) and not within(key, SWEEPABLE)
    )
    kept = {*swept, *incomparable}
    return Keys(swept, incomparable, [{k: each.get(k) for k in kept} for each in values])


def deciding_values(run: Run) -> dict[str, Any]:
    cfg = run.cfg
    values = {key: v for key, v in run.config.items() if not within(key, IGNORED)}
    values["attention"] = run.variant
    values["resume"] = None if cfg.resume in ("auto", "never") else cfg.resume
    if previous := run.facts.get("previous"):  # Each arm and seed continues its own run.
        values["resume"] = f"stage after {previous['tokens']:,} tokens"
    if cfg.resolved.matched:
        values[f"model.{cfg.resolved.matched.key}"] = cfg.resolved.matched.target_ffn_dim
    values[CHANGED] = run.changes or None
    return values | {fact: run.facts.get(fact) for fact in FACTS}


def count_targets_as_matched(values: list[dict[str, Any]]) -> None:
    """Set model.match_params_to=V in runs of variant V if runs of other variants have this setting.

    Do the same for model.match_flops_to. If a run of variant V already has a value of the key,
    change no run of variant V.

    Args:
        values: for each run, the config values by key; changed in place.
    """
    unmatched = [each for each in values if not any(each[match] for match in MATCHES)]
    for match in MATCHES:
        targets = {each[match] for each in values}
        targets -= {each["attention"] for each in values if each[match]}
        for each in unmatched:
            if each["attention"] in targets:
                each[match] = each["attention"]


def overrides(run: Run) -> dict[str, Any]:
    """Return the `model.attention` keys, with values, that differ from the variant's defaults."""
    return {
        key: run.config[key]
        for key, value in variant_keys(run.variant, run.cfg.resolved.schemas["attention"]).items()
        if run.config[key] != value and not within(key, IGNORED)
    }


@cache
def variant_keys(variant: str, schema: str) -> dict[str, Any]:
    attention = OmegaConf.structured(variant_config(variant, schema))
    return flatten(OmegaConf.to_container(attention, enum_to_str=True), ATTENTION)  # type: ignore[arg-type]


def within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def differs(key: str, values: list[dict[str, Any]]) -> bool:
    return len({shown_value(each.get(key)) for each in values}) > 1


def determine(keys: Collection[str], key: str, values: list[dict[str, Any]]) -> bool:
    """Return whether the values of `keys` determine the value of `key` in all runs.

    This is true if any two runs with equal values of `keys` also have equal values of `key`. If all
    runs have the same value of `key`, return False. `values` contains one dict per run, from key to
    value.
    """
    seen: dict[str, set[str]] = {}
    for each in values:
        cause = shown_value([each.get(k) for k in sorted(keys)])
        seen.setdefault(cause, set()).add(shown_value(each.get(key)))
    return differs(key, values) and all(len(found) == 1 for found in seen.values())


def shown_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown_value, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def value_text(key: str, value: Any) -> str:
    if key == CHANGED:
        return "; ".join(value) if value else "nothing"
    if key in FACTS and (value is None or isinstance(value, str)):
        return "unknown" if value is None else value[:HASH]
    return shown_value(value)
