"""Run directories without training: finished runs, runs of studies, and untrained models.

write_run(path, "attention=gated", "seed=1", loss=4.2)   # config, facts, metrics and a summary
write_ended(study, planned, out, 4.2)                    # a finished run of a study
write_weights(path, small_tokenizer(), "attention=diff_v2")   # a model with random weights
cfg, data = made(path, *data_words(directory))           # a random model and prepared data
"""

import json
import math
import os
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from diffllm import build_model
from diffllm.checkpoint.writer import write_parameters
from diffllm.compare.arms.run import Run, load_run
from diffllm.compare.study.file import Study, load_study
from diffllm.compare.study.planned_runs import Planned, deciding_runs, rate_run, start_words
from diffllm.compare.study.study_hash import planned_digests, study_hash
from diffllm.config import TrainConfig, load_config
from diffllm.config.matching import totals
from diffllm.config.saved import load_run_config
from diffllm.core.files import write_atomic
from diffllm.data.preparation.prepare import prepare, train_tokenizer
from diffllm.data.token_data import TokenData
from diffllm.data.tokenizer import Tokenizer, tokenizer_in
from diffllm.metrics.steps import STEP_DTYPE, StepsFile
from diffllm.model import Transformer
from runs.json_files import read_json, write_json, write_jsonl

if TYPE_CHECKING:
    from diffllm.evaluation.evaluation import Subject

TINY = ("model=tiny", "steps=20", "seq_len=32", "optim.warmup_steps=2", "log_interval=10")
BASE = "[model=tiny, steps=20, seq_len=32, global_batch_size=8]"


@cache
def composed_config(words: tuple[str, ...]) -> TrainConfig:
    return load_config(list(words))


def config_of(words: tuple[str, ...]) -> TrainConfig:
    """Compose the config of a run; the result is cached for all values of seed and run.dir."""
    own = {word.partition("=")[0]: word for word in words if word.startswith(("seed=", "run.dir="))}
    cfg = composed_config(tuple(word for word in words if word not in own.values()))
    if "seed" in own:
        seed = int(own["seed"].removeprefix("seed="))
        is_pinned = any(word.startswith("model.init_seed=") for word in words)
        init_seed = cfg.model.init_seed if is_pinned else seed
        cfg = replace(cfg, seed=seed, model=replace(cfg.model, init_seed=init_seed))
    if "run.dir" in own:
        cfg = replace(cfg, run=replace(cfg.run, dir=own["run.dir"].removeprefix("run.dir=")))
    return cfg


@cache
def run_config(overrides: tuple[str, ...]) -> TrainConfig:
    base = TINY
    if any(word.startswith("train.budget.flops=") for word in overrides):
        base = tuple(word for word in TINY if word != "steps=20")
    return config_of((*base, *overrides))


@cache
def config_yaml(overrides: tuple[str, ...]) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(run_config(overrides)))


@cache
def parameter_count(overrides: tuple[str, ...]) -> int:
    return int(totals(run_config(overrides).model)["params"])


def facts_of(*overrides: str) -> dict[str, Any]:
    """Return the run.json of a run on one CPU."""
    count = parameter_count(overrides)
    return {
        "parameters": count,
        "active_parameters": count,
        "flops_per_token": 6.0 * count,
        "corpus": "c0" * 32,
        "tokenizer": "t0" * 32,
        "heldout_unigram_entropy": 6.0,
        "heldout_tokens": 5000,
        "heldout_split_tokens": 5000,
        "device": "CPU",
        "ranks": 1,
        "compute_dtype": "float32",
        "torch": "2.13.0",
    }


def falling_lines(steps: int, tokens: int, loss: float, layers: int = 2) -> list[dict[str, Any]]:
    """Return lines for steps 1, 10, 20, ...: losses fall to `loss`, statistics change with step."""
    lines = []
    for step in (1, *range(10, steps + 1, 10)):
        line = {
            "step": step,
            "tokens": step * tokens,
            "train/loss": loss + 1 / step,
            "train/grad_norm": 2.0 + 1 / step,
            "perf/tokens_per_s": 1000.0 + step,
            "spikes/loss_total": 1.0,
            "spikes/loss_score": 1 / step,
        }
        for layer in range(layers):
            line[f"hidden_top1/layer_{layer:02d}"] = 10.0 * (layer + 1) - step / 10
            line[f"hidden_kurtosis/layer_{layer:02d}"] = 3.0 + layer + step / 10
            line[f"context_rms_min/layer_{layer:02d}"] = 0.01 * (layer + 1) + step / 1000
            line[f"context_rms_max/layer_{layer:02d}"] = 1.0 + layer - step / 1000
        lines.append(line)
    lines[-1]["eval/loss"] = loss
    return lines


