"""Runs with data of their own and weights as they are drawn, and their checkpoints, opened."""

import json
import random
import shutil
from pathlib import Path

import torch
from omegaconf import OmegaConf

from diffllm import build_model, load_config
from diffllm.checkpoint.parameters_only import write_parameters
from diffllm.cli.evaluate import opened
from diffllm.config import TrainConfig
from diffllm.data import TokenData, prepare
from diffllm.data.tokenizer_files import tokenizer_in
from diffllm.evaluation.evaluation import Subject


def write_corpus(directory: Path, documents: int = 120) -> Path:
    """Documents that repeat words, from a few to a few hundred tokens long."""
    rng = random.Random(0)
    path = directory / "corpus.jsonl"
    with open(path, "w") as file:
        for i in range(documents):
            words = ["".join(rng.choices("abcdefgh", k=3)) for _ in range(4)]
            text = " ".join(rng.choices(words, k=3 + i % 40))
            file.write(json.dumps({"text": f"{i} {text}\n"}) + "\n")
    return path


def data_words(directory: Path) -> list[str]:
    """Write a corpus; return the overrides of a run on it."""
    return [
        "data=files",
        f"data.paths=[{write_corpus(directory)}]",
        f"data.cache_dir={directory / 'cache'}",
        "data.vocab_size=300",
        "data.heldout_fraction=0.2",
    ]


def made(run: Path, *words: str) -> tuple[TrainConfig, TokenData]:
    """Make a run that has not been trained; weights are large, so that no two tokens are alike."""
    sizes = ("model=tiny", "model.vocab_size=320", "model.init_std=0.2", "run.name=x")
    cfg = load_config([*sizes, *words])
    data = prepare(cfg.data)
    assert isinstance(data, TokenData)
    model = build_model(cfg.model)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    facts = {"corpus": data.manifest.corpus, "tokenizer": data.manifest.pieces_hash}
    (run / "run.json").write_text(json.dumps(facts))
    shutil.copy(tokenizer_in(data.directory), run)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    learnt = {**tensors, **model.router_state()}
    write_parameters(run / "checkpoints", learnt, list(tensors))
    return cfg, data


def subject_of(run: Path) -> Subject:
    """Open the checkpoint of a run on the CPU."""
    subject = opened(run, 0)
    subject.model.to(torch.device("cpu"))
    return subject
