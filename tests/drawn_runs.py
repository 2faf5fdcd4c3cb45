"""Runs of weights alone, with values that no part of a model could do without."""

import random
from pathlib import Path

import torch
from omegaconf import OmegaConf

from diffllm import build_model, load_config
from diffllm.checkpoint.parameters_only import write_parameters
from diffllm.data.preparation.train_tokenizer import train_tokenizer


def small_tokenizer() -> bytes:
    """A sentencepiece model of 400 pieces, trained on functions and some prose."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(60)]
    texts = [
        f"def {rng.choice(words)}({rng.choice(words)}):\n    return {rng.choice(words)} + {i}\n\n"
        f"# {' '.join(rng.choices(words, k=8))}.\n"
        for i in range(400)
    ]
    return train_tokenizer((text for text in texts), 400, 1)


def write_run(run: Path, tokenizer: bytes, *words: str) -> Path:
    """Make a run directory of a config, with weights drawn for it."""
    cfg = load_config(
        [
            *("model=tiny", "model.vocab_size=416", "seq_len=288", "model.init_std=0.1"),
            *("run.name=x", *words),
        ]
    )
    model = build_model(cfg.model)
    tensors = {**{n: p.detach() for n, p in model.named_parameters()}, **model.router_state()}
    for key, tensor in tensors.items():
        if key.endswith("norm.weight"):
            tensor.copy_(torch.rand_like(tensor) + 0.5)  # so that a norm left out would show
        elif "lambda_" in key or key.endswith(".sink"):
            tensor.normal_(0, 0.3)
        elif key.endswith("router.bias") and cfg.model.moe.bias_update_rate:
            tensor.normal_(0, 0.1)
    for key in ("output.weight", "tok_embeddings.weight"):
        if key in tensors:
            tensors[key][400:] = 0  # ids without a piece, which never win
    run.mkdir()
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    (run / "tokenizer.model").write_bytes(tokenizer)
    (run / "run.json").write_text("{}")
    write_parameters(run / "checkpoints", tensors, dict(model.named_parameters()))
    return run