def write_run(
    path: Path,
    *overrides: str,
    loss: float | None = 4.0,
    lines: list[dict[str, Any]] | None = None,
    facts: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    written: float | None = None,
) -> Path:
    """Write a run directory: finished with held-out loss `loss`, or at step 10 if `loss` is None.

    Args:
        lines: lines of metrics.jsonl; default: `falling_lines`.
        facts: values that replace those of `facts_of`; None removes a key.
        summary: values that replace the default values of summary.json.
        written: modification time of summary.json and metrics.jsonl.
    """
    cfg = run_config(overrides)
    (path / "checkpoints").mkdir(parents=True)
    write_atomic(path / "config.yaml", config_yaml(overrides))
    known = {**facts_of(*overrides), **(facts or {})}
    known = {key: value for key, value in known.items() if value is not None}
    write_atomic(path / "run.json", json.dumps(known))
    tokens = cfg.global_batch_size * cfg.seq_len
    if lines is None:
        lines = falling_lines(10 if loss is None else cfg.steps, tokens, loss or 5.0)
    write_lines(path, lines)
    if loss is not None:
        done = {
            "variant": cfg.resolved.choices["attention"],
            "steps": cfg.steps,
            "tokens": cfg.steps * tokens,
            "heldout_loss": loss,
            "tokens_per_s": 1010.0,
            **{
                f"{definition}/{series}_{what}": value
                for definition in ("spikes", "spikes_olmo2")
                for series in ("loss", "grad")
                for what, value in (("total", 2.0), ("score", 0.1))
            },
            **(summary or {}),
        }
        write_atomic(path / "summary.json", json.dumps(done))
    if written is not None:
        for file in path.glob("*.json*"):
            os.utime(file, (written, written))
    return path


def sweep(root: Path, losses: dict[str, list[float]], *overrides: str, **facts: Any) -> list[Path]:
    """Write a run for every variant and seed.

    Args:
        losses: by variant, the held-out losses of seeds 0, 1, ...
    """
    return [
        write_run(
            root / f"{variant}-seed{seed}",
            f"attention={variant}",
            f"seed={seed}",
            *overrides,
            loss=loss,
            facts=facts,
        )
        for variant, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]


def loaded(paths: list[Path]) -> list[Run]:
    return [load_run(path) for path in paths]


def runs_in(root: Path) -> list[Run]:
    """Load all runs of a directory in the order of their names."""
    return loaded(sorted(root.iterdir()))


def write_lines(run: Path, lines: list[dict[str, Any]]) -> None:
    """Write metrics.jsonl."""
    write_jsonl(run / "metrics.jsonl", lines)


def edit_json(file: Path, **values: Any) -> None:
    """Replace or add values of a JSON object in a file."""
    content = read_json(file)
    write_json(file, {**content, **values})


def edit_text(file: Path, old: str, new: str) -> None:
    """Replace a text that the file must contain."""
    text = file.read_text(encoding="utf-8")
    assert old in text, f"{file} does not contain {old}"
    file.write_text(text.replace(old, new), encoding="utf-8")


def write_train_seconds(run: Path, step_seconds: list[float]) -> None:
    """Write a steps.npy whose steps take these seconds."""
    rows = np.zeros(len(step_seconds), STEP_DTYPE)
    rows["step"] = np.arange(1, len(step_seconds) + 1)
    rows["train_seconds"] = np.cumsum(step_seconds)
    file = StepsFile(run / "steps.npy")
    file.append(rows)
    file.close()


# Studies

LOWER = "{kind: difference, arm: v2, against: half, below: 0.0}"
ALIKE = "{kind: equivalence, arm: v2, against: half, margin: 0.02}"
SOONER = "{kind: log_rank, arm: v2, against: half, reaches: 0.9}"
TWO_ARMS = {
    "arms": "{half: [attention=standard, model.attention.context_scale=0.5], "
    "v2: [attention=diff_v2]}",
    "baseline": "half",
}
"""Keys of `study_file` for a study without the arm `standard`."""


def study_file(path: Path, rule: str, **more: str) -> Study:
    """Write a study of three arms and three seeds, and load it."""
    keys = {
        "claim": "v2 is better than half",
        "base": BASE,
        "arms": "{standard: [attention=standard], half: [attention=standard, "
        "model.attention.context_scale=0.5], v2: [attention=diff_v2]}",
        "baseline": "standard",
        "seeds": "[0, 1, 2]",
        "rule": rule,
        "unequal": "[parameters, flops]",
        **more,
    }
    path.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()), encoding="utf-8")
    return load_study(path)


HASHES: dict[str, str] = {}
"""Hash of a study by the hash of its file."""


