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


@dataclass(frozen=True)
class Planned:
    stage: str
    arm: str
    seed: int
    lr: float | None
    """None keeps the config's own."""
    name: str
    """Its directory, relative to the study's."""
    words: list[str]


def deciding_runs(study: Study, arm: str, seed: int, lr: float | None) -> list[Planned]:
    """The deciding runs of an arm and a seed: one, or one per rate of `lr_sweep`."""
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
    """Cached, because Hydra takes 0.1 s to compose a config."""
    return compose_config(with_origin([*words, "seed=0", *["optim.lr=1.0"] * sets_lr]))


def read_mark(path: Path) -> str | None:
    """Return `run.study` of the run at `path`; None if no run has begun. Raises CheckpointError."""
    if not (path / "config.yaml").is_file():
        return None
    return load_run_config(path).run.study or ""


def start_words(study: Study, planned: Planned, out: Path) -> list[str]:
    path = out / planned.name
    if (mark := read_mark(path)) is None:
        mark = f"{study.hash}/{planned.stage}/{planned.arm}"
    return [*planned.words, "run.report=false", f"run.dir={path}", f"run.study={mark}"]


def is_ended(path: Path) -> bool:
    return read_summary(path) is not None or diverged(path)


def ended_loss(path: Path) -> float | None:
    """Infinite for a diverged run; None for one that has not ended."""
    if (summary := read_summary(path)) is None:
        return math.inf if diverged(path) else None
    loss = finite(summary.get("heldout_loss"))
    return math.inf if loss is None else loss


def strayed(path: Path, begun: TrainConfig, cfg: TrainConfig) -> str:
    """How a run that began with a config differs from the study's; empty if it does not."""
    changes = {key: v for key, v in changes_to(begun, cfg).items() if key != "run.study"}
    if changes:
        return ", ".join(f"{key} is {there}, not {here}" for key, (there, here) in changes.items())
    return "it was changed on its way" if (path / "changes.jsonl").exists() else ""


@dataclass(frozen=True)
class ChosenRate:
    arm: str
    losses: dict[float, float | None]
    """Mean loss per rate, increasing; infinite if a seed diverged, None if one has not ended."""
    wanted: list[Planned]
    """The runs that have not ended."""
    lr: float | None = None
    problem: str = ""
    """Why `lr` cannot be trusted."""


def choose_all(study: Study, out: Path) -> list[ChosenRate]:
    return [choose(study, arm, out) for arm in study.arms] if study.lr else []


def choose(study: Study, arm: str, out: Path) -> ChosenRate:
    """Choose an arm's learning rate from the ended runs; extend the grid where its end is best."""
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
