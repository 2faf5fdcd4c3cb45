"""The number of a run's steps: given, or from tokens or epochs; and the values that follow it.

A YAML writes `${of_steps:0.1,2000}` for a tenth of the steps, but at least 1 and at most 2,000.
"""

import math

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from diffllm.config.schema import TrainConfig
from diffllm.errors import ConfigError

LENGTHS = ("steps", "max_tokens", "epochs")
"""The keys that say how long a run is; one of them is given."""
ROUNDING = 1e-6
"""The most that a share of the steps may be off by rounding."""


def of_steps(share: float, most: int, _root_: DictConfig) -> int:
    """Resolve `${of_steps:share,most}`: that share of `steps`, rounded up, from 1 to `most`.

    Rounded down, the last interval would end a step or two before the run does.
    """
    return max(1, min(most, math.ceil(share * _root_.steps - ROUNDING)))


OmegaConf.register_new_resolver("of_steps", of_steps, replace=True)


def choose_length(cfg: DictConfig, overrides: list[Override]) -> None:
    """Let the length that the command line gives take the place of one that a YAML gives.

    Raises ConfigError for more than one.
    """
    given = {name for name in LENGTHS if name in [o.get_key_element() for o in overrides]}
    if given:
        for name in {"max_tokens", "epochs"} - given:
            cfg[name] = None
    kept = [name for name in LENGTHS[1:] if cfg[name] is not None]
    if len(given) > 1 or len(kept) > 1:
        raise ConfigError(f"{', '.join(sorted(given or kept))}: give one of {', '.join(LENGTHS)}")


def steps_of_tokens(cfg: TrainConfig) -> int | None:
    """Return the whole steps in max_tokens; None where it is not given."""
    if cfg.max_tokens is None:
        return None
    return whole(cfg.max_tokens / (cfg.global_batch_size * cfg.seq_len), "max_tokens", cfg)


def steps_of_epochs(cfg: TrainConfig) -> int | None:
    """Prepare the corpus and return the whole steps in epochs over it; None where not given."""
    if cfg.epochs is None:
        return None
    from diffllm.data import prepare, sequences_of_epoch  # seconds that other runs need not wait

    sequences = sequences_of_epoch(prepare(cfg.data, cfg.prepare), cfg.data, cfg.seq_len)
    return whole(cfg.epochs * sequences / cfg.global_batch_size, "epochs", cfg)


def whole(steps: float, key: str, cfg: TrainConfig) -> int:
    """Round down; raises ConfigError where not even one step is left."""
    if steps < 1:
        raise ConfigError(
            f"{key}={getattr(cfg, key):g} is less than one step of global_batch_size="
            f"{cfg.global_batch_size} sequences of seq_len={cfg.seq_len} tokens"
        )
    return int(steps)
