"""Typed config of a run, and checks of its values and of their combinations."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import torch
from hydra.core.config_store import ConfigStore

from diffllm.checkpoint.directory import CheckpointConfig
from diffllm.config.matching import Matched
from diffllm.core.bounds import bounded, check_bounds, sections
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.typed import without_null
from diffllm.data.config import DataConfig
from diffllm.data.preparation.workers import PrepareConfig
from diffllm.distributed.mesh import ParallelConfig
from diffllm.distributed.recompute import ActivationCheckpointing
from diffllm.distributed.world import DistributedConfig
from diffllm.metrics.diagnostics import DiagnosticsConfig
from diffllm.metrics.profiling import ProfileConfig
from diffllm.metrics.sinks import MetricsConfig
from diffllm.metrics.visible_keys import expected_visible_keys
from diffllm.metrics.wandb_run import WandbConfig
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
class RunConfig:
    """Name and directory of a run, keys that may change at resume, and the run's sweep or study."""

    name: str | None = None
    """Name of the run; null: generated from the variant and the time."""
    dir: str | None = None
    """Directory of the run; null: outputs/<name>, or outputs/<sweep>/<name>."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys or sections that may change when a run resumes. Also `corpus`, `tokenizer` and `tokens`,
    which are compared by content, and `plugins`, compared by code."""
    report: bool = True
    """Write report.html and report.csv at the end of training."""
    sweep: str | None = None
    """Name of the sweep that the run belongs to; set by `train.py -m`."""
    swept: list[str] = field(default_factory=list)
    """Keys whose values name the runs of a sweep; set by `train.py -m`."""
    study: str | None = None
    """Study of the run, with stage and arm; set by `diffllm study run`."""
    choices: dict[str, str] = field(default_factory=dict)
    """The YAML chosen in each group, or an imported model's name; set at composition."""
    schemas: dict[str, str] = field(default_factory=dict)
    """Registered class names of `model.attention` and, if not the default class, of `data`; set at
    loading. Readers of a run directory use these names."""
    matched: Matched | None = None
    """The widths solved by model.match_params_to or match_flops_to; set at loading."""


@dataclass
class EvalConfig:
    """Evaluations during training: held-out loss and tasks, with their intervals and sizes."""

    interval: int = bounded(100, least=1)
    """Steps between evaluations; the last step always has an evaluation."""
    sequences: int = bounded(64, least=1)
    """Held-out sequences per evaluation, spread evenly over the split; always the same ones."""
    tokens: float | None = bounded(None, above=0)
    """Held-out tokens for the last loss; auto: 1/4 of the run's tokens, at most 1e7; null: all.
    Documents are complete, spread evenly over the split, and equal in runs of equal length. The
    last document can exceed the number."""
    suites: list[str] = field(default_factory=list)
    """Tasks to evaluate during training, such as [mqar,needle]. A suite name, such as claims,
    selects all tasks of the suite; a file of examples ends with .jsonl or .ndjson; see
    docs/evaluation.md."""
    suites_interval: int = bounded(500, least=1)
    """Steps between evaluations of eval.suites; the last step always has an evaluation."""
    suites_limit: int = bounded(64, least=1)
    """Maximum examples per task, over all levels; always the same examples."""
    levels: dict[str, Any] = field(default_factory=dict)
    """Difficulty of tasks in eval.suites, for example {mqar: {filler: 64}}. All other tasks use all
    levels that fit seq_len."""


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
    plugins: list[str] = field(default_factory=list)
    """Python modules or entry points that register variants, data sources and metrics. YAML
    files cannot set this key."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    """Seed of the initial values, of the sample order and of the generated text at the end."""
    steps: int = bounded(1000, least=1, most=MOST_STEPS)
    """Optimizer steps, unless max_tokens or epochs is set."""
    max_tokens: float | None = bounded(None, above=0)
    """Maximum number of training tokens; determines steps."""
    epochs: float | None = bounded(None, above=0)
    """Maximum passes over the training split; determines steps after corpus preparation."""
    seq_len: int = bounded(512, least=1, most=2**27)
    """Tokens per sequence."""
    global_batch_size: int = bounded(8, least=1, most=2**24)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | None = bounded(None, least=1, most=2**24)
    """Sequences per rank and forward pass; null: no gradient accumulation."""
    precision: Precision = Precision.auto
    """Dtype of the computation; auto: bf16 on devices with bf16 units, else fp32."""
    compile: bool | None = None
    """Whether torch.compile compiles blocks and loss; null: on GPUs and in long runs on CPUs."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    """Activations to recompute in the backward pass: none, selective or full.

    selective keeps the results of attention kernels and recomputes the rest; full recomputes all.
    """
    log_interval: int = bounded(10, least=1)
    """Steps between lines of metrics; the first and the last step always have a line."""
    resume: str = "auto"
    """Starting point: auto, never, the path of a run or checkpoint, weights:PATH or stage:PATH.

    auto resumes from the newest complete checkpoint of the run directory. never starts a new run,
    in a directory without a run. weights:PATH loads the parameters of a run, an export or an
    import, and by default the model and the tokenizer; everything else starts as in a new run.
    stage:PATH also loads the optimizer state of a run, and starts the next stage of its training.
    PATH@STEP chooses a checkpoint of another run. A path of this run must be its newest checkpoint,
    except in a repeated command, which always resumes from the newest checkpoint."""
    force: bool = False
    """Start even if parameters, gradients and optimizer state exceed the memory."""

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
        name = self.run.choices.get("attention", type(self.model.attention).__name__)
        if (allowed := self.context_degrees()) == [1]:
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
        with torch.device("meta"):
            module = self.model.attention.build(self.model, 0)
        whole = self.model.attention.backend is Backend.reference or not module.sliceable
        return [1] if whole else module.context_degrees()

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
        keys, lengths, whole = self.data.visible_keys, self.data.document_lengths, self.seq_len + 1
        stated = {"visible_keys": keys, "document_lengths": lengths or None}
        given = [f"data.{name}={value}" for name, value in stated.items() if value is not None]
        if len(given) == 2:
            raise ConfigError(f"{given[0]} and {given[1]} cannot be combined; remove one of them")
        if given and not self.data.mask_documents:
            raise ConfigError(f"{given[0]} needs data.mask_documents=true")
        if keys is not None and keys > whole / 2:
            raise ConfigError(
                f"{given[0]} must be at most {whole / 2}, the mean number of visible keys without "
                "document masks"
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
            own = moe.n_experts // expert
            if all(size % shard for size in (own, moe.expert_dim, self.model.dim)):
                raise ConfigError(
                    f"parallel.shard={shard} must divide at least one of these: the number of "
                    f"experts per rank ({own}), model.moe.expert_dim={moe.expert_dim}, "
                    f"model.dim={self.model.dim}; choose another parallel.shard"
                )

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """Return, for each rank, (sequences per forward pass, forward passes per optimizer step).

        With context parallelism, the numbers hold for each group of ranks that shares sequences.
        Raises ConfigError if the number of groups does not divide global_batch_size, or if
        micro_batch_size does not divide the sequences per group.
        """
        batch, context = self.global_batch_size, self.parallel.context
        groups, who = world_size // context, "ranks"
        if context > 1:
            who = f"groups of parallel.context={context} ranks"
        if batch % groups:
            raise ConfigError(
                f"global_batch_size={batch} must be a multiple of {groups}, the number of {who}"
            )
        share = batch // groups
        micro = self.micro_batch_size or share
        if share % micro:
            of = "rank" if context == 1 else "group"
            raise ConfigError(
                f"micro_batch_size={micro} must divide {share}, the number of sequences per {of}"
            )
        return micro, share // micro


ConfigStore.instance().store(name="train_schema", node=TrainConfig)

SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Limits of float32: smaller values round to 0, larger values are infinite."""
LONGEST_TEXT = 4096
FREE_TEXT = ("data.sample_prompt", "model.match_params_to", "model.match_flops_to")
"""Text keys that may contain line breaks; names of variants are checked elsewhere."""

