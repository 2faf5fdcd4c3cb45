"""The runs of a study as training leaves them, without the training."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from diffllm.compare.study.file import Study, load_study
from diffllm.compare.study.planned_runs import Planned, deciding_runs, rate_run, start_words
from diffllm.config import TrainConfig, load_config
from diffllm.core.files import write_atomic
from tests.report.written_runs import facts_of, with_seed

BASE = "[model=tiny, steps=20, seq_len=32, global_batch_size=8]"


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
        **more,
    }
    path.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return load_study(path)


def config(words: list[str]) -> TrainConfig:
    """The config of a run, composed once for all seeds and directories, for that takes long."""
    own = {name: next(w for w in words if w.startswith(f"{name}=")) for name in ("seed", "run.dir")}
    cfg = composed(tuple(word for word in words if word not in own.values()))
    values = {name: word.partition("=")[2] for name, word in own.items()}
    seeded = with_seed(cfg, int(values["seed"]))
    return replace(seeded, run=replace(cfg.run, dir=values["run.dir"]))


@cache
def composed(words: tuple[str, ...]) -> TrainConfig:
    return load_config(list(words))


def write_ended(study: Study, planned: Planned, out: Path, loss: float, **facts: Any) -> Path:
    """A run that has ended with this held-out loss; NaN for one that diverged."""
    path = out / planned.name
    cfg = config(start_words(study, planned, out))
    (path / "checkpoints").mkdir(parents=True)
    write_atomic(path / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    known = {**facts_of(f"attention={cfg.run.choices['attention']}"), **facts}
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
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "steps": cfg.steps,
        "tokens": cfg.steps * tokens,
        "heldout_loss": None if math.isnan(loss) else loss,
        "seconds": 9,
    }
    write_atomic(path / "summary.json", json.dumps(summary))
    return path


def write_arms(study: Study, out: Path, losses: dict[str, list[float]], **facts: Any) -> None:
    """The runs that decide, by arm, in order of the study's seeds."""
    for arm, values in losses.items():
        for seed, loss in zip(study.seeds, values, strict=False):
            (planned,) = deciding_runs(study, arm, seed, None)
            write_ended(study, planned, out, loss, **facts)


def write_rates(study: Study, out: Path, arm: str, losses: dict[float, float]) -> None:
    """The runs that choose the learning rate of an arm, all seeds alike."""
    for lr, loss in losses.items():
        for seed in study.lr.seeds if study.lr else ():
            write_ended(study, rate_run(study, arm, seed, lr), out, loss)
