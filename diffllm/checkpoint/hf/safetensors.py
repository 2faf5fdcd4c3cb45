"""Write the parameters of a checkpoint as safetensors files.

Only the tensors of one output file are in memory at a time.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from diffllm.checkpoint.hf.layout import Mapped, same
from diffllm.checkpoint.manifest import STATE, check_parameters, read_state
from diffllm.checkpoint.reader import failure_reason, load_tensors
from diffllm.core.errors import ConfigError
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.model import ModelConfig, without_storage

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SIZE = re.compile(r"0*[1-9]\d{0,5}[KMGT]B")


def check_form(dtype: str, max_shard_size: str) -> None:
    """Raise ConfigError if `dtype` is not "float32" or "bf16", or if `max_shard_size` is invalid.

    A valid size is a whole number above 0 with the unit KB, MB, GB or TB, such as "500MB".
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} must be {' or '.join(DTYPES)}")
    if not SIZE.fullmatch(max_shard_size):
        raise ConfigError(f"max_shard_size={max_shard_size} must be a size above 0, such as 500MB")


@contextmanager
def writing(name: str) -> Iterator[None]:
    """Raise ConfigError("<name> cannot be written: ...") if the `with` block fails to write."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise ConfigError(f"{name} cannot be written: {failure_reason(error)}") from error


def tensors_of(model: ModelConfig, checkpoint: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a meta tensor for each parameter and MoE router buffer of `model`, by diffllm name.

    Parameters have dtype `dtype`, except those that a module lists in its attribute
    `fp32_parameters`: they stay float32. Raises CheckpointError if `checkpoint` and `model` have
    different parameter names or shapes.
    """
    empty = without_storage(model)
    params = dict(empty.named_parameters())
    check_parameters(checkpoint, read_state(checkpoint), params)
    fp32_only = fp32_parameters(empty)
    tensors = {}
    for name, param in params.items():
        saved_dtype = param.dtype if param in fp32_only else dtype
        tensors[name] = param.detach().to(saved_dtype)
    return {**tensors, **empty.router_state()}


def loaded(checkpoint: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors named in `tensors` from a checkpoint; return CPU tensors by name.

    Floating-point tensors are converted to float32.
    """
    cpu_tensors = {}
    for name, tensor in tensors.items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        cpu_tensors[f"model.{name}"] = torch.empty(tensor.shape, dtype=dtype)
    load_tensors(checkpoint, cpu_tensors, no_dist=True)
    return {name: cpu_tensors[f"model.{name}"] for name in tensors}


def write_safetensors(
    directory: Path,
    stem: str,
    checkpoint: Path,
    tensors: Mapping[str, Tensor],
    max_shard_size: str,
    exported: Sequence[Mapped] | None = None,
) -> int:
    """Write model tensors of `checkpoint` as safetensors; return the total tensor size in bytes.

    If the total size is at most `max_shard_size`, such as "500MB", write the single file
    `<stem>.safetensors`. Otherwise, write several files and an index file.

    Args:
        directory: existing directory for the new files.
        tensors: meta tensors from `tensors_of`, by diffllm name.
        exported: rules that compute the output tensors from the tensors named in `tensors`. If
            None, write the tensors named in `tensors` without changes of names or shapes.
    """
    if exported is None:
        exported = [Mapped(name, (name,), same) for name in tensors]
    rules = {rule.name: rule for rule in exported}
    # Meta tensors: the shapes decide which tensors share a file before any value is read.
    meta_outputs = {name: rule.of(tensors) for name, rule in rules.items()}

    def outputs(names: Sequence[str]) -> dict[str, Tensor]:
        sources = {}
        for name in names:
            for source in rules[name].sources:
                sources[source] = tensors[source]
        source_values = loaded(checkpoint, sources)
        values = {}
        for name in names:
            # Rules compute in float32; only their results are rounded.
            values[name] = rules[name].of(source_values).to(meta_outputs[name].dtype)
        return values

    # huggingface_hub formats the pattern, so braces of the stem are escaped.
    escaped_stem = stem.replace("{", "{{").replace("}", "}}")
    split = split_torch_state_dict_into_shards(
        meta_outputs,
        filename_pattern=escaped_stem + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        save_file(outputs(names), directory / file, {"format": "pt"})
        # save_file makes files that only the owner can read.
        shutil.copymode(checkpoint / STATE, directory / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / f"{stem}.safetensors.index.json").write_text(
            json.dumps(index, indent=2), encoding="utf-8"
        )
    return int(split.metadata["total_size"])
