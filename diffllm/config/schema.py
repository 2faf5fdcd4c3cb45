"""Typed config of a run, and checks of its values and of their combinations."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from hydra.core.config_store import ConfigStore

from diffllm.checkpoint.run_checkpoints import CheckpointConfig
from diffllm.config.run_config import EvalConfig, ProfileConfig, ResolvedConfig, RunConfig
from diffllm.core.bounds import check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.data.config import DataConfig
from diffllm.data.preparation.workers import PrepareConfig
from diffllm.distributed.mesh import ParallelConfig
from diffllm.distributed.recompute import ActivationCheckpointing
from diffllm.distributed.world import DistributedConfig
from diffllm.metrics.diagnostics import DiagnosticsConfig
from diffllm.metrics.sinks import MetricsConfig
from diffllm.metrics.visible_keys import expected_visible_keys
from diffllm.metrics.wandb_config import WandbConfig
from diffllm.model import ModelConfig
from diffllm.model.attention.ops import Backend
from diffllm.optim import OptimConfig, ProtectionConfig

MOST_STEPS = LARGEST_DOCUMENT = 10**12


class ContextError(ConfigError):
    """parallel.context does not fit the attention; `allowed` contains the possible values."""

    def __init__(self, message: str, allowed: list[int]) -> None:
        super().__init__(message)
        self.allowed = allowed


class Precision(Enum):
    """Dtype of matrix products; master weights, gradient sums and the loss are always float32."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class TrainConfig:
    """Complete config of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    train: ProtectionConfig = field(default_factory=ProtectionConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    plugins: list[str] = key(
        [],
        effect="none",
        fact="plugin_code",
        help="Python modules or entry points that register variants, data sources and metrics. "
        "YAML files cannot set this key.",
    )
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    run: RunConfig = field(default_factory=RunConfig)
    resolved: ResolvedConfig = field(default_factory=ResolvedConfig)
    seed: int = key(
        0,
        effect="numbers",
        kind="seed",
        help="Seed of the initial values, of the sample order and of the generated text at the "
        "end.",
    )
    steps: int = key(
        1000,
        least=1,
        most=MOST_STEPS,
        effect="numbers",
        help="Optimizer steps, unless max_tokens, epochs or train.budget.flops is set.",
    )
    max_tokens: float | None = key(
        None,
        above=0,
        effect="numbers",
        fact="steps",
        resumable=True,
        help="Maximum number of training tokens; determines steps.",
    )
    epochs: float | None = key(
        None,
        above=0,
        effect="numbers",
        fact="steps",
        resumable=True,
        help="Maximum passes over the training split; determines steps after corpus preparation.",
    )
    seq_len: int = key(
        512,
        least=1,
        most=2**27,
        effect="numbers",
        help="Tokens per sequence.",
    )
    global_batch_size: int = key(
        8,
        least=1,
        most=2**24,
        effect="numbers",
        help="Sequences per optimizer step, over all ranks.",
    )
    micro_batch_size: int | None = key(
        None,
        least=1,
        most=2**24,
        effect="speed",
        help="Sequences per rank and forward pass; null: no gradient accumulation.",
    )
    precision: Precision = key(
        Precision.auto,
        effect="numbers",
        fact="compute_dtype",
        help="Dtype of the computation; auto: bf16 on devices with bf16 units, else fp32.",
    )
    compile: bool | None = key(
        None,
        effect="speed",
        help="Whether torch.compile compiles blocks and loss; null: on GPUs and in long runs on "
        "CPUs.",
    )
    activation_checkpointing: ActivationCheckpointing = key(
        ActivationCheckpointing.none,
        effect="speed",
        help="Activations to recompute in the backward pass: none, selective or full. selective "
        "keeps the results of attention kernels and recomputes the rest; full recomputes all.",
    )
    log_interval: int = key(
        10,
        least=1,
        effect="logging",
        help="Steps between lines of metrics; the first and the last step always have a line.",
    )
    resume: str = key(
        "auto",
        effect="none",
        kind="path",
        help="Starting point: auto, never, the path of a run or checkpoint, weights:PATH or "
        "stage:PATH. auto resumes from the newest complete checkpoint of the run directory. "
        "never starts a new run, in a directory without a run. weights:PATH loads the parameters "
        "of a run, an export or an import, and by default the model and the tokenizer; "
        "everything else starts as in a new run. stage:PATH also loads the optimizer state of a "
        "run, and starts the next stage of its training. PATH@STEP chooses a checkpoint of "
        "another run. A path of this run must be its newest checkpoint, except in a repeated "
        "command, which always resumes from the newest checkpoint.",
    )
    force: bool = key(
        False,
        effect="none",
        help="Start even if parameters, gradients and optimizer state exceed the memory.",
    )

    def validate(self) -> None:
        """Raise ConfigError for values and combinations that are invalid on every machine."""
        check_bounds("", self)
        pieces, most = self.data.vocab_size, self.model.vocab_size
        if self.data.tokenizer is None and pieces > most:
            raise ConfigError(f"data.vocab_size={pieces} must be at most model.vocab_size={most}")
        if self.model.seq_len != self.seq_len:
            raise ConfigError(
                f"model.seq_len={self.model.seq_len} and seq_len={self.seq_len} must be equal; "
                "set both to the same value"
            )
        part: Any
        for part in (self.model, self.data, self.prepare, self.checkpoint, self.wandb):
            part.validate()
        self.check_visible_keys()
        self.optim.validate(self.steps)
        self.parallel.validate(self.model.moe.n_experts)
        self.check_slices()
        self.profile.validate(self.steps)

    def check_slices(self) -> None:
        """Raise ConfigError if parallel.context does not fit the length or the attention heads."""
        context = self.parallel.context
        if context == 1:
            return
        if self.seq_len % context:
            raise ConfigError(f"parallel.context={context} must divide seq_len={self.seq_len}")
        name = self.resolved.choices.get("attention", type(self.model.attention).__name__)
        allowed = self.context_degrees()
        if allowed == [1]:
            raise ContextError(
                f"parallel.context={context} is not supported with attention={name} and "
                f"model.attention.backend={self.model.attention.backend.name}, which need whole "
                "sequences; set parallel.context=1",
                allowed,
            )
        if context not in allowed:
            raise ContextError(
                f"parallel.context={context} does not fit the heads of attention={name}; "
                f"choose one of {', '.join(map(str, allowed))}",
                allowed,
            )

    def context_degrees(self) -> list[int]:
        """Return the values of parallel.context that the attention variant supports."""
        # The meta device allocates no memory for parameters.
        with torch.device("meta"):
            module = self.model.attention.build(self.model, 0)
        if self.model.attention.backend is Backend.reference or not module.sliceable:
            return [1]
        return module.context_degrees()

    @property
    def planned_tokens(self) -> int:
        """Number of tokens that a run with this config trains on."""
        return self.steps * self.global_batch_size * self.seq_len

    @property
    def visible_keys(self) -> float | None:
        """Mean number of keys that a query sees under document masks.

        Return data.visible_keys, or compute the mean from data.document_lengths. Return None if
        neither key is set.
        """
        if documents := self.data.document_lengths:
            return expected_visible_keys(documents, self.seq_len, self.data.whole_documents)
        return self.data.visible_keys

    def check_visible_keys(self) -> None:
        """Raise ConfigError if visible_keys or document_lengths is invalid, or if both are set."""
        keys = self.data.visible_keys
        lengths = self.data.document_lengths
        values = {"visible_keys": keys, "document_lengths": lengths or None}
        settings = [f"data.{name}={value}" for name, value in values.items() if value is not None]
        if len(settings) == 2:
            raise ConfigError(
                f"{settings[0]} and {settings[1]} cannot be combined; remove one of them"
            )
        if settings and not self.data.mask_documents:
            raise ConfigError(f"{settings[0]} needs data.mask_documents=true")
        # The query at position i sees i keys, i = 1 to seq_len, without document masks.
        unmasked_keys = (self.seq_len + 1) / 2
        if keys is not None and keys > unmasked_keys:
            raise ConfigError(
                f"{settings[0]} must be at most {unmasked_keys}, the mean number of visible keys "
                "without document masks"
            )
        for length, number in lengths.items():
            if not (1 <= length <= LARGEST_DOCUMENT and 1 <= number <= LARGEST_DOCUMENT):
                raise ConfigError(
                    f"data.document_lengths={{{length}: {number}}} is invalid: the length in tokens"
                    f" and the number of documents must each be 1 to {LARGEST_DOCUMENT:,}"
                )

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError if the batch sizes or the device mesh do not fit `world_size` ranks.

        Also raise ConfigError for data settings that only older versions of diffllm support.
        """
        self.data.check_current()
        _, shard, expert = self.parallel.sizes(world_size)
        self.micro_batches(world_size)
        if expert > 1:
            moe = self.model.moe
            experts_per_rank = moe.n_experts // expert
            # DTensor computes wrong offsets if it shards an uneven part of a shard.
            if all(size % shard for size in (experts_per_rank, moe.expert_dim, self.model.dim)):
                raise ConfigError(
                    f"parallel.shard={shard} must divide at least one of these: the number of "
                    f"experts per rank ({experts_per_rank}), "
                    f"model.moe.expert_dim={moe.expert_dim}, model.dim={self.model.dim}; "
                    "choose another parallel.shard"
                )

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """Return, for each rank, (sequences per forward pass, forward passes per optimizer step).

        With context parallelism, the numbers hold for each group of ranks that shares sequences.
        Raises ConfigError if the number of groups does not divide global_batch_size, or if
        micro_batch_size does not divide the sequences per group.
        """
        batch = self.global_batch_size
        context = self.parallel.context
        groups = world_size // context
        if batch % groups:
            units = "ranks" if context == 1 else f"groups of parallel.context={context} ranks"
            raise ConfigError(
                f"global_batch_size={batch} must be a multiple of {groups}, the number of {units}"
            )
        share = batch // groups
        micro = self.micro_batch_size or share
        if share % micro:
            unit = "rank" if context == 1 else "group"
            raise ConfigError(
                f"micro_batch_size={micro} must divide {share}, the number of sequences per {unit}"
            )
        return micro, share // micro


ConfigStore.instance().store(name="train_schema", node=TrainConfig)
