"""The runs that a study plans: their state, the chosen learning rates, and their stages."""

import math
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from diffllm.compare.report.runs import find_runs
from diffllm.compare.study.design import check_design
from diffllm.compare.study.file import Study
from diffllm.compare.study.trend_data import check_trends
from diffllm.compare.study.unequal import settings_of, undeclared
from diffllm.compare.sweep.cluster import ClusterLauncher
from diffllm.compare.sweep.command import Place, join_ranks, print_outcomes, run_here
from diffllm.compare.sweep.job import Job
from diffllm.compare.sweep.plan import SweepDirectory
from diffllm.config import TrainConfig
from diffllm.config.compose import LENGTHS
from diffllm.config.loading import solved
from diffllm.config.matching import totals
from diffllm.config.origin import compose_with_origin
from diffllm.config.saved import changes_to, flatten, load_run_config, plugin_changes, yaml_dict
from diffllm.config.schema import FREE, what_differs
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo, to_stderr
from diffllm.data.progress import track
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


def planned_by_name(study: Study) -> dict[str, Planned]:
    """Return all deciding runs by name, in order, without chosen learning rates."""
    return {
        run.name: run
        for arm in study.arms
        for seed in study.seeds
        for run in deciding_runs(study, arm, seed, None)
    }


def config_of_planned(planned: Planned) -> TrainConfig:
    own = (f"seed={planned.seed}", f"optim.lr={planned.lr!r}")
    words = (*(word for word in planned.words if word not in own), "run.report=false")
    try:
        if not seed_is_alone(words, planned.lr is not None):
            return solved_config(words, planned.lr, planned.seed)
        cfg = solved_config(words, planned.lr, 0)
        follows = config_of_arm(words, planned.lr is not None)
        init_seed = cfg.model.init_seed
        if OmegaConf.is_interpolation(follows.model, "init_seed"):
            init_seed = planned.seed
        return replace(cfg, seed=planned.seed, model=replace(cfg.model, init_seed=init_seed))
    except ConfigError as error:
        raise ConfigError(f"arm {planned.arm}: {error}") from error


@lru_cache(4096)
def solved_config(words: tuple[str, ...], lr: float | None, seed: int) -> TrainConfig:
    """Return a shared config, which callers must not change; cached because solving is slow."""
    config = config_of_arm(words, lr is not None)
    config.seed = seed
    if lr is not None:
        config.optim.lr = lr
    return solved(config, [*words])


@cache
def seed_is_alone(words: tuple[str, ...], sets_lr: bool) -> bool:
    """Return whether only seed and model.init_seed depend on the seed."""
    plain = OmegaConf.to_container(config_of_arm(words, sets_lr), resolve=False, enum_to_str=True)
    values = flatten(plain).items()  # type: ignore[arg-type]
    return not any("seed" in str(v) and "${" in str(v) for k, v in values if k != "model.init_seed")


@cache
def config_of_arm(words: tuple[str, ...], sets_lr: bool) -> DictConfig:
    """Cached, because Hydra takes 0.1 s to compose a config."""
    return compose_with_origin([*words, "seed=0", *["optim.lr=1.0"] * sets_lr])


def read_mark(path: Path) -> str | None:
    """Return `run.study` of the run at `path`; None if no run has begun. Raises CheckpointError."""
    if not (path / "config.yaml").is_file():
        return None
    return load_run_config(path).run.study or ""


def start_words(planned: Planned, out: Path, digest: str) -> list[str]:
    """Return the overrides of a run; new runs record `digest`, the hash of the study."""
    path = out / planned.name
    if (mark := read_mark(path)) is None:
        mark = f"{digest}/{planned.stage}/{planned.arm}"
    return [*planned.words, "run.report=false", f"run.dir={path}", f"run.study={mark}"]


def is_ended(path: Path) -> bool:
    return read_summary(path) is not None or diverged(path)


def ended_loss(path: Path) -> float | None:
    """Infinite for a diverged run; None for one that has not ended."""
    if (summary := read_summary(path)) is None:
        return math.inf if diverged(path) else None
    loss = finite(summary.get("heldout_loss"))
    return math.inf if loss is None else loss


def strayed(path: Path, begun: TrainConfig, cfg: TrainConfig, free: tuple[str, ...] = FREE) -> str:
    """How a run that began with a config differs from the study's; empty if it does not."""
    changes = {key: v for key, v in changes_to(begun, cfg, free).items() if key != "run.study"}
    if changes:
        return ", ".join(f"{key} is {there}, not {here}" for key, (there, here) in changes.items())
    return on_its_way(path)


