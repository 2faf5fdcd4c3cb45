"""The runs of a study: which there are to be, and which there are."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omegaconf import DictConfig

from diffllm.compare.study.file import Study
from diffllm.config import TrainConfig
from diffllm.config.compose import LENGTHS, compose_config
from diffllm.config.loading import solved
from diffllm.config.origin import with_origin
from diffllm.config.saved import changes_to, load_run_config
from diffllm.core.errors import ConfigError
from diffllm.core.files.records import finite, gave_up, read_summary

DECIDING, RATES = "deciding", "rates"
"""The stages of a study."""


@dataclass(frozen=True)
class Planned:
    """A run that a study is to have."""

    stage: str
    arm: str
    seed: int
    lr: float | None
    """The learning rate that the study sets; None where the config's own holds."""
    name: str
    """Its directory below the study's."""
    words: list[str]
    """Its overrides, without the directory and the mark of the study."""


def deciding_runs(study: Study, arm: str, seed: int, lr: float | None) -> list[Planned]:
    """The runs of an arm and a seed that decide: one, or one for each rate of `lr_sweep`.

    Args:
        lr: the arm's learning rate, where the study has chosen one.
    """
    if study.lr_sweep is None:
        return [deciding_run(study, arm, seed, lr, f"{arm}-seed{seed}")]
    return [
        deciding_run(study, arm, seed, each, f"{arm}-lr{each:g}-seed{seed}")
        for each in study.lr_sweep
    ]


def deciding_run(study: Study, arm: str, seed: int, lr: float | None, name: str) -> Planned:
    words = [*study.base, *study.arms[arm], f"seed={seed}", *([f"optim.lr={lr!r}"] if lr else [])]
    return Planned(DECIDING, arm, seed, lr, name, words)


def rate_run(study: Study, arm: str, seed: int, lr: float) -> Planned:
    """A run that helps to choose the arm's learning rate."""
    assert study.lr
    words = [*study.base, *study.arms[arm]]
    if study.lr.steps is not None:
        words = [*without_length(words), f"steps={study.lr.steps}"]
    words += [f"seed={seed}", f"optim.lr={lr!r}"]
    return Planned(RATES, arm, seed, lr, f"rates/{arm}-lr{lr:g}-seed{seed}", words)


def without_length(words: list[str]) -> list[str]:
    return [word for word in words if word.partition("=")[0] not in LENGTHS]


def config_of(planned: Planned) -> TrainConfig:
    """The config of a planned run; raises ConfigError that names its arm."""
    own = (f"seed={planned.seed}", f"optim.lr={planned.lr!r}")
    words = [*(word for word in planned.words if word not in own), "run.report=false"]
    try:
        config = composed(tuple(words), planned.lr is not None)
        config.seed = planned.seed
        if planned.lr is not None:
            config.optim.lr = planned.lr
        return solved(config, words)
    except ConfigError as error:
        raise ConfigError(f"arm {planned.arm}: {error}") from error


@cache
def composed(words: tuple[str, ...], sets_lr: bool) -> DictConfig:
    """Compose the config that the runs of an arm share; `config_of` sets the seed and rate in it.

    Hydra takes 0.1 s to compose a config, which is too long to do it for every seed.
    """
    return compose_config(with_origin([*words, "seed=0", *["optim.lr=1.0"] * sets_lr]))


def mark(study: Study, planned: Planned) -> str:
    """The words that a run of this study begins with, in `run.study`: the file's hash, the stage
    and the arm."""
    return f"{study.hash}/{planned.stage}/{planned.arm}"


def mark_of(path: Path) -> str | None:
    """The mark that the run at `path` began with; None where no run has begun.

    Raises CheckpointError for what is not a run of this version.
    """
    if not (path / "config.yaml").is_file():
        return None
    return load_run_config(path).run.study or ""


def words_of(study: Study, planned: Planned, out: Path) -> list[str]:
    """The overrides that start a run, or continue it under the mark that it began with."""
    path = out / planned.name
    own = mark_of(path)
    begun = mark(study, planned) if own is None else own
    return [*planned.words, "run.report=false", f"run.dir={path}", f"run.study={begun}"]


def is_ended(path: Path) -> bool:
    """Whether the run at `path` has made its steps, or has diverged and given up."""
    return read_summary(path) is not None or gave_up(path)


def heldout_loss(path: Path) -> float | None:
    """The held-out loss that the run at `path` ended with, infinite where it diverged; None where
    it has not ended."""
    if (summary := read_summary(path)) is None:
        return math.inf if gave_up(path) else None
    loss = finite(summary.get("heldout_loss"))
    return math.inf if loss is None else loss


def strayed(path: Path, begun: TrainConfig, cfg: TrainConfig) -> str:
    """How the run at `path` is not the one that the study names; nothing if it is.

    Args:
        begun: the config that the run began with.
        cfg: the one that the study has for it.
    """
    changes = {key: v for key, v in changes_to(begun, cfg).items() if key != "run.study"}
    if changes:
        return ", ".join(f"{key} is {there}, not {here}" for key, (there, here) in changes.items())
    return "it was changed on its way" if (path / "changes.jsonl").exists() else ""