def write_ended(study: Study, planned: Planned, out: Path, loss: float, **facts: Any) -> Path:
    """Write a finished run of a study with this held-out loss; NaN for a diverged run."""
    path = out / planned.name
    if study.hash not in HASHES:
        HASHES[study.hash] = study_hash(study, planned_digests(study))
    cfg = config_of(tuple(start_words(planned, out, HASHES[study.hash])))
    (path / "checkpoints").mkdir(parents=True)
    write_atomic(path / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    known = {**facts_of(f"attention={cfg.resolved.choices['attention']}"), **facts}
    write_atomic(path / "run.json", json.dumps(known))
    tokens = cfg.global_batch_size * cfg.seq_len
    lines = [
        {
            "step": step,
            "tokens": step * tokens,
            "train/loss": 5.0,
            "hidden_top1/layer_00": 3.0,
            "eval/loss": None if math.isnan(loss) else loss + 1 / step,
        }
        for step in (10, cfg.steps)
    ]
    write_lines(path, lines)
    summary = {
        "steps": cfg.steps,
        "tokens": cfg.steps * tokens,
        "heldout_loss": None if math.isnan(loss) else loss,
        "seconds": 9,
    }
    write_atomic(path / "summary.json", json.dumps(summary))
    return path


def write_arms(study: Study, out: Path, losses: dict[str, list[float]], **facts: Any) -> None:
    """Write the deciding runs; `losses` has one loss per seed of the study, by arm."""
    for arm, values in losses.items():
        for seed, loss in zip(study.seeds, values, strict=False):
            (planned,) = deciding_runs(study, arm, seed, None)
            write_ended(study, planned, out, loss, **facts)


def write_rates(study: Study, out: Path, arm: str, losses: dict[float, float]) -> None:
    """Write the runs that choose an arm's learning rate; all seeds have equal losses."""
    for lr, loss in losses.items():
        for seed in study.lr.seeds if study.lr else ():
            write_ended(study, rate_run(study, arm, seed, lr), out, loss)


# Untrained models


def small_tokenizer() -> bytes:
    """Train a sentencepiece model of 400 pieces on functions and some prose."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(60)]
    texts = [
        f"def {rng.choice(words)}({rng.choice(words)}):\n    return {rng.choice(words)} + {i}\n\n"
        f"# {' '.join(rng.choices(words, k=8))}.\n"
        for i in range(400)
    ]
    return train_tokenizer((text for text in texts), 400, 1)


def write_weights(run: Path, tokenizer: bytes, *words: str) -> Path:
    """Write a run directory with random weights."""
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
            tensor.copy_(torch.rand_like(tensor) + 0.5)  # makes a missing norm detectable
        elif "lambda_" in key or key.endswith(".sink"):
            tensor.normal_(0, 0.3)
        elif key.endswith("router.bias") and cfg.model.moe.bias_update_rate:
            tensor.normal_(0, 0.1)
    for key in ("output.weight", "tok_embeddings.weight"):
        if key in tensors:
            tensors[key][400:] = 0  # ids without a piece must never be generated
    write_untrained(run, cfg, model, {})
    (run / "tokenizer.model").write_bytes(tokenizer)
    return run


def write_untrained(run: Path, cfg: TrainConfig, model: Transformer, facts: dict[str, str]) -> None:
    """Write a run with config, facts and model, but without metrics and tokenizer."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)), encoding="utf-8")
    write_json(run / "run.json", facts)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tensors = {**parameters, **model.router_state()}
    write_parameters(run / "checkpoints", tensors, list(parameters))


def write_repeating(directory: Path, documents: int = 120) -> Path:
    """Write documents with repeated words, a few to a few hundred tokens long."""
    rng = random.Random(0)
    path = directory / "corpus.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(documents):
            words = ["".join(rng.choices("abcdefgh", k=3)) for _ in range(4)]
            text = " ".join(rng.choices(words, k=3 + i % 40))
            file.write(json.dumps({"text": f"{i} {text}\n"}) + "\n")
    return path


def data_words(directory: Path) -> list[str]:
    """Write a corpus; return the overrides of a run with this corpus."""
    return [
        "data=files",
        f"data.paths=[{write_repeating(directory)}]",
        f"data.cache_dir={directory / 'cache'}",
        "data.vocab_size=300",
        "data.heldout_fraction=0.2",
    ]


def made(run: Path, *words: str) -> tuple[TrainConfig, TokenData]:
    """Write an untrained run with prepared data; large weights make all tokens different."""
    sizes = ("model=tiny", "model.vocab_size=320", "model.init_std=0.2", "run.name=x")
    cfg = load_config([*sizes, *words])
    data = prepare(cfg.data)
    assert isinstance(data, TokenData)
    model = build_model(cfg.model)
    facts = {"corpus": data.manifest.corpus, "tokenizer": data.manifest.pieces_hash}
    write_untrained(run, cfg, model, facts)
    shutil.copy(tokenizer_in(data.directory), run)
    return cfg, data


def subject_of(run: Path) -> "Subject":
    """Open the checkpoint of a run on the CPU."""
    from diffllm.evaluation.evaluation import Subject
    from diffllm.evaluation.load import decoder

    model, step = decoder(run)
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    tokenizer = Tokenizer.from_file(tokenizer_in(run))
    return Subject(model, tokenizer, checkpoint, run, load_run_config(run))