def on_its_way(path: Path) -> str:
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


def rate_losses(out: Path) -> dict[str, float]:
    """Return the losses of the ended runs that choose learning rates, by name."""
    paths = sorted(filter(Path.is_dir, (out / RATES).glob("*")))
    losses = {f"{RATES}/{path.name}": ended_loss(path) for path in paths}
    return {name: loss for name, loss in losses.items() if loss is not None}


def choose_all(study: Study, out: Path) -> list[ChosenRate]:
    if study.lr is None:
        return []
    ended = rate_losses(out)
    return [choose_from(study, arm, ended) for arm in study.arms]


def choose_from(study: Study, arm: str, losses_by_name: Mapping[str, float]) -> ChosenRate:
    """Choose an arm's learning rate from the ended runs; extend the grid where its end is best."""
    rates = study.lr
    assert rates
    grid, added = list(rates.grid), [0, 0]
    while True:
        losses: dict[float, float | None] = {}
        wanted: list[Planned] = []
        for lr in grid:
            runs = [rate_run(study, arm, seed, lr) for seed in rates.seeds]
            ended = [losses_by_name.get(run.name) for run in runs]
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


def run_study(study: Study, out: Path, launcher: list[str], added: list[str]) -> int:
    """Run everything that has not ended, stage by stage; a started run resumes.

    Args:
        launcher: the overrides hydra/launcher=... and hydra.launcher.*.
        added: plugins and --config-dir, for the command lines of the runs.

    Returns:
        0 if every run has ended and every arm has a learning rate, 128 + n after signal n, else 1.

    Raises:
        ConfigError: a study that cannot run; nothing has been started or changed.
    """
    world = join_ranks()

    def begin() -> Place:
        cluster = ClusterLauncher.of(launcher, world.size, f"run.sweep={out.name}")
        check_study_runs(study, out, cluster.world_size if cluster else world.size)
        directory = SweepDirectory(out, "study")
        directory.hold()
        return directory, cluster

    _, place = world.broadcast_and_keep("study", lambda: (None, begin()))
    unfinished = stopped = 0

    def stage() -> list[dict[str, Any]]:
        assert place
        return [] if unfinished or stopped else next_jobs(study, place[0], added)

    for number in count():
        jobs = [Job(**job) for job in world.broadcast_from_rank0(f"stage/{number}", stage)]
        if not jobs:
            break
        if place is None:
            run_here(jobs, world)
            continue
        echo(f"{out}: {len(jobs)} runs to go in this stage", flush=True)
        directory, cluster = place
        stopped, endings = cluster.run(jobs, directory) if cluster else run_here(jobs, world)
        unfinished = print_outcomes(jobs, endings, directory)
    if place is None:
        return 0
    if unfinished or stopped:
        return 128 + stopped if stopped else 1
    diverged = [choice for choice in choose_all(study, out) if choice.lr is None]
    for choice in diverged:
        rates = ", ".join(f"{lr:g}" for lr in choice.losses)
        echo(f"arm {choice.arm} diverged at every learning rate ({rates}): it has no deciding run")
    which = "all other runs" if diverged else "all runs"
    verdict = shlex.join(["diffllm", "study", "verdict", str(study.path), f"out={out}"])
    echo(f"{which} of {out} have ended: {verdict}")
    return 1 if diverged else 0


def next_jobs(study: Study, directory: SweepDirectory, added: list[str]) -> list[dict[str, Any]]:
    from diffllm.compare.study.study_hash import planned_digests, study_hash

    out, jobs = directory.path, []
    runs = next_runs(study, out)
    digest = study_hash(study, planned_digests(study)) if runs else ""
    with track("checking runs", len(runs)) as advance:
        for number, planned in enumerate(runs, start=1):
            words = start_words(planned, out, digest)
            directory.record["runs"][planned.name] = words
            path, steps = str(out / planned.name), config_of_planned(planned).steps
            arguments = [*added, *words]
            jobs.append(vars(Job(number, len(runs), planned.name, path, steps, arguments, False)))
            advance(1)
    directory.record["keys"] = []
    directory.write()
    return jobs


def next_runs(study: Study, out: Path) -> list[Planned]:
    """Return the runs of the next stage that have not ended."""
    choices = choose_all(study, out)
    if wanted := [run for choice in choices for run in choice.wanted]:
        return wanted
    rates = {choice.arm: choice.lr for choice in choices}
    runs = [
        run
        for seed in study.seeds
        for arm in study.arms
        if study.lr is None or rates[arm] is not None
        for run in deciding_runs(study, arm, seed, rates.get(arm))
    ]
    return [run for run in runs if not is_ended(out / run.name)]


