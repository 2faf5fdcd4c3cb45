"""The checkpoint or model directory of resume=weights:PATH or resume=stage:PATH."""

import shlex
from pathlib import Path

from diffllm.checkpoint.hf.conversion import TARGET_VARIANTS
from diffllm.checkpoint.manifest import check_parameters, read_state
from diffllm.config import TrainConfig
from diffllm.config.changes import changes_text, is_fixed_in_stage, is_within
from diffllm.config.origin import Origin, named_in, origin_of
from diffllm.config.run_config import CARRIED_PREFIXES
from diffllm.config.saved import changes_to
from diffllm.config.words import printed_override
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.data.prepared import Prepared
from diffllm.data.tokenizer import Tokenizer
from diffllm.model import without_storage
from diffllm.model.config import InitMatch


def starting_point(cfg: TrainConfig) -> Path | None:
    """Return the checkpoint or model directory for `resume=weights:PATH` or `resume=stage:PATH`.

    Return None for other values of `cfg.resume`. Raises ConfigError or CheckpointError if the
    tensors do not match the model, or if a stage has another variant or no optimizer state.
    """
    named = named_in(cfg.resume)
    if named is None:
        return None
    path = named.path
    if cfg.model.init_match is not InitMatch.none:
        raise ConfigError(
            f"model.init_match={cfg.model.init_match.name} scales only initial parameters, but "
            f"resume={cfg.resume} loads trained parameters; set model.init_match=none"
        )
    origin = origin_of(path, named.step)
    if type(origin.model.attention) is not type(cfg.model.attention):
        variant = cfg.resolved.choices["attention"]
        hint = f"set attention={origin.attention}"
        if variant in TARGET_VARIANTS:
            convert = shlex.join(["diffllm", "import", f"hf={path}", f"attention={variant}"])
            hint = f"to convert: {convert} out=..."
        raise ConfigError(
            f"{path} has attention={origin.attention}, but the run has attention={variant}; {hint}"
        )
    checkpoint = origin.checkpoint()
    if named.kind == "stage":
        check_stage(cfg, origin, checkpoint)
    if checkpoint:
        state = read_state(checkpoint)
    else:
        # A Hugging Face directory has no state.json: its config.json determines the shapes.
        params = without_storage(origin.model).named_parameters()
        state = {"parameters": {name: list(param.shape) for name, param in params}}
    place = checkpoint or path
    check_parameters(place, state, dict(without_storage(cfg.model).named_parameters()))
    return place


def check_stage(cfg: TrainConfig, origin: Origin, checkpoint: Path | None) -> None:
    """Raise an error if `origin` cannot be the previous stage of a run with the config `cfg`.

    Its `checkpoint` must contain the state of optimizer and loop, and both models must have equal
    settings of the kind that `is_fixed_in_stage` selects.
    """
    weights = printed_override("resume", f"weights:{origin.path}")
    # A checkpoint without the state of the loop, such as an imported model, has no optimizer state.
    if checkpoint is None or read_state(checkpoint)["loop"] is None:
        raise CheckpointError(
            f"{origin.path} has no optimizer state, which a stage needs; to start from the "
            f"parameters alone, set {weights}"
        )
    changes = changes_to(origin.model, cfg.model, is_fixed_in_stage)
    if changes:
        model_changes = {f"model.{key}": pair for key, pair in changes.items()}
        text = changes_text(model_changes, "the previous stage")
        raise ConfigError(
            f"{text}; of the model, a stage can change only seq_len, model.rope and the balance of "
            f"experts; remove these overrides, or set {weights}"
        )


def check_same_tokens(cfg: TrainConfig, data: Prepared, path: Path) -> None:
    """Raise ConfigError if `data` and the weights in `path` have different tokenizers.

    Different tokenizers are allowed if `cfg.run.allow_changes` contains `tokenizer`, but not in a
    new stage.
    """
    named = named_in(cfg.resume)
    is_stage = named is not None and named.kind == "stage"
    if is_within("tokenizer", cfg.run.allow_changes) and not is_stage:
        return
    if Tokenizer.from_file(origin_of(path).tokenizer).pieces_hash != data.manifest.pieces_hash:
        other_fix = ""
        if not is_stage:
            allowed = ",".join([*cfg.run.allow_changes, "tokenizer"])
            other_fix = f", or set run.allow_changes=[{allowed}]"
        raise ConfigError(
            f"the data has a different tokenizer than {path}; set data.tokenizer to the "
            f"tokenizer of these weights{other_fix}"
        )


def carried(cfg: TrainConfig) -> tuple[str, ...]:
    """Return the prefixes of the tensors that this run takes over from another model."""
    named = named_in(cfg.resume)
    return CARRIED_PREFIXES[named.kind] if named else ()


def previous_stage(cfg: TrainConfig, origin: Path | None) -> Path | None:
    """Return `origin` if this is the checkpoint of resume=stage:PATH, else None."""
    return origin if carried(cfg) == CARRIED_PREFIXES["stage"] else None
