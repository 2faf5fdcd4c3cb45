"""Run directories as training leaves them, without the training."""

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from diffllm.compare.report.runs import Run, load_run
from diffllm.config import TrainConfig, load_config
from diffllm.config.matching import totals
from diffllm.core.files import write_atomic

TINY = ("model=tiny", "steps=20", "seq_len=32", "optim.warmup_steps=2", "log_interval=10")


@cache
def config(overrides: tuple[str, ...]) -> TrainConfig:
    """Compose the config of a run; that of another seed is made of it, for composing takes long."""
    rest = tuple(word for word in overrides if not word.startswith("seed="))
    if rest == overrides:
        return load_config([*TINY, *overrides])
    (seed,) = (int(word.removeprefix("seed=")) for word in overrides if word not in rest)
    return with_seed(config(rest), seed)


def with_seed(cfg: TrainConfig, seed: int) -> TrainConfig:
    """Return a config that was composed without a seed, as `seed=` makes it."""
    return replace(cfg, seed=seed, model=replace(cfg.model, init_seed=seed))


@cache
def config_yaml(overrides: tuple[str, ...]) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config(overrides)))


@cache
def parameters(overrides: tuple[str, ...]) -> int:
    return int(totals(config(overrides).model)["params"])


def facts_of(*overrides: str) -> dict[str, Any]:
    """run.json of a run on one CPU."""
    count = parameters(overrides)
    return {
        "parameters": count,
        "active_parameters": count,
        "flops_per_token": 6.0 * count,
        "corpus": "c0" * 32,
        "tokenizer": "t0" * 32,
        "heldout_unigram_entropy": 6.0,
        "heldout_tokens": 5000,
        "device": "CPU",
        "ranks": 1,
        "compute_dtype": "float32",
        "torch": "2.13.0",
    }


def metric_lines(steps: int, tokens: int, loss: float, layers: int = 2) -> list[dict[str, Any]]:
    """Lines at step 1, 10, 20, ...: loss falls to `loss`, statistics rise with step and layer."""
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
    """A run directory; finished with held-out loss `loss`, unfinished after step 10 for None.

    Args:
        lines: instead of `metric_lines`.
        facts: over those of `facts_of`; None as a value leaves one out.
        summary: over the usual one.
        written: modification time of summary.json and metrics.jsonl.
    """
    cfg = config(overrides)
    (path / "checkpoints").mkdir(parents=True)
    write_atomic(path / "config.yaml", config_yaml(overrides))
    known = {**facts_of(*overrides), **(facts or {})}
    known = {key: value for key, value in known.items() if value is not None}
    write_atomic(path / "run.json", json.dumps(known))
    tokens = cfg.global_batch_size * cfg.seq_len
    if lines is None:
        lines = metric_lines(10 if loss is None else cfg.steps, tokens, loss or 5.0)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if loss is not None:
        done = {
            "variant": cfg.run.choices["attention"],
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
    """A run for every variant and seed: {"standard": [loss of seed 0, of seed 1, ...], ...}."""
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
