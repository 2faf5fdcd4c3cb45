"""Read a decoder from a Hugging Face model directory.

Supported model classes: Llama, Qwen3, Qwen3Moe and DiffLlama of transformers, and the DiffLLM class
in modeling_diffllm.py. Code and pickles in the directory are never executed.
"""

import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffllm.checkpoint.hf.config_json import model_of
from diffllm.checkpoint.hf.layout import ARCHITECTURE, Mapped, layout_of
from diffllm.core.errors import CheckpointError, ConfigError, DataError, listed
from diffllm.core.files import open_regular, read_json, readable
from diffllm.data.tokenizer import FAST, MODEL, Tokenizer
from diffllm.model import without_storage

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")


class ModelDirectory:
    """Model config, parameters and tokenizer of a decoder in a Hugging Face model directory.

    The constructor raises CheckpointError for an unsupported model class, and for tensors that do
    not match config.json.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with readable(path / CONFIG):
                # Follow links: files in the hub's cache are links.
                config = read_json(path / CONFIG, follow=True)
                self.architecture, self.model = model_of(config)
        except (ConfigError, ArithmeticError) as error:
            raise CheckpointError(f"{path / CONFIG} describes an invalid model: {error}") from error
        self._files = self._opened_files()
        # Before a layout of the model is built: a forged config could describe billions of tensors.
        n_layers = self.model.n_layers
        minimum = n_layers
        if self.architecture != ARCHITECTURE:
            # Each expert has separate tensors.
            moe = self.model.moe
            minimum = max(n_layers, moe.n_experts * (n_layers - moe.n_dense_layers))
        if len(self._files) < minimum:
            raise CheckpointError(
                f"{path} has {len(self._files)} tensors, but config.json needs at least {minimum}; "
                "use config.json and all weight files of the same model"
            )
        layout = layout_of(self.model, only_own=self.architecture == ARCHITECTURE)
        self._imported = {rule.name: rule for rule in layout.imported}
        self._check({rule.name: rule for rule in layout.exported})

    def tensor(self, name: str) -> Tensor:
        """Return the parameter with the diffllm name `name`, in float32."""
        rule = self._imported[name]
        try:
            sources = {key: self._files[key].get_tensor(key).float() for key in rule.sources}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return rule.of(sources)

    @property
    def names(self) -> list[str]:
        return list(self._imported)

    @cached_property
    def tokenizer(self) -> Path:
        """Return the path of the tokenizer file: tokenizer.model, or tokenizer.json as a fallback.

        Raises CheckpointError if neither file can be read, or if the vocabulary of the tokenizer is
        larger than the vocabulary of the model.
        """
        problem = f"{self.path} has neither {MODEL} nor {FAST}"
        limit = self.model.vocab_size
        for file in (self.path / MODEL, self.path / FAST):
            if not file.is_file():
                continue
            try:
                n_tokens = Tokenizer.from_file(file).vocab_size
            except DataError as error:
                problem = str(error)
                continue
            if n_tokens > limit:
                raise CheckpointError(
                    f"the tokenizer {file} has {n_tokens:,} tokens, but vocab_size in config.json "
                    f"is {limit:,}; use a tokenizer with at most {limit:,} tokens"
                )
            return file
        raise CheckpointError(problem)

    def _opened_files(self) -> dict[str, Any]:
        """Open the safetensors files; return a dict from tensor name to open file."""
        opened: dict[str, Any] = {}
        for name in self._file_names():
            path = self.path / name
            # Refuse a FIFO, at which safe_open would wait.
            with readable(path):
                open_regular(path, sys.maxsize, follow=True).close()
            try:
                file = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} is damaged: {error}; download or copy the file again"
                ) from error
            opened |= dict.fromkeys(file.keys(), file)
        return opened

    def _file_names(self) -> list[str]:
        """Return the names of the safetensors files: a single file, or those in the index."""
        if (self.path / WEIGHTS).exists():
            return [WEIGHTS]
        index = self.path / INDEX
        if not index.exists():
            raise CheckpointError(
                f"{self.path} has neither {WEIGHTS} nor {INDEX}; save the model as safetensors"
            )
        with readable(index):
            files = read_json(index, follow=True).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise ValueError("has no weight_map")
            # A forged index could name a file outside of the directory.
            for name in files.values():
                if not isinstance(name, str) or name != os.path.basename(name):
                    raise ValueError(f"has {name!r} in its weight_map: not a file name")
        return sorted(set(files.values()))

    def _check(self, exported: Mapping[str, Mapped]) -> None:
        """Raise CheckpointError if a tensor is missing, is unknown, or has a wrong shape or dtype.

        `exported` defines the name and the shape of each expected tensor. Allowed dtypes are
        float32, bfloat16 and float16.
        """
        model = without_storage(self.model)
        # Meta tensors: only their shapes are used.
        tensors = {**dict(model.named_parameters()), **model.router_state()}
        shapes = {name: list(rule.of(tensors).shape) for name, rule in exported.items()}
        allowed = set(shapes)
        if self.model.tie_embeddings:
            # Some files contain the tied matrix twice.
            allowed.add("lm_head.weight")
        unknown = []
        for name in self._files:
            # Older versions of transformers saved the frequencies of RoPE.
            if name not in allowed and not name.endswith(".inv_freq"):
                unknown.append(name)
        missing = [name for name in shapes if name not in self._files]
        if missing:
            raise CheckpointError(f"{self.path} lacks tensors: {listed(missing)}")
        if unknown:
            raise CheckpointError(f"{self.path} has unknown tensors: {listed(unknown)}")
        for name, shape in shapes.items():
            # A slice has the shape and dtype, and does not read the values.
            tensor = self._files[name].get_slice(name)
            if tensor.get_shape() != shape or tensor.get_dtype() not in FLOATS:
                dtype_and_shape = f"{tensor.get_dtype()} {tensor.get_shape()}"
                raise CheckpointError(
                    f"the tensor {name} in {self.path} is {dtype_and_shape}, but must be "
                    f"{' or '.join(FLOATS)} {shape}; "
                    "use weights that match config.json and are not quantized"
                )
