"""Save and restore the state of the training loop, and decide whether a run may resume."""

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.checkpoint.manifest import read_state, tokens_of
from diffllm.checkpoint.run_checkpoints import check_checkpoint, find_checkpoint, newest_good
from diffllm.config import TrainConfig
from diffllm.config.changes import Changes, changes_text, is_within
from diffllm.config.origin import named_in, path_and_step
from diffllm.config.saved import load_run_config
from diffllm.config.words import printed_override
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import similar_path
from diffllm.core.run_files import (
    RunFile,
    RunFolder,
    list_checkpoints,
    read_record,
    read_summary,
    step_of,
)
from diffllm.data.prepared import Prepared
from diffllm.data.samples import Samples, training_samples
from diffllm.distributed.launcher import MKL_MODE
from diffllm.metrics.spikes import SpikeMonitor
from diffllm.metrics.visible_keys import VisibleKeys
from diffllm.model.auto_setting import AutoSetting
from diffllm.training.build import Training, agreed_compile
from diffllm.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from diffllm.checkpoint.writer import Checkpointer


@dataclass
class LoopState:
    """The state of a training loop except tensors; stored as JSON in checkpoints."""

    step: int = 0
    data: dict[str, int] = field(default_factory=dict)
    """State of the training loader; {} at the beginning of the data."""
    order: dict[str, Any] = field(default_factory=dict)
    """Settings that determine which samples each step reads."""
    spikes: SpikeMonitor = field(default_factory=SpikeMonitor)
    wandb_id: str | None = None
    seconds: float = 0.0
    """Training time of the run so far."""
    train_seconds: float = 0.0
    """Part of `seconds` outside of evaluations and saves."""
    compiled: bool | None = None
    """Whether torch.compile is used; None if not decided yet."""
    stage: int = 0
    """Number of earlier stages, whose tensors `resume=stage:` carried over."""
    mkl_mode: str = field(default_factory=lambda: os.environ.get(MKL_MODE, ""))
    """Value of the environment variable MKL_CBWR."""
    visible_keys: VisibleKeys = field(default_factory=VisibleKeys)
    tokens: int = 0
    """Training tokens of all steps so far. The batch may change at a resume."""
    training_flops: float | None = 0.0
    """Training FLOPs of the steps before the last `Record.write`.

    None in the checkpoint of an older version, until `Record` estimates them.
    """

    def state_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "spikes": self.spikes.state_dict(),
            "visible_keys": asdict(self.visible_keys),
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> "LoopState":
        spikes = SpikeMonitor()
        spikes.load_state_dict(values["spikes"])
        # Checkpoints of older versions lack some of these entries.
        converted = {
            "spikes": spikes,
            "visible_keys": VisibleKeys.of(values.get("visible_keys", {})),
            "stage": values.get("stage", 0),
            "train_seconds": values.get("train_seconds", values["seconds"]),
            "tokens": tokens_of(values),
            "training_flops": values.get("training_flops"),
        }
        unconverted = {}
        for entry in fields(cls):
            if entry.name not in converted:
                unconverted[entry.name] = values[entry.name]
        return cls(**unconverted, **converted)


def decide_compile(cfg: TrainConfig, device: torch.device, state: LoopState) -> AutoSetting:
    """Return the result of `agreed_compile`, and record it in `state`. Every rank must call this.

    Without the key `compile`, a recorded choice stays in `state`: the compiler may be missing only
    on this machine.
    """
    choice = agreed_compile(cfg, device, state.compiled)
    if cfg.compile is not None or state.compiled is None:
        state.compiled = choice.value
    return choice


def samples_of(cfg: TrainConfig, data: Prepared, stage: int = 0) -> Samples:
    """Return the training samples; each stage reads them in another random order."""
    total = cfg.steps * cfg.global_batch_size
    return training_samples(data, cfg.data, cfg.seq_len, cfg.seed, total, stage)


