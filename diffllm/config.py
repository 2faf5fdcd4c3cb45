"""The typed configuration of a run, and what makes one invalid.

Hydra composes, the dataclasses type it, and nothing past `train.py` sees a DictConfig.
"""

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from diffllm.changes import is_allowed
from diffllm.checkpoint.config import CheckpointConfig
from diffllm.config_overrides import (
    COMPOSING,
    GROUPS,
    check_booleans,
    check_overrides,
    check_secrets,
    explain,
    one_line,
    suggest,
)
from diffllm.config_values import check_values, leaves
from diffllm.data.config import DataConfig
from diffllm.diagnostics import DiagnosticsConfig
from diffllm.distributed.mesh import ParallelConfig
from diffllm.distributed.world import DistributedConfig
from diffllm.errors import ConfigError
from diffllm.evaluate import EvalConfig
from diffllm.matching import Matched, match, widened
from diffllm.model import ModelConfig
from diffllm.model.attention.base import AttentionConfig
from diffllm.optim import OptimConfig
from diffllm.protection import ProtectionConfig
from diffllm.wandb_run import WandbConfig


class Precision(Enum):
    """Compute precision; master weights, reductions and the loss are always float32."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class RunConfig:
    """Where a run lives."""

    name: str | None = None
    """null: a fresh name from the variant and the time."""
    dir: str | None = None
    """null: outputs/<name>, or outputs/<sweep>/<name>."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys, or groups of them, that may differ from what is continued; also `corpus` and
    `tokenizer`, which are compared by content."""
    report: bool = True
    """Write report.html and report.csv at the end of training."""
    sweep: str | None = None
    """The sweep that the run belongs to; set by `train.py -m`."""
    swept: list[str] = field(default_factory=list)
    """Keys whose values name the runs of a sweep; set by `train.py -m`."""
    choices: dict[str, str] = field(default_factory=dict)
    """The YAML chosen in each group; filled in when the config is composed."""
    matched: Matched | None = None
    """What model.match_params_to solved; filled in when the config is loaded."""


@dataclass
class TrainConfig:
    """Everything that decides a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    train: ProtectionConfig = field(default_factory=ProtectionConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    steps: int = 1000
    seq_len: int = 512
    global_batch_size: int = 8
    """Sequences an optimizer step."""
    micro_batch_size: int | None = None
    """Sequences a rank and forward pass; null: the whole share of a rank. Accumulation follows."""
    precision: Precision = Precision.auto
    compile: bool | None = None
    """torch.compile of blocks and loss; null: on GPUs only."""
    activation_checkpointing: bool = False
    log_interval: int = 10
    resume: str = "auto"
    """auto: continue the newest complete checkpoint of the run directory; never: start anew in a
    directory that holds no run; a path: start from that checkpoint."""

    def validate(self) -> None:
        """Raise ConfigError for values and combinations that cannot run on any machine."""
        for name in ("steps", "seq_len", "global_batch_size", "log_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size={self.micro_batch_size} must be at least 1")
        if self.data.tokenizer is None and self.data.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"data.vocab_size={self.data.vocab_size} exceeds "
                f"model.vocab_size={self.model.vocab_size}"
            )
        if self.model.seq_len != self.seq_len:
            raise ConfigError(
                f"model.seq_len={self.model.seq_len} must be seq_len={self.seq_len}, "
                "which it follows: set seq_len alone"
            )
        self.model.validate()
        self.data.validate()
        self.optim.validate(self.steps)
        self.parallel.validate(self.model.moe.n_experts)
        self.distributed.validate()
        self.checkpoint.validate()
        self.eval.validate()
        self.diagnostics.validate()
        self.train.validate()
        self.wandb.validate()

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError for batches or a mesh that `world_size` ranks cannot have."""
        self.micro_batches(world_size)
        _, shard, expert = self.parallel.sizes(world_size)
        if expert > 1:
            moe = self.model.moe
            own = moe.n_experts // expert
            if all(size % shard for size in (own, moe.expert_dim, self.model.dim)):
                raise ConfigError(
                    f"the {own} experts of a rank (model.moe.n_experts={moe.n_experts}, "
                    f"parallel.expert={expert}) cannot be sharded: parallel.shard={shard} must "
                    f"divide {own}, model.moe.expert_dim={moe.expert_dim} or "
                    f"model.dim={self.model.dim}"
                )

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """(sequences a rank and forward pass, forward passes a step) on `world_size` ranks."""
        if self.global_batch_size % world_size:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} cannot be shared by "
                f"{world_size} ranks: it must be a multiple of {world_size}"
            )
        share = self.global_batch_size // world_size
        micro = self.micro_batch_size or share
        if share % micro:
            raise ConfigError(
                f"micro_batch_size={micro} must divide the {share} sequences that each of "
                f"{world_size} ranks gets from global_batch_size={self.global_batch_size}"
            )
        return micro, share // micro


ConfigStore.instance().store(name="train_schema", node=TrainConfig)


def config_directory() -> Path:
    """The YAML tree: beside the package in an installed wheel, at the top of a checkout."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "conf"


