"""The typed config that a command line asks for, its length and its widths solved."""

from pathlib import Path

from omegaconf import DictConfig

from diffllm.config.compose import (
    steps_to_train,
    typed_config,
    variant_config,
    variants,
)
from diffllm.config.matching import match, widened
from diffllm.config.origin import compose_with_origin
from diffllm.config.overrides import check_choice
from diffllm.config.plugins import load_plugins, plugins_in
from diffllm.config.schema import MOST_STEPS, TrainConfig, check_paths
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path


def load_config(
    overrides: list[str] | None = None, config_dir: str | Path | None = None
) -> TrainConfig:
    """Compose, type and validate a configuration; solve its width if it is to match.

    Overrides are words of the command line, e.g. ["model=tiny", "attention=diff_v2"]; the plugins
    among them, "plugins=[my_variant]", are imported. A wrong key, choice or value raises
    ConfigError: one line that says what is allowed.

    Args:
        config_dir: a directory with YAMLs beside ours, as `--config-dir`; it and the plugins stay
            known in this process.
    """
    words = [] if overrides is None else overrides
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"load_config takes a list of overrides, as text, not {words!r}")
    words = list(words)
    named_here = [user_path(config_dir, "config_dir").resolve()] if config_dir is not None else []
    load_plugins(words, named_here)
    return without_imports(words)


def without_imports(words: list[str]) -> TrainConfig:
    return solved(compose_with_origin(words), words)


def solved(composed: DictConfig, words: list[str]) -> TrainConfig:
    """Type and validate the config composed of some overrides; solve its length and its width."""
    follows = composed.max_tokens is not None or composed.epochs is not None
    if follows:
        composed.steps = MOST_STEPS
    cfg = typed_config(composed)  # what is wrong is said before a corpus is prepared
    check_paths(cfg)
    if follows:
        composed.steps = steps_to_train(cfg)
        cfg = typed_config(composed)
    if cfg.plugins != plugins_in(words):
        raise ConfigError(f"plugins=[{','.join(cfg.plugins)}] is in a YAML, not the command line")
    for by, target in (("params", cfg.model.match_params_to), ("flops", cfg.model.match_flops_to)):
        if target is not None:
            check_choice(f"model.match_{by}_to={target}", target, variants())
            if by == "flops":
                check_keys_of_match(cfg)
            keys = cfg.visible_keys
            cfg.run.matched = match(cfg.model, target, variant_config(target), by, keys)
            cfg.model = widened(cfg.model, cfg.run.matched.ffn_dim)
    return cfg


def check_keys_of_match(cfg: TrainConfig) -> None:
    """Raise ConfigError if FLOPs of masked documents are matched without visible keys.

    The corpus is not read yet, and a mask removes a different share of the FLOPs of each variant.
    """
    if cfg.data.mask_documents and cfg.visible_keys is None:
        raise ConfigError(
            f"model.match_flops_to={cfg.model.match_flops_to} with data.mask_documents=true needs "
            "data.visible_keys, the mean number of keys that a query sees (summary.json of a run "
            f"on this corpus has it; {(cfg.seq_len + 1) / 2} counts whole sequences), or "
            "data.document_lengths"
        )
