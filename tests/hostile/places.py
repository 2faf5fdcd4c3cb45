"""Directories with valid files, which tests copy and damage."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from runs.command import documents
from runs.one_rank import gloo_group, trained_run, write_checkpoint
from runs.written import write_run, write_train_seconds
from safetensors.torch import load_file, save_file

from diffllm.checkpoint.hf.config_json import VALUE_TYPES, model_of
from diffllm.checkpoint.hf.layout import layout_of
from diffllm.config import load_config
from diffllm.data.config import DataConfig, Packing, SampleBy
from diffllm.data.preparation.prepare import prepare
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.sequences import PackedSequences, training_sequences
from diffllm.evaluation.evaluation import store_result
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.model import without_storage

FACTS = {"plugin_code": {"mine": "1"}, "diffllm": {"dirty": 1}}
METRICS = {"step": 2, "tokens": 128, "train/loss": 5.0, "x": None}
CHANGE = {"step": 3, "changes": {"log_interval": [1, 2]}}
EVENT = {
    "kind": "loss_spike", "step": 7, "tokens": 448, "definition": "spikes", "value": 5.5,
    "height": 9.1, "lr": 1e-3, "detail": "", "batch": {
        "tokens_hash": "9da6", "seed": 0, "stage": 0, "seq_len": 32, "packing": "stream",
        "samples": {"corpus": [48, 56]},
    },
}  # fmt: skip
KEY = {"evaluation": "own"}
RESULT = {
    "key": KEY, "unit": "share of right answers",
    "scores": [{"of": "a", "value": 1 / 3, "interval": [0.1, 0.9], "by_place": {"0": 0.5}}],
}  # fmt: skip
COUNTS = np.arange(1, 9)
LOSSES = DocumentLosses(COUNTS / 3, COUNTS, COUNTS * 2, COUNTS * 3, COUNTS * 0)
SWEEP = {"keys": ["seed"], "runs": {"seed0": ["seed=0"]}, "jobs": {"seed0": "17"}}
STUDY = {
    "claim": "a", "base": ["model=tiny", "steps=20"], "baseline": "a", "seeds": [0, 1, 2],
    "arms": {"a": ["attention=standard"], "b": ["attention=diff_v2"]},
    "rule": {"kind": "difference", "arm": "b", "against": "a", "below": 0.0},
    "lr": {"grid": [0.001, 0.002], "seeds": [7]}, "power": {"sd": 0.1, "gap": 0.2},
}  # fmt: skip
RECIPE = {
    "sources": {"code": {"source": "files", "paths": ["a.txt"], "weight": 1.5}},
    "curriculum": [{"until": 0.5, "weights": {"code": 1.0}}],
}
TASK = {"prompt": "a", "answer": "b", "candidates": ["b", "c"], "level": {"kind": "x", "n": 1}}
MODEL = (
    "model=tiny", "model.dim=32", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=16",
    "model.ffn_dim=64", "model.vocab_size=300", "model.n_layers=2",
)  # fmt: skip
YARN = ("model.rope.scaling=yarn", "model.rope.factor=4", "model.rope.original_seq_len=64")
MIXTURE = (
    "model.qk_norm=true", "model.moe.n_experts=2", "model.moe.top_k=1", "model.moe.expert_dim=16",
    "model.moe.score=softmax", "model.moe.bias_update_rate=0",
)  # fmt: skip


def write_records(place: Path) -> None:
    """Write the records and results of a run without checkpoints."""
    write_run(place, "attention=diff_v2", lines=[METRICS], facts=FACTS)
    (place / "changes.jsonl").write_text(json.dumps(CHANGE) + "\n", encoding="utf-8")
    (place / "events.jsonl").write_text(f"{json.dumps(EVENT)}\n" * 2, encoding="utf-8")
    write_train_seconds(place, [0.5, 0.25])
    file = place / "evaluation" / "step-00000004" / "own.jsonl"
    store_result(file, RESULT, [{"level": 0, "correct": i == 1} for i in range(3)])
    LOSSES.save(place, 4)


def write_inputs(place: Path) -> None:
    """Write the files that users share: a study, a recipe and a task."""
    for name, value in (("study.yaml", STUDY), ("recipe.yaml", RECIPE), ("task.jsonl", TASK)):
        (place / name).write_text(json.dumps(value), encoding="utf-8")


def write_sweep(place: Path) -> None:
    (place / "sweep.json").write_text(json.dumps(SWEEP), encoding="utf-8")


def write_checkpoints(place: Path) -> None:
    """Write a checkpoint of step 1 without tensors, and a complete checkpoint of step 3."""
    with gloo_group():
        trained_run(place, ["attention=standard"])
    write_checkpoint(place / "checkpoints", 1)


def cache_config(place: Path) -> DataConfig:
    return DataConfig(
        **{"source": "files", "paths": [str(place / "t.txt")], "sample_by": SampleBy.line},
        **{"vocab_size": 300, "heldout_fraction": 0.3},
        packing=Packing.best_fit,
        cache_dir=str(place / "cache"),
    )


def read_cache(place: Path) -> list[list[int]]:
    """Prepare the corpus; return its first sequence and a held-out token; load the tokenizer."""
    cfg = cache_config(place)
    data = prepare(cfg)
    data.tokenizer()
    sequences = training_sequences(data, cfg, 32)
    assert isinstance(sequences, PackedSequences)
    return [list(sequences.plan[0]), data.split("heldout").tokens(0, 1).tolist()]


def write_cache(place: Path) -> None:
    """Write a corpus and a cache that contains every kind of file."""
    (place / "t.txt").write_text("\n".join(documents(60)) + "\n", encoding="utf-8")
    read_cache(place)


def write_interrupted(place: Path) -> None:
    """Write a corpus and the cache of a preparation that ended before its last step."""
    (place / "t.txt").write_text("\n".join(documents(60)) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokensJob, "join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(cache_config(place))


def write_imported(place: Path) -> None:
    """Write token files of Megatron and datatrove."""
    files = Path(__file__).parents[1] / "data_files" / "imported"
    shutil.copytree(files, place, dirs_exist_ok=True)


NO_END = '{"model": {"type": "BPE", "unk_token": null, "vocab": {"a": 0, "b": 1}, "merges": []}}'
"""A tokenizer.json without a special token."""


def write_tokenizer(place: Path) -> None:
    """Write a tokenizer.json with its config."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    bpe.add_special_tokens(["<end>"])
    bpe.save(str(place / "tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}}
    (place / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_model(place: Path, *words: str) -> None:
    """Write a model directory of transformers with tensors of ones."""
    layout = layout_of(load_config([*MODEL, *words]).model)
    content = {"architectures": [layout.architecture], **layout.config}
    for _, keys in VALUE_TYPES.values():
        for key in keys:
            content.setdefault(key, None)  # so that drawn edits also set absent keys
    (place / "config.json").write_text(json.dumps(content), encoding="utf-8")
    parameters = dict(without_storage(model_of(content)[1]).named_parameters())
    tensors = {t.name: torch.ones(t.of(parameters).shape) for t in layout.exported}
    save_file(tensors, place / "model.safetensors")


def write_sharded_model(place: Path) -> None:
    """Write a model directory with an index of its tensors."""
    write_model(place, "attention=standard")
    shard = (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(load_file(shard), shard.name)
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


PLACES = {
    "run": write_records,
    "inputs": write_inputs,
    "sweep": write_sweep,
    "checkpoint": write_checkpoints,
    "cache": write_cache,
    "interrupted": write_interrupted,
    "imported": write_imported,
    "tokenizer": write_tokenizer,
    "llama": lambda place: write_model(place, "attention=standard", *YARN),
    "qwen3_moe": lambda place: write_model(place, "attention=standard", *MIXTURE),
    "differential": lambda place: write_model(place, "attention=diff_v2"),
    "sharded": write_sharded_model,
}
"""Functions that write the valid files of a directory, by its name in the tables."""
