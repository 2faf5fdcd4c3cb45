"""The start of a run from weights alone: `resume=weights:PATH`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from diffllm.checkpoint.hf.conversion import TARGETS
from diffllm.checkpoint.manifest import check_parameters, read_state
from diffllm.checkpoint.reader import load_tensors
from diffllm.config import TrainConfig
from diffllm.config.origin import Origin, differences, named_in, origin_of
from diffllm.config.schema import described, is_allowed
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.data import Prepared, Tokenizer
from diffllm.model import without_storage
from diffllm.model.config import InitMatch
from diffllm.model.init import LocalBlock
from diffllm.training.build import Training


def weights_of(cfg: TrainConfig) -> Path | None:
    """Return the checkpoint or Hugging Face directory to start from, after checking its model;
    None unless `resume` asks for weights.

    Raises ConfigError or CheckpointError for weights that do not fit the model.
    """
    path = named_in(cfg.resume)
    if path is None:
        return None
    origin = origin_of(path)
    if cfg.model.init_match is not InitMatch.none:
        raise ConfigError(
            f"model.init_match={cfg.model.init_match.name} scales initial values, which "
            f"resume={cfg.resume} replaces"
        )
    there, here = type(origin.model.attention), type(cfg.model.attention)
    if there is not here:
        own = cfg.run.choices["attention"]
        hint = f"; diffllm import hf={path} attention={own} out=... converts" * (own in TARGETS)
        raise ConfigError(f"{path} has attention={origin.attention}, and the run {own}{hint}")
    checkpoint = origin.checkpoint()
    params = dict(without_storage(cfg.model).named_parameters())
    check_parameters(checkpoint or path, {"parameters": shapes_of(origin, checkpoint)}, params)
    return checkpoint or path


def shapes_of(origin: Origin, checkpoint: Path | None) -> Any:
    """Return the shapes of an origin's parameters by name."""
    if checkpoint:
        return read_state(checkpoint)["parameters"]
    model = without_storage(origin.model)
    return {name: list(param.shape) for name, param in model.named_parameters()}


def check_same_tokens(cfg: TrainConfig, data: Prepared, path: Path) -> None:
    """Raise ConfigError if the data is of another tokenizer than the weights, unless
    run.allow_changes contains `tokenizer`."""
    of_weights = Tokenizer.from_file(origin_of(path).tokenizer).pieces_hash
    if of_weights != data.manifest.pieces_hash and not is_allowed(
        "tokenizer", cfg.run.allow_changes
    ):
        allowed = ",".join([*cfg.run.allow_changes, "tokenizer"])
        raise ConfigError(
            f"the data is of another tokenizer than {path}, so its ids mean other pieces; "
            f"to train all the same: run.allow_changes=[{allowed}]"
        )


def start_from(t: Training, path: Path) -> dict[str, Any]:
    """Load parameters and router state. Every rank must call this.

    Returns "path", "step" (or None) and "differs" for run.json.
    """
    origin = origin_of(path)
    tensors = {**t.params, **t.model.router_state()}
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    if origin.directory is None:
        load_tensors(path, {f"model.{name}": tensor for name, tensor in tensors.items()})
    else:
        copy_directory(t, tensors, origin)
    t.weights.changed()
    changes = differences(origin, t.cfg.model)
    step = read_state(path)["step"] if origin.run else None
    return {"path": str(path), "step": step, "differs": described(changes) if changes else None}


def copy_directory(t: Training, tensors: Mapping[str, Tensor], origin: Origin) -> None:
    """Copy this rank's parts of the parameters of a Hugging Face directory, one after another.

    Tensors that the directory lacks keep their initial values.
    """
    assert origin.directory
    for name in origin.directory.names:
        if name not in tensors:
            raise CheckpointError(f"{origin.path} has {name}, and the model has not")
        copy_block(t.weights.block(tensors[name]), origin.directory.tensor(name))


def copy_block(block: LocalBlock, whole: Tensor) -> None:
    """Copy this rank's block of a whole tensor."""
    local, offset, _ = block
    part = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
    local.copy_(whole[part])
