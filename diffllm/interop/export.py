"""A run's checkpoint as a directory that transformers opens."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diffllm.checkpoint.directory import step_of, with_checkpoint
from diffllm.checkpoint.hf import Layout, layout_of
from diffllm.checkpoint.hf.own import ARCHITECTURE
from diffllm.checkpoint.hf.safetensors import tensors_of, write_safetensors, writing
from diffllm.config.saved import load_run_config
from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.files import check_absent, new_directory
from diffllm.data import Tokenizer
from diffllm.data.tokenizer_files import FAST, MODEL, tokenizer_files, tokenizer_of
from diffllm.interop.card import write_card
from diffllm.interop.fast import fast_tokenizer
from diffllm.model.config import ModelConfig

MODELLING = Path(__file__).with_name("modeling_diffllm.py")
OLDEST = "5.4.0"
"""Oldest version of transformers that our modelling file works in."""


def export(
    run: Path, out: Path, step: int, dtype: torch.dtype, shard_size: str, own: bool
) -> tuple[Layout, int]:
    """Write a checkpoint of a run into a new directory; return its layout and step.

    It is there whole or not at all. Raises CheckpointError, ConfigError, or DataError for a
    tokenizer that no fast one equals.

    Args:
        step: the checkpoint's; 0 is the newest whole one.
        shard_size: most bytes of a file, as in 500MB.
        own: whether our own modelling file is wanted even where another fits.
    """
    cfg = load_run_config(run)
    layout = layout_of(cfg.model, own)
    check_absent(out, "out")

    def write(checkpoint: Path) -> int:
        with writing(f"out={out}"), new_directory(out) as hidden:
            ours = tensors_of(cfg.model, checkpoint, dtype)
            write_safetensors(hidden, "model", checkpoint, ours, shard_size, layout.exported)
            tokenizer = write_tokenizer(run, hidden, cfg.model)
            write_configs(hidden, layout, tokenizer, dtype)
            write_card(run, checkpoint, hidden, out.name, cfg, layout)
        return step_of(checkpoint)

    return layout, with_checkpoint(run, step, write)


def write_tokenizer(run: Path, directory: Path, model: ModelConfig) -> Tokenizer:
    """Write the run's tokenizer, as a fast one and as it is; return it."""
    path = tokenizer_of(run)
    try:
        tokenizer = Tokenizer.from_file(path)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{path} has {tokenizer.vocab_size} pieces, more than model.vocab_size="
            f"{model.vocab_size}"
        )
    for name, content in tokenizer_files(path).items():
        (directory / name).write_bytes(content)
    if path.name == MODEL:
        (directory / FAST).write_text(fast_tokenizer(path).to_str())
    return tokenizer


def write_configs(
    directory: Path, layout: Layout, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Write config.json, generation_config.json, tokenizer_config.json, and our modelling file."""
    carried = layout.architecture == ARCHITECTURE
    config = model_settings(layout, tokenizer) | {"dtype": str(dtype).removeprefix("torch.")}
    if carried:
        shutil.copyfile(MODELLING, directory / MODELLING.name)
        config["transformers_version"] = OLDEST
        config["auto_map"] = {
            "AutoConfig": "modeling_diffllm.DiffLLMConfig",
            "AutoModel": "modeling_diffllm.DiffLLMModel",
            "AutoModelForCausalLM": f"modeling_diffllm.{ARCHITECTURE}",
        }
    write_json(directory / "config.json", config)
    generation = {**special_ids(tokenizer), "do_sample": False}
    write_json(directory / "generation_config.json", generation)
    settings = tokenizer_settings(tokenizer, layout.config["max_position_embeddings"])
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **settings},
    )


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids of special tokens: a document's end is all that there is, and pads, too."""
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.eos_id,
    }


def model_settings(layout: Layout, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of config.json but for the dtype and what finds our modelling file."""
    return {
        "architectures": [layout.architecture],
        **layout.config,
        **special_ids(tokenizer),
        "use_cache": True,
    }


def tokenizer_settings(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    """Return the arguments of a fast tokenizer.

    Args:
        length: most tokens that the model takes.
    """
    return {
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_max_length": length,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
