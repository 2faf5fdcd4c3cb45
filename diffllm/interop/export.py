"""A run's checkpoint as a directory that transformers opens."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diffllm.checkpoint import read_state, step_of
from diffllm.checkpoint.directory import with_checkpoint
from diffllm.checkpoint.hf import Layout, layout_of
from diffllm.checkpoint.hf.safetensors import tensors_of, write_safetensors, writing
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.config.values import OF_WEIGHTS
from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.files import new_directory
from diffllm.core.files.paths import check_absent
from diffllm.core.files.records import read_record, read_summary
from diffllm.data import Tokenizer
from diffllm.data.config import DataConfig, TextConfig
from diffllm.data.tokenizer_files import FAST, MODEL, tokenizer_files, tokenizer_of
from diffllm.interop.card import card_of
from diffllm.interop.fast import fast_tokenizer
from diffllm.interop.settings import model_settings, special_ids, tokenizer_settings
from diffllm.model.config import ModelConfig

MODELLING = Path(__file__).with_name("modeling_diffllm.py")
OWN = "DiffLLMForCausalLM"
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
    carried = layout.architecture == OWN
    config = model_settings(layout, tokenizer) | {"dtype": str(dtype).removeprefix("torch.")}
    if carried:
        shutil.copyfile(MODELLING, directory / MODELLING.name)
        config["transformers_version"] = OLDEST
        config["auto_map"] = {
            "AutoConfig": "modeling_diffllm.DiffLLMConfig",
            "AutoModel": "modeling_diffllm.DiffLLMModel",
            "AutoModelForCausalLM": f"modeling_diffllm.{OWN}",
        }
    write_json(directory / "config.json", config)
    generation = {**special_ids(tokenizer), "do_sample": False}
    write_json(directory / "generation_config.json", generation)
    settings = tokenizer_settings(tokenizer, layout.config["max_position_embeddings"])
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **settings},
    )


def write_card(
    run: Path, checkpoint: Path, directory: Path, name: str, cfg: TrainConfig, layout: Layout
) -> None:
    """Write README.md, of what the run has measured."""
    facts, summary = read_record(run / "run.json") or {}, read_summary(run)
    state = read_state(checkpoint)
    step = state["step"]
    model = {
        "variant": cfg.run.choices["attention"],
        "parameters": sum(math.prod(shape) for shape in state["parameters"].values()),
        "architecture": layout.architecture,
        **origin_or_training(facts.get("imported"), step, cfg),
    }
    ended = summary if summary is not None and summary.get("steps") == step else None
    card = card_of(name, model, facts, ended, layout.architecture == OWN)
    (directory / "README.md").write_text(card)


def origin_or_training(imported: Any, step: int, cfg: TrainConfig) -> dict[str, Any]:
    """Say what a model was trained on; of an imported one, where it comes from."""
    if imported:
        revision = f" at revision {imported['revision']}" if imported.get("revision") else ""
        return {"from": f"{imported.get('from')}{revision}", "changed": imported.get("converted")}
    weights = cfg.resume.removeprefix(OF_WEIGHTS) if cfg.resume.startswith(OF_WEIGHTS) else None
    tokens = step * cfg.global_batch_size * cfg.seq_len
    return {"from": weights, "step": step, "tokens": tokens, "data": data_text(cfg.data)}


def data_text(data: DataConfig) -> str:
    """Name a corpus: hub datasets with their revision, files without their directories."""
    if data.sources:
        return "; ".join(f"{name}: {source_text(of)}" for name, of in data.sources.items())
    return source_text(data)


def source_text(source: TextConfig) -> str:
    """Name one source of text."""
    if source.dataset:
        revision = f" at revision {source.revision}" if source.revision else ""
        return f"{source.dataset}{f' ({source.name})' if source.name else ''}{revision}"
    if source.paths:
        return f"files {', '.join(Path(path).name for path in source.paths[:5])}"
    return str(source.source)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
