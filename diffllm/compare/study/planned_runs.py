"""The runs that a study plans, what has become of them, and the learning rates chosen from them."""

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
from diffllm.metrics.records import diverged, finite, read_summary

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
    runs = []
    for rate in [lr] if study.lr_sweep is None else study.lr_sweep:
        name = f"{arm}-lr{rate:g}-seed{seed}" if study.lr_sweep else f"{arm}-seed{seed}"
        words = [*study.base, *study.arms[arm], f"seed={seed}"]
        words += [f"optim.lr={rate!r}"] if rate else []
        runs.append(Planned(DECIDING, arm, seed, rate, name, words))
    return runs


def rate_run(study: Study, arm: str, seed: int, lr: float) -> Planned:
    assert study.lr
    words = [*study.base, *study.arms[arm]]
    if study.lr.steps is not None:
        words = [word for word in words if word.partition("=")[0] not in LENGTHS]
        words.append(f"steps={study.lr.steps}")
    words += [f"seed={seed}", f"optim.lr={lr!r}"]
    return Planned(RATES, arm, seed, lr, f"rates/{arm}-lr{lr:g}-seed{seed}", words)


def config_of_planned(planned: Planned) -> TrainConfig:
    """The config of a planned run; raises ConfigError that names its arm."""
    own = (f"seed={planned.seed}", f"optim.lr={planned.lr!r}")
    words = [*(word for word in planned.words if word not in own), "run.report=false"]
    try:
        config = config_of_arm(tuple(words), planned.lr is not None)
        config.seed = planned.seed
        if planned.lr is not None:
            config.optim.lr = planned.lr
        return solved(config, words)
    except ConfigError as error:
        raise ConfigError(f"arm {planned.arm}: {error}") from error


@cache
def config_of_arm(words: tuple[str, ...], sets_lr: bool) -> DictConfig:
    """Compose the config that the runs of an arm share, without their seeds and rates.

    Hydra takes 0.1 s to compose a config, which is too long to do it for every seed.
    """
    return compose_config(with_origin([*words, "seed=0", *["optim.lr=1.0"] * sets_lr]))


def read_mark(path: Path) -> str | None:
    """The mark, `run.study`, that the run at `path` began with: the study file's hash, the stage
    and the arm; None where no run has begun.

    Raises CheckpointError for what is not a run of this version.
    """
    if not (path / "config.yaml").is_file():
        return None
    return load_run_config(path).run.study or ""


def start_words(study: Study, planned: Planned, out: Path) -> list[str]:
    """The overrides that start a run, or continue it under the mark that it began with."""
    path = out / planned.name
    if (mark := read_mark(path)) is None:
        mark = f"{study.hash}/{planned.stage}/{planned.arm}"
    return [*planned.words, "run.report=false", f"run.dir={path}", f"run.study={mark}"]


def is_ended(path: Path) -> bool:
    return read_summary(path) is not None or diverged(path)


def ended_loss(path: Path) -> float | None:
    """The held-out loss that the run at `path` ended with, infinite where it diverged; None where
    it has not ended."""
    if (summary := read_summary(path)) is None:
        return math.inf if diverged(path) else None
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


@dataclass(frozen=True)
class ChosenRate:
    """The state of the choice of one arm."""

    arm: str
    losses: dict[float, float | None]
    """Learning rate to mean held-out loss, increasing; infinite where a seed diverged, None where
    one has not ended."""
    wanted: list[Planned]
    """The runs that are still to end."""
    lr: float | None = None
    """The best one, once all runs have ended and one of them is finite."""
    problem: str = ""
    """Why the best one is not to be trusted: it lies at an end of a grid that goes no further."""


def choose_all(study: Study, out: Path) -> list[ChosenRate]:
    """Choose the learning rate of every arm; return an empty list if the study chooses none."""
    return [choose(study, arm, out) for arm in study.arms] if study.lr else []


def choose(study: Study, arm: str, out: Path) -> ChosenRate:
    """Choose an arm's learning rate from the runs in `out`, as far as they have ended.

    Where the best lies at an end of the grid, the grid goes on there by the same ratio, as often as
    the study allows.
    """
    rates = study.lr
    assert rates
    grid, added = list(rates.grid), [0, 0]
    while True:
        losses: dict[float, float | None] = {}
        wanted: list[Planned] = []
        for lr in grid:
            runs = [rate_run(study, arm, seed, lr) for seed in rates.seeds]
            ended = [ended_loss(out / run.name) for run in runs]
            known = [loss for loss in ended if loss is not None]
            wanted += [run for run, loss in zip(runs, ended, strict=True) if loss is None]
            losses[lr] = sum(known) / len(known) if len(known) == len(runs) else None
        means = {lr: loss for lr, loss in losses.items() if loss is not None}
        if wanted:
            return ChosenRate(arm, losses, wanted)
        best = min(grid, key=means.__getitem__)
        if not math.isfinite(means[best]):
            return ChosenRate(arm, losses, [], None, "every learning rate diverged")
        end = (grid[-1] == best) - (grid[0] == best)
        if not end:
            return ChosenRate(arm, losses, [], best)
        side = int(end > 0)
        if added[side] == rates.extend:
            where = "largest" if side else "smallest"
            return ChosenRate(arm, losses, [], best, f"the best is the {where} of the grid")
        added[side] += 1
        first, second = rates.grid[-2:] if side else rates.grid[1::-1]
        lr = float(f"{best * second / first:.6g}")
        grid = [*grid, lr] if side else [lr, *grid]