def check_study_runs(study: Study, out: Path, world_size: int) -> None:
    """Raise ConfigError for a study that cannot run or whose verdict cannot decide."""
    begun = SweepDirectory(out, "study").record["runs"]
    if not begun:
        check_design(study)
    configs = {planned.arm: config_of_planned(planned) for planned in first_runs(study)}
    check_trends(study, configs)
    for arm, cfg in configs.items():
        try:
            cfg.check_world(world_size)
        except ConfigError as error:
            raise ConfigError(f"arm {arm}: {error}") from error
    conditions = {arm: [planned_conditions(cfg)] for arm, cfg in configs.items()}
    if problems := undeclared(conditions, study.unequal):
        said = f"{study.path}: the verdict would be not comparable: {'; '.join(problems)}"
        if not begun:
            raise ConfigError(said)
        if next_runs(study, out):
            to_stderr(f"warning: {said}")
    for path in (out / name for name in begun):
        if changes := plugin_changes(path):
            raise ConfigError(f"{path} was made with {what_differs(changes)}; choose another out=")
    for planned in next_runs(study, out):
        path = out / planned.name
        run = load_run_config(path) if (path / "config.yaml").is_file() else None
        if run and (problem := strayed(path, run, config_of_planned(planned))):
            raise ConfigError(f"{path} is a run with another config ({problem}); use another out=")


def planned_conditions(cfg: TrainConfig) -> dict[str, Any]:
    sizes = totals(cfg.model, cfg.data.visible_keys)
    own = {"parameters": sizes["params"], "flops_per_token": sizes["flops"]}
    return {**settings_of(flatten(yaml_dict(cfg))), **own}


def first_runs(study: Study) -> list[Planned]:
    """A deciding run of every arm."""
    lr = study.lr.grid[0] if study.lr else None
    return [deciding_runs(study, arm, study.seeds[0], lr)[0] for arm in study.arms]


@dataclass(frozen=True)
class Cost:
    """The runs of one arm in one stage."""

    stage: str
    arm: str
    runs: int
    ended: int
    tokens: int
    """Per run."""
    flops: float
    """Per run."""
    seconds: float | None
    """Per run; None if no speed is known."""

    @property
    def hours(self) -> float | None:
        """Of the remaining runs, one after another."""
        return None if self.seconds is None else (self.runs - self.ended) * self.seconds / 3600


def costs(study: Study, out: Path, pilot: list[Path]) -> list[Cost]:
    """Return the cost of every arm and stage.

    Time is computed from FLOPs and the median speed of ended runs of the study, or else of the
    pilot. FLOPs of masked documents use data.visible_keys, or else the median of these runs.
    """
    stages = []
    for first in first_runs(study):
        if study.lr:
            grid, seeds = study.lr.grid, study.lr.seeds
            stages.append([rate_run(study, first.arm, seed, lr) for lr in grid for seed in seeds])
        deciding = [deciding_runs(study, first.arm, seed, first.lr) for seed in study.seeds]
        stages.append([run for runs in deciding for run in runs])
    ended_runs = [s for runs in stages for run in runs if (s := speed_of(out / run.name))]
    if not ended_runs and pilot:
        ended_runs = [speed for path in find_runs(pilot).runs if (speed := speed_of(path))]
    speeds, counted = [speed for speed, _ in ended_runs], [keys for _, keys in ended_runs if keys]
    found = []
    for runs in stages:
        cfg = config_of_planned(runs[0])
        tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
        keys = cfg.data.visible_keys
        if keys is None and cfg.data.mask_documents and counted:
            keys = min(statistics.median(counted), (cfg.seq_len + 1) / 2)
        flops = tokens * totals(cfg.model, keys)["flops"]
        ended = sum(is_ended(out / run.name) for run in runs)
        seconds = flops / statistics.median(speeds) if speeds else None
        found.append(Cost(runs[0].stage, runs[0].arm, len(runs), ended, tokens, flops, seconds))
    return found


def speed_of(path: Path) -> tuple[float, float | None] | None:
    """Return training FLOPs per second, including evaluations and saves, and visible keys."""
    summary = read_summary(path) or {}
    seconds, tokens = finite(summary.get("seconds")), finite(summary.get("tokens"))
    if not seconds or not tokens:
        return None
    cfg, keys = load_run_config(path), finite(summary.get("visible_keys"))
    return tokens * totals(cfg.model, keys or cfg.data.visible_keys)["flops"] / seconds, keys
