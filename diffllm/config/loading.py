"""Load the typed config of a command line; compute the training steps and feed-forward width."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from diffllm.config.compose import (
    heldout_tokens,
    lengths_in,
    steps_to_train,
    typed_config,
    variant_config,
    variants,
)
from diffllm.config.matching import Matched, match, totals, widened
from diffllm.config.origin import compose_with_origin
from diffllm.config.overrides import AUTO, check_choice
from diffllm.config.plugins import load_plugins, plugins_in
from diffllm.config.schema import MOST_STEPS, ContextError, TrainConfig
from diffllm.config.values import check_paths
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path


def load_config(
    overrides: list[str] | None = None, config_dir: str | Path | None = None
) -> TrainConfig:
    """Compose a config from overrides, convert the config to dataclasses and validate all values.

    Import the plugins in plugins=[...]. For model.match_params_to or model.match_flops_to, solve
    the feed-forward width. Raises ConfigError for an invalid key, choice or value; the message is
    one line with the allowed values.

    Args:
        overrides: words of a command line, e.g. ["model=tiny", "attention=diff_v2"].
        config_dir: directory of additional YAML files, like `--config-dir`. The directory and
            the plugins stay registered in this process.
    """
    words = [] if overrides is None else overrides
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f'overrides={words!r} must be a list of strings, such as ["model=tiny"]')
    words = list(words)
    named_here = [user_path(config_dir, "config_dir").resolve()] if config_dir is not None else []
    load_plugins(words, named_here)
    return without_imports(words)


def configs_of(comparison: list[Callable[[], TrainConfig]]) -> list[TrainConfig]:
    """Call the functions that load the configs of a comparison; return the configs.

    Raises ConfigError if a config is invalid. If parallel.context does not fit the attention of a
    config, the message names the values that fit all configs.
    """
    configs = []
    errors = []
    for load in comparison:
        try:
            configs.append(load())
        except ContextError as error:
            errors.append(error)
    if errors:
        allowed = [error.allowed for error in errors]
        allowed += [cfg.context_degrees() for cfg in configs]
        common = sorted(set(allowed[0]).intersection(*allowed[1:]))
        raise ConfigError(f"{errors[0]}; all runs allow {', '.join(map(str, common))}")
    return configs


def without_imports(words: list[str]) -> TrainConfig:
    return solved(compose_with_origin(words), words)


def solved(composed: DictConfig, words: list[str]) -> TrainConfig:
    """Convert a composed config to validated dataclasses; compute steps and feed-forward width.

    Compute the training steps if max_tokens, epochs or train.budget.flops is set, and the width if
    model.match_params_to or model.match_flops_to is set. Raises ConfigError if a value is invalid,
    if no width matches the target, or if a YAML file sets `plugins`: only the overrides `words`
    may set this key.
    """
    has_length = bool(lengths_in(composed))
    if has_length:
        # The steps are still unknown, and some checks compare other keys with the steps.
        composed.steps = MOST_STEPS
    # Report errors before the steps are computed, because `epochs` prepares the corpus.
    cfg = typed_config(composed)
    check_paths(cfg)
    # FLOPs per token, which determine the steps of a budget, depend on the width.
    matched = matched_width(cfg)
    if has_length:
        set_steps(composed, cfg, matched)
        cfg = typed_config(composed)
    if cfg.plugins != plugins_in(words):
        raise ConfigError(
            f"plugins=[{','.join(cfg.plugins)}] is set in a YAML file; remove the key from the "
            "file, and set plugins=[...] on the command line"
        )
    if matched:
        cfg.resolved.matched = matched
        cfg.model = widened(cfg.model, matched.ffn_dim)
    return cfg


def matched_width(cfg: TrainConfig) -> Matched | None:
    """Solve the width for model.match_params_to or model.match_flops_to; None without both."""
    targets = {"params": cfg.model.match_params_to, "flops": cfg.model.match_flops_to}
    for cost, target in targets.items():
        if target is not None:
            setting = f"model.match_{cost}_to={target}"
            check_choice(setting, target, variants())
            if cost == "flops":
                check_keys_of_flops(cfg, setting)
            return match(cfg.model, target, variant_config(target), cost, cfg.visible_keys)
    return None


def set_steps(composed: DictConfig, cfg: TrainConfig, matched: Matched | None) -> None:
    """Set the steps in `composed` by max_tokens, epochs or train.budget.flops.

    `cfg` is the typed config of `composed`, and `matched` its matched width. With a budget, also
    set eval.tokens if the value is auto.
    """
    budget = cfg.train.budget.flops
    if budget is None:
        composed.steps = steps_to_train(cfg)
        return
    check_keys_of_flops(cfg, f"train.budget.flops={budget:g}")
    model = widened(cfg.model, matched.ffn_dim) if matched else cfg.model
    composed.steps = steps_to_train(cfg, totals(model, cfg.visible_keys)["flops"])
    values: Any = OmegaConf.to_container(composed.eval, resolve=False)
    if values["tokens"] == AUTO["eval.tokens"]:
        # Variants of one budget have different lengths, but must be measured on equal text.
        standard = replace(cfg.model, attention=variant_config("standard"))
        flops_per_token = totals(standard, cfg.visible_keys)["flops"]
        composed.eval.tokens = heldout_tokens(budget / flops_per_token)


def check_keys_of_flops(cfg: TrainConfig, setting: str) -> None:
    """Raise ConfigError if the config does not determine the FLOPs per token for a setting.

    The FLOPs depend on the mean number of tokens that a query sees. With document masks, the
    config determines this number only if data.visible_keys or data.document_lengths is set.
    """
    if cfg.data.mask_documents and cfg.visible_keys is None:
        raise ConfigError(
            f"{setting} with data.mask_documents=true needs the mean number of tokens that a query "
            "sees; set data.document_lengths or data.visible_keys. A value for data.visible_keys "
            "is in summary.json of a run on this "
            f"corpus. With data.visible_keys={(cfg.seq_len + 1) / 2}, FLOPs are counted without "
            "document masks"
        )