def save(t: Training, state: LoopState, checkpointer: "Checkpointer", final: bool = False) -> None:
    """Start to save a checkpoint in the background; `final` marks the last save of a run.

    Every rank must call this.
    """
    rng = rng_tensors(t.device)
    shapes = {name: list(param.shape) for name, param in t.params.items()}
    meta = {"parameters": shapes, "ranks": dist.get_world_size(), "loop": state.state_dict()}
    checkpointer.save(state.step, {**t.tensors(), **rng}, meta, final)


def restore(t: Training, state: LoopState, path: Path, ranks: int) -> None:
    """Load parameters, optimizer state and random generator states from a checkpoint.

    `path` is the checkpoint, `state` its loop state, and `ranks` its world size. If this run has
    more ranks, the additional ranks keep their current random generator states. Raises
    CheckpointError if the checkpoint cannot be read.
    """
    from diffllm.checkpoint.reader import load_tensors  # A slow import: loads DCP.

    rng = rng_tensors(t.device) if dist.get_rank() < ranks else {}
    load_tensors(path, {**t.tensors(), **rng})
    t.weights.changed()
    t.guard.load(*state.spikes.windows())
    try:
        for name, value in rng.items():
            if name.startswith("rng.cuda"):
                torch.cuda.set_rng_state(value, t.device)
            else:
                torch.set_rng_state(value)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} has no valid random generator state: {error}; resume another checkpoint"
        ) from error


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this rank's random generators by name, as uint8 tensors."""
    rng = {f"rng.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        rng[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state(device)
    return rng


def continuation(
    cfg: TrainConfig, directory: RunDirectory
) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the checkpoint to resume from, and the content of its state.json.

    Return (None, None) if the run must begin at step 0. Raises ConfigError if the step of the
    checkpoint exceeds `cfg.steps`, and CheckpointError if checkpoints are missing or damaged.
    """
    run = directory.path
    saved_resume = None
    if directory.config_file.is_file():
        saved_resume = load_run_config(run).resume
    checkpoint = resume_checkpoint(cfg, directory.checkpoints, saved_resume)
    if checkpoint is None:
        # An empty checkpoints/ may be a disk that is not mounted.
        record = read_record(run / RunFile.SAVED) or read_summary(run)
        if record:
            step = record.get("step", record.get("steps"))
            raise CheckpointError(
                f"{run} saved a checkpoint at step {step}, but "
                f"{run / RunFolder.CHECKPOINTS} contains no checkpoint; mount the missing disk, "
                "or set resume= to another checkpoint; to start again, choose another run.name or "
                f"delete {run}"
            )
        return None, None  # The run is new, or was killed before its first checkpoint.
    saved = read_state(checkpoint)
    if saved["loop"] is None:
        weights = printed_override("resume", f"weights:{checkpoint}")
        raise CheckpointError(
            f"{checkpoint} contains only parameters; to start from these parameters, set {weights}"
        )
    step = step_of(checkpoint)
    if step > cfg.steps:
        raise ConfigError(f"steps={cfg.steps} must be at least {step}, the step of {checkpoint}")
    return checkpoint, saved


def resume_checkpoint(
    cfg: TrainConfig, checkpoints: list[Path], saved_resume: str | None = None
) -> Path | None:
    """Return the newest undamaged checkpoint to resume from; None if the run must begin at step 0.

    If the run has no checkpoint and `cfg.resume` is PATH[@STEP], use the checkpoint or run at this
    path. Raises ConfigError if this path is in the run, but is not its newest checkpoint, and
    CheckpointError if all checkpoints are damaged or if this path contains no checkpoint.

    Args:
        checkpoints: checkpoints in the run directory, oldest first.
        saved_resume: value of `resume` at the last start of the run; None in a new run.
    """
    if cfg.resume == "never":
        return None
    if cfg.resume == "auto" or named_in(cfg.resume):
        return newest_good(checkpoints)
    path, step = path_and_step(cfg.resume, "resume")
    if checkpoints:
        newest = newest_good(checkpoints)
        # A requeued job repeats its first command. PATH is then another run, or a checkpoint of
        # this run that was the newest one at the first start.
        if newest and cfg.resume != saved_resume:
            check_newest(cfg.resume, path, step, newest)
        return newest
    if not path.exists():
        advice = similar_path(path, os.path.isdir)
        if not advice:
            advice = "; choose auto, never, weights:PATH, stage:PATH or the path of a checkpoint"
        raise CheckpointError(f"resume={cfg.resume} does not exist{advice}")
    if step:
        return find_checkpoint(path.parent if list_checkpoints(path) else path, step)
    # PATH is a run, a directory of checkpoints or a checkpoint.
    other_checkpoints = list_checkpoints(path / RunFolder.CHECKPOINTS) or list_checkpoints(path)
    if other_checkpoints:
        return newest_good(other_checkpoints)
    check_checkpoint(path)
    return path


def check_newest(resume: str, path: Path, step: int, newest: Path) -> None:
    """Raise ConfigError if `path` and `step` choose anything else in this run than `newest`.

    Args:
        resume: value of the config key, for the message.
        path: path in `resume`, a run or a checkpoint.
        step: step in `resume`; 0 if none.
        newest: newest undamaged checkpoint of this run.
    """
    chosen = path.resolve()
    directory = newest.parent.resolve()
    steps = {saved.resolve(): step_of(saved) for saved in list_checkpoints(directory)}
    if chosen in steps and not step:
        step = steps[chosen]
    elif chosen not in (newest.parent.parent.resolve(), directory):
        if chosen.is_relative_to(directory):
            raise ConfigError(
                f"resume={resume} is not a checkpoint of this run; "
                f"resume=auto chooses the newest checkpoint, {newest}"
            )
        return  # PATH is another run.
    if step not in (0, step_of(newest)):
        raise ConfigError(
            f"resume={resume} is not the newest checkpoint of this run (step {step_of(newest)}); "
            "delete newer checkpoints, or set another run.name"
        )


def corpus_of(saved: dict[str, Any]) -> str | None:
    """Return the corpus hash in the state.json `saved`, or None if `saved` has no valid hash."""
    try:
        corpus = saved["loop"]["order"]["corpus"]
    except (KeyError, TypeError):
        return None  # `continued` raises the error.
    return corpus if isinstance(corpus, str) else None


def continued(
    path: Path, saved: dict[str, Any], order: dict[str, Any], allowed: list[str], rule: str = ""
) -> tuple[LoopState, Changes]:
    """Return the loop state in a checkpoint, and the changed settings of the data order.

    Args:
        path: checkpoint directory, named in errors.
        saved: content of the checkpoint's state.json.
        order: settings of this run that decide which samples each step reads.
        allowed: names of settings that may have changed since the checkpoint.
        rule: explanation of a changed corpus, see `rule_text`; "" if none.

    Raises CheckpointError if a setting not in `allowed` has changed, or if `saved` lacks a key.
    """
    try:
        state = LoopState.of(saved["loop"])
        former_order = {key: state.order.get(key) for key in order}
        for key in ("corpus", "tokenizer"):
            if former_order.get(key) != order.get(key):
                # Report only the cause: a new corpus always has new tokens.
                former_order["tokens"] = order.get("tokens")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a valid checkpoint: state.json has missing or invalid entries "
            f"({error}); resume another checkpoint"
        ) from error
    changes = {}
    for key, value in order.items():
        if former_order[key] != value:
            changes[key] = (former_order[key], value)
    refused = [key for key in changes if not is_within(key, allowed)]
    if refused:
        explanation = rule if "corpus" in refused else ""
        raise CheckpointError(
            f"{path} was saved with a different data order ({changes_text(changes)}){explanation}; "
            "to resume with the new order, set "
            f"run.allow_changes=[{','.join([*allowed, *refused])}]"
        )
    # The loader counts samples, so its position stays valid with another batch size.
    if changes.keys() - {"global_batch_size"}:
        state.data = {}
    state.order = order
    return state, changes