def load_config(overrides: list[str] | None = None) -> TrainConfig:
    """Compose, type and validate a configuration; solve its width if it is to match.

    Args:
        overrides: as on the command line, e.g. ["model=tiny", "attention=diff_v2"].

    Raises:
        ConfigError: a key, choice or value is wrong; one line that says what is allowed.
    """
    cfg = typed(compose_config(overrides or []))
    target = cfg.model.match_params_to
    if target is not None:
        check_variant("model.match_params_to=", target)
        own = cfg.run.choices["attention"]
        cfg.run.matched = match(cfg.model, own, target, variant_config(target))
        cfg.model = widened(cfg.model, cfg.run.matched.ffn_dim)
    return cfg


def variants() -> list[str]:
    """What `attention=` can be."""
    return sorted(path.stem for path in (config_directory() / "attention").glob("*.yaml"))


def check_variant(what: str, name: str) -> None:
    """Raise ConfigError unless `attention=name` exists; `what` goes before the name."""
    if name not in variants():
        close = difflib.get_close_matches(name, variants(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{what}{name} does not exist; {hint}choose from {', '.join(variants())}")


def variant_config(name: str) -> AttentionConfig:
    """A variant as its YAML alone makes it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        attention = OmegaConf.to_object(compose(f"attention/{name}").model.attention)
    assert isinstance(attention, AttentionConfig)
    return attention


def compose_config(overrides: list[str]) -> DictConfig:
    """The composed configuration, untyped; raises ConfigError."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        try:
            check_secrets(overrides)
            parsed = OverridesParser.create().parse_overrides(overrides)
            check_overrides(parsed)
            cfg = compose("train", overrides=overrides, return_hydra_config=True)
            check_booleans(cfg, parsed)
        except COMPOSING as error:
            raise ConfigError(explain(error, overrides)) from error
        except RecursionError:
            deepest = max(overrides, key=lambda word: word.count("[") + word.count("{"))
            raise ConfigError(f"{deepest[:40]}... is nested too deeply to be read") from None
    choices = cfg.hydra.runtime.choices
    with open_dict(cfg):
        cfg.run.choices = {group: choices[group] for group in GROUPS}
        del cfg["hydra"]
    return cfg


def typed(composed: DictConfig) -> TrainConfig:
    """A composed configuration as validated dataclasses; raises ConfigError."""
    try:
        cfg = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(key + one_line(error)) from error
    except TypeError as error:  # of a list whose interpolation is none
        raise ConfigError(f"a list is interpolated from something else: {error}") from error
    assert isinstance(cfg, TrainConfig)
    check_fields(cfg)
    check_values(cfg)
    check_allowed(cfg)
    cfg.validate()
    return cfg


def check_allowed(cfg: TrainConfig) -> None:
    """Raise ConfigError for a name in run.allow_changes that no key or fact of a run has."""
    keys = [*(key for key, _, _ in leaves(cfg)), "corpus", "tokenizer"]
    for name in cfg.run.allow_changes:
        if not any(is_allowed(key, [name]) for key in keys):
            raise ConfigError(f"run.allow_changes: unknown key {name}{suggest(name, keys)}")


def check_fields(node: Any, prefix: str = "") -> None:
    """Raise ConfigError for attributes that no dataclass declares (`+model.foo=1`)."""
    known = [f.name for f in fields(node)]
    for name, value in vars(node).items():
        if name not in known:
            names = known if prefix else list({*known, *GROUPS})
            raise ConfigError(f"unknown key {prefix}{name}{suggest(name, names)}")
        if is_dataclass(value):
            check_fields(value, f"{prefix}{name}.")
