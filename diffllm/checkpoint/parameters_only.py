"""A checkpoint of parameters alone, as an imported model has it: a run can start from it with
`resume=weights:PATH`, and not go on from it."""

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor

from diffllm.checkpoint.directory import path_of
from diffllm.checkpoint.manifest import FORMAT, complete, describe
from diffllm.checkpoint.writer import TensorWriter


def write_parameters(
    directory: Path, tensors: Mapping[str, Tensor], parameters: Iterable[str]
) -> Path:
    """Write the checkpoint of step 0 below `directory`, and return it. Not atomic: a caller writes
    into a directory that is not yet to be seen. Raises OSError, or what DCP does.

    Args:
        tensors: parameters and what routers have learnt, by their names in the decoder; float32.
        parameters: the names of the parameters.
    """
    path = path_of(directory, 0)
    path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(
            {f"model.{name}": tensor for name, tensor in tensors.items()},
            storage_writer=TensorWriter(path),
            no_dist=True,
        )
    shapes = {name: list(tensors[name].shape) for name in parameters}
    state = {"format": FORMAT, "step": 0, "parameters": shapes, "ranks": 1, "loop": None}
    complete(path, 0, json.dumps(state), describe(path.glob("*.distcp")))
    return path