PATHS = re.compile(
    r"run\.dir|resume|data\.(sources\.[^.]+\.)?(paths|dataset)|data\.(cache_dir|tokenizer)"
)
"""Text keys whose values are or may be paths."""
CARRIED = {"weights": ("model.",), "stage": ("model.", "optim.")}
"""Tensors that a new run takes from a checkpoint, by the prefix of their names.

The keys are those of resume=weights:PATH and resume=stage:PATH. Schedule, data order, random
generators, spike windows and the guard of skipped updates always begin anew.
"""


def leaves(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Iterate over all values in a config dataclass, as (dotted key, declared type, value)."""
    for prefix, node in sections(config):
        hints = get_type_hints(type(node))
        for f in fields(node):
            if not is_dataclass(value := getattr(node, f.name)):
                yield f"{prefix}{f.name}", hints[f.name], value


def check_values(cfg: Any) -> None:
    """Raise ConfigError for list items of a wrong type, invalid text, or invalid numbers."""
    for key, declared, value in leaves(cfg):
        if "${" in str(value):  # readers of config.yaml would resolve ${
            raise ConfigError(
                f"{key}: the value contains ${{ after interpolation; remove ${{ from the value"
            )
        kind = without_null(declared)
        null = value is None and kind is not declared
        if get_origin(kind) is list and not null:  # an interpolation may insert any value
            (kind,) = get_args(kind)
            if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
                items = "text" if kind is str else "integers"
                raise ConfigError(f"{key}={value!r} must be a list of {items}")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                check_text(key, item)
            elif isinstance(item, int | float) and not isinstance(item, bool):
                check_number(key, item)


def check_paths(cfg: Any) -> None:
    """Raise ConfigError for a config value that is an invalid path.

    Do not use for saved configs, which may contain paths of another machine.
    """
    for key, _, value in leaves(cfg):
        if PATHS.fullmatch(key):
            for text in value if isinstance(value, list) else [value]:
                if text is not None:
                    # The default of data.cache_dir follows a variable of the environment.
                    cache = key == "data.cache_dir" and os.environ.get("DIFFLLM_CACHE") == text
                    kind, _, path = text.partition(":")
                    place = path if key == "resume" and kind in CARRIED else text
                    user_path(place, "DIFFLLM_CACHE" if cache else key)


def check_number(key: str, value: float) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}={value} must be from -2^63 to 2^63 - 1")
    if isinstance(value, float) and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        raise ConfigError(
            f"{key}={value} is outside the range of float32: the absolute value must be 0, or "
            f"{SMALLEST_FLOAT:.4g} to {LARGEST_FLOAT:.4g}"
        )


def check_text(key: str, value: str) -> None:
    broken = any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)  # from another encoding
    one_line = value.strip() and value.isprintable() and len(value) <= LONGEST_TEXT
    if broken or not (one_line or key in FREE_TEXT):
        raise ConfigError(
            f"{key}={value[:20]!r} must be one line of 1 to {LONGEST_TEXT} printable characters"
        )
