"""A directory of transformers: a config.json and safetensors, read as the parameters of a decoder
of ours.

Nothing in it is run: no modelling file, no pickle.
"""

import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffllm.checkpoint.hf.choice import layout_of
from diffllm.checkpoint.hf.configs import model_of
from diffllm.checkpoint.hf.layout import Mapped
from diffllm.checkpoint.hf.own import ARCHITECTURE
from diffllm.core.errors import CheckpointError, ConfigError, DataError, listed
from diffllm.core.files import open_regular, read_json, readable
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.tokenizer_files import FAST, MODEL
from diffllm.model import without_storage
from diffllm.model.config import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = ("F32", "BF16", "F16")


class ModelDirectory:
    """A decoder that transformers has saved; raises CheckpointError for one that is not known here,
    or whose tensors are not those of its config."""

    model: ModelConfig
    """Its shape; seq_len is the longest that it is said to take."""
    architecture: str
    """Its class, by the name in transformers."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with readable(path / CONFIG):
                config = read_json(path / CONFIG, follow=True)  # the hub's cache consists of links
                self.architecture, self.model = model_of(config)
        except (ConfigError, ArithmeticError) as error:
            raise CheckpointError(f"{path / CONFIG} {error}") from error
        self._places = self._placed()
        moe, least = self.model.moe, self.model.n_layers
        if self.architecture != ARCHITECTURE:  # an expert has tensors of its own
            least = max(least, moe.n_experts * (least - moe.n_dense_layers))
        if len(self._places) < least:  # a forged config could describe billions
            raise CheckpointError(
                f"{path} has {len(self._places)} tensors; its {CONFIG} describes at least {least}"
            )
        layout = layout_of(self.model, own=self.architecture == ARCHITECTURE)
        self._made = {tensor.name: tensor for tensor in layout.imported}
        self._check({tensor.name: tensor for tensor in layout.exported})

    def tensor(self, name: str) -> Tensor:
        """Return a parameter of ours, float32; raises CheckpointError where it cannot be read."""
        made = self._made[name]
        try:
            sources = {key: self._places[key].get_tensor(key).float() for key in made.sources}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return made.of(sources)

    @property
    def names(self) -> list[str]:
        """The parameters of ours that it has values for."""
        return list(self._made)

    @cached_property
    def tokenizer(self) -> Path:
        """The file of its tokenizer: the sentencepiece model where it has one that we can read,
        else a fast tokenizer; raises CheckpointError."""
        refused: DataError | None = None
        for name in (MODEL, FAST):
            if (self.path / name).is_file():
                try:
                    pieces = Tokenizer.from_file(self.path / name).vocab_size
                except DataError as error:
                    refused = error
                    continue
                if pieces > self.model.vocab_size:
                    raise CheckpointError(
                        f"{self.path / name} has {pieces:,} pieces, more than the "
                        f"{self.model.vocab_size:,} rows of the embedding"
                    )
                return self.path / name
        raise CheckpointError(str(refused or f"{self.path} has neither {MODEL} nor {FAST}"))

    def _placed(self) -> dict[str, Any]:
        """Open the files; return the one of each tensor by its name there."""
        names = [WEIGHTS]
        if not (self.path / WEIGHTS).exists():
            if not (self.path / INDEX).exists():
                raise CheckpointError(why_no_weights(self.path))
            with readable(self.path / INDEX):
                names = weight_files(read_json(self.path / INDEX, follow=True))
        places: dict[str, Any] = {}
        for name in names:
            with readable(self.path / name):  # safe_open would wait at a FIFO
                open_regular(self.path / name, sys.maxsize, follow=True).close()
            try:
                file = safe_open(self.path / name, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / name} is damaged: {error}") from error
            places |= dict.fromkeys(file.keys(), file)
        return places

    def _check(self, there: Mapping[str, Mapped]) -> None:
        """Raise CheckpointError unless the tensors are just those of the layout."""
        own = without_storage(self.model)
        ours = {**dict(own.named_parameters()), **own.router_state()}
        expected = {name: list(mapped.of(ours).shape) for name, mapped in there.items()}
        tied = {"lm_head.weight"} if self.model.tie_embeddings else set()
        extra = [
            name
            for name in self._places
            if name not in expected and name not in tied and not name.endswith(".inv_freq")
        ]
        missing = [name for name in expected if name not in self._places]
        for what, names in (("lacks", missing), ("has tensors that are not known here:", extra)):
            if names:
                raise CheckpointError(f"{self.path} {what} {listed(names)}")
        for name, shape in expected.items():
            found = self._places[name].get_slice(name)
            if found.get_shape() != shape:
                raise CheckpointError(
                    f"{self.path}: {name} is {found.get_shape()}, and {CONFIG} asks for {shape}"
                )
            if found.get_dtype() not in FLOATS:
                raise CheckpointError(
                    f"{self.path}: {name} is of dtype {found.get_dtype()}, which is none of "
                    f"{', '.join(FLOATS)}"
                )


def weight_files(index: dict[str, Any]) -> list[str]:
    """List the files that an index names; raises ValueError unless they are next to it."""
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError("has no weight_map")
    for name in places.values():
        if not isinstance(name, str) or name != os.path.basename(name):
            raise ValueError(f"has {name!r} in its weight_map, which must be file names")
    return sorted(set(places.values()))


def why_no_weights(path: Path) -> str:
    """Say why there is nothing to read."""
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        return (
            f"{path} has {pickles[0]}, a pickle, which may run code as it is read: save the model "
            "as safetensors"
        )
    return f"{path} has neither {WEIGHTS} nor {INDEX}"


def is_model_directory(path: Path) -> bool:
    return (path / CONFIG).is_file()
