"""The planned runs of a study, with their stages and learning rates.

With the key `lr`, a study first runs a grid of learning rates. The deciding runs follow: the runs
that the study's rules compare.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from diffllm.compare.arms.comparable import Terms, starting_point
from diffllm.compare.study.file import TOKENS, Study
from diffllm.compare.study.training_budget import FLOPS
from diffllm.config import TrainConfig
from diffllm.config.changes import is_fixed
from diffllm.config.compose import LENGTHS
from diffllm.config.loading import solved
from diffllm.config.matching import totals
from diffllm.config.origin import compose_with_origin
from diffllm.config.saved import Counts, changes_to, flatten, load_run_config
from diffllm.config.schema import ContextError
from diffllm.config.words import typed_override
from diffllm.core.errors import ConfigError
from diffllm.metrics.records import diverged, finite, read_summary

DECIDING, RATES = "deciding", "rates"


@dataclass(frozen=True)
class Planned:
    """A run in the plan of a study.

    `stage` is "rates" (grid of learning rates) or "deciding". `name` is the run directory relative
    to the study's directory, and `words` contains the overrides. If `lr` is None, the config
    determines the learning rate.
    """

    stage: str
    arm: str
    seed: int
    lr: float | None
    name: str
    words: list[str]


def deciding_runs(study: Study, arm: str, seed: int, lr: float | None) -> list[Planned]:
    """Return the runs of one arm and seed that the study's rules compare.

    This is a single run, or with `lr_sweep` one run per learning rate. If the learning rate `lr` is
    None, the arm's config sets the learning rate.
    """
    runs = []
    for rate in [lr] if study.lr_sweep is None else study.lr_sweep:
        name = f"{arm}-lr{rate:g}-seed{seed}" if study.lr_sweep else f"{arm}-seed{seed}"
        words = [*words_of_arm(study, arm), f"seed={seed}"]
        words += [f"optim.lr={rate!r}"] if rate else []
        runs.append(Planned(DECIDING, arm, seed, rate, name, words))
    return runs


def rate_run(study: Study, arm: str, seed: int, lr: float) -> Planned:
    assert study.lr
    words = words_of_arm(study, arm, study.lr.steps)
    words += [f"seed={seed}", f"optim.lr={lr!r}"]
    return Planned(RATES, arm, seed, lr, f"rates/{arm}-lr{lr:g}-seed{seed}", words)


def words_of_arm(study: Study, arm: str, baseline_steps: int | None = None) -> list[str]:
    """Return the overrides of an arm, without its seed and learning rate.

    For `baseline_steps`, see `steps_of_arm`.
    """
    words = [*study.base, *study.arms[arm]]
    steps = steps_of_arm(study, arm, baseline_steps)
    if steps is None:
        return words
    words = [word for word in words if word.partition("=")[0] not in LENGTHS]
    return [*words, f"steps={steps}"]


def steps_of_arm(study: Study, arm: str, baseline_steps: int | None = None) -> int | None:
    """Return the steps of an arm that cost the study's budget; None if its overrides decide.

    Raises ConfigError if the budget is less than one step.

    Args:
        baseline_steps: steps of the baseline arm, if they differ from those of its compared runs.
    """
    if study.budget == TOKENS:
        return baseline_steps
    cost = cost_of_step(study, arm)
    if baseline_steps is None:
        amount = planned_cost(study)
    else:
        amount = baseline_steps * cost_of_step(study, study.baseline)
    if amount < cost * (1 - 1e-9):  # a quotient of equal costs can be rounded
        raise ConfigError(
            f"arm {arm}: the budget of a run, {amount:.3g}, is less than one training step, "
            f"{cost:.3g} (FLOPs or seconds)"
        )
    return round(amount / cost)


def planned_cost(study: Study) -> float:
    """Return the FLOPs or seconds of a run in a study with a budget in FLOPs or seconds."""
    if not isinstance(study.budget, str):
        return study.budget.seconds
    steps, flops = length_and_flops(study, study.baseline)
    return steps * flops


def cost_of_step(study: Study, arm: str) -> float:
    """Return the FLOPs or seconds of a training step in a study with such a budget."""
    if study.profile:
        return study.profile.seconds_per_step(arm)
    return length_and_flops(study, arm)[1]


def length_and_flops(study: Study, arm: str) -> tuple[int, float]:
    """Return the steps of an arm by its overrides, and the training FLOPs of one step.

    Raises ConfigError if the config does not determine the FLOPs.
    """
    return length_and_flops_of(arm, (*study.base, *study.arms[arm]), study.sets_rates)


@cache
def length_and_flops_of(
    arm: str, overrides: tuple[str, ...], study_sets_lr: bool
) -> tuple[int, float]:
    lr = 1.0 if study_sets_lr else None
    cfg = config_of_planned(Planned(DECIDING, arm, 0, lr, arm, [*overrides]))
    if cfg.data.mask_documents and cfg.visible_keys is None:
        raise ConfigError(
            f"arm {arm}: budget={FLOPS} with data.mask_documents=true needs the mean number of "
            "tokens that a query sees; set data.document_lengths or data.visible_keys"
        )
    flops = totals(cfg.model, cfg.visible_keys)["flops"]
    return cfg.steps, cfg.global_batch_size * cfg.seq_len * flops


def terms_of(study: Study) -> Terms:
    """Return `study.terms` with the keys and facts that the study's budget declares.

    A budget in FLOPs or seconds declares tokens and FLOPs per token. It also declares keys such as
    optim.warmup_steps, if they follow the steps in every arm.
    """
    if study.budget == TOKENS:
        return study.terms
    names = [*study.allowed, "tokens", "flops_per_token", *keys_that_follow_steps(study)]
    return study.terms._replace(allowed=names)


def keys_that_follow_steps(study: Study) -> list[str]:
    """Return the config keys whose values are a share of the steps in every arm."""
    following = []
    for words in study.arms.values():
        config = config_of_arm((*study.base, *words), study.sets_rates)
        values = flatten(OmegaConf.to_container(config, resolve=False, enum_to_str=True))  # type: ignore[arg-type]
        following.append({name for name, value in values.items() if "${of_steps:" in str(value)})
    return sorted(set.intersection(*following))


def planned_by_name(study: Study) -> dict[str, Planned]:
    """Return all runs that the study's rules compare, by run name.

    The field `lr` of a run is its learning rate in a study with `lr_sweep`, otherwise None.
    """
    return {
        run.name: run
        for arm in study.arms
        for seed in study.seeds
        for run in deciding_runs(study, arm, seed, None)
    }


def config_of_planned(planned: Planned) -> TrainConfig:
    """Return the complete config of a planned run; raises ConfigError if the config is invalid."""
    own = (f"seed={planned.seed}", f"optim.lr={planned.lr!r}")
    words = (*(word for word in planned.words if word not in own), "run.report=false")
    try:
        if not only_init_seed_uses_seed(words, planned.lr is not None):
            return solved_config(words, planned.lr, planned.seed)
        cfg = solved_config(words, planned.lr, 0)
        follows = config_of_arm(words, planned.lr is not None)
        init_seed = cfg.model.init_seed
        if OmegaConf.is_interpolation(follows.model, "init_seed"):
            init_seed = planned.seed
        return replace(cfg, seed=planned.seed, model=replace(cfg.model, init_seed=init_seed))
    except ContextError:
        raise
    except ConfigError as error:
        raise ConfigError(f"arm {planned.arm}: {error}") from error


@lru_cache(4096)
def solved_config(overrides: tuple[str, ...], lr: float | None, seed: int) -> TrainConfig:
    """Return the complete config of an arm with the seed `seed` and the learning rate `lr`.

    If `lr` is None, the arm keeps the learning rate of its config. The result is cached and
    shared, so callers must not change the result.
    """
    config = config_of_arm(overrides, lr is not None)
    config.seed = seed
    if lr is not None:
        config.optim.lr = lr
    return solved(config, [*overrides])


@cache
def only_init_seed_uses_seed(overrides: tuple[str, ...], study_sets_lr: bool) -> bool:
    """Return whether `model.init_seed` is the only config key that can depend on the key `seed`.

    If so, the configs of two seeds differ at most in `seed` and `model.init_seed`.
    """
    plain = OmegaConf.to_container(
        config_of_arm(overrides, study_sets_lr), resolve=False, enum_to_str=True
    )
    values = flatten(plain).items()  # type: ignore[arg-type]
    return not any("seed" in str(v) and "${" in str(v) for k, v in values if k != "model.init_seed")


@cache
def config_of_arm(overrides: tuple[str, ...], study_sets_lr: bool) -> DictConfig:
    """Compose the config of an arm; cached, because Hydra needs 0.1 s per config.

    The default of eval.tokens is null here: "auto" would give arms of unequal length unequal
    documents.
    """
    config = compose_with_origin([*overrides, "seed=0", *["optim.lr=1.0"] * study_sets_lr])
    if measures_whole_split(config, overrides):
        config.eval.tokens = None
    return config


def measures_whole_split(config: DictConfig, overrides: tuple[str, ...]) -> bool:
    """Return whether neither a YAML file nor an override of the study sets eval.tokens."""
    by_default = OmegaConf.is_interpolation(config.eval, "tokens")
    return by_default and not any(word.startswith("eval.tokens=") for word in overrides)


def read_mark(path: Path) -> str | None:
    """Return `run.study` from the saved config of a run: the study's hash, the stage and the arm.

    Return None if the run has not started. Raises CheckpointError if the config is damaged.
    """
    if not (path / "config.yaml").is_file():
        return None
    return load_run_config(path).run.study or ""


def start_words(planned: Planned, out: Path, digest: str) -> list[str]:
    """Return the overrides that start or resume a planned run.

    `out` is the directory of the study's runs, and `digest` is the hash of the study. A new run
    records this hash in `run.study`.
    """
    path = out / planned.name
    if (mark := read_mark(path)) is None:
        mark = f"{digest}/{planned.stage}/{planned.arm}"
    words = [*planned.words, "run.report=false"]
    if config_of_planned(planned).eval.tokens is None:
        words.insert(0, "eval.tokens=null")
    return [*words, typed_override("run.dir", str(path)), typed_override("run.study", mark)]


def is_ended(path: Path) -> bool:
    return read_summary(path) is not None or diverged(path)


def ended_loss(path: Path) -> float | None:
    """Return a run's final held-out loss; infinity if it diverged, None if it has not ended."""
    if (summary := read_summary(path)) is None:
        return math.inf if diverged(path) else None
    loss = finite(summary.get("heldout_loss"))
    return math.inf if loss is None else loss


def strayed(
    run_path: Path, saved: TrainConfig, planned: TrainConfig, counts: Counts = is_fixed
) -> str:
    """Describe the differences between the saved and the planned config of a run.

    Only differences that count are described. If there are no differences, return a note if the
    config changed during the run, and "" if it did not.
    """
    found = changes_to(saved, planned, counts)
    changes = {key: values for key, values in found.items() if key != "run.study"}
    if starting_point(saved, run_path) != starting_point(planned):
        changes["resume"] = (saved.resume, planned.resume)
    if changes:
        return ", ".join(f"{key} is {there}, not {here}" for key, (there, here) in changes.items())
    return change_during_run(run_path)


def change_during_run(run_path: Path) -> str:
    return "its config changed during the run" if (run_path / "changes.jsonl").exists() else ""


@dataclass(frozen=True)
class ChosenRate:
    """The learning rate of an arm, chosen by the losses of a grid of runs.

    `losses` maps each rate, in increasing order, to its mean loss over seeds. The mean is infinite
    if a seed diverged, and None if a seed has not ended. `wanted` lists the runs of the grid that
    have not ended. `lr` is None if `wanted` is not empty or if every rate diverged. `problem` says
    why `lr` cannot be trusted.
    """

    arm: str
    losses: dict[float, float | None]
    wanted: list[Planned]
    lr: float | None = None
    problem: str = ""


def rate_losses(out: Path) -> dict[str, float]:
    """Map the names of ended runs in the learning rate grid to their final losses.

    The loss of a diverged run is infinite.
    """
    paths = sorted(filter(Path.is_dir, (out / RATES).glob("*")))
    losses = {f"{RATES}/{path.name}": ended_loss(path) for path in paths}
    return {name: loss for name, loss in losses.items() if loss is not None}


def choose_all(study: Study, out: Path) -> list[ChosenRate]:
    if study.lr is None:
        return []
    ended = rate_losses(out)
    return [choose_from(study, arm, ended) for arm in study.arms]


def choose_from(study: Study, arm: str, losses_by_name: Mapping[str, float]) -> ChosenRate:
    """Choose for an arm the learning rate with the lowest mean loss over seeds.

    If the best rate is the smallest or largest of the grid, add one more rate at this end of the
    grid, at most `lr.extend` times. While runs of the grid have not ended, `lr` of the result is
    None and `wanted` lists these runs. `losses_by_name` contains the final losses of the runs that
    have ended; the loss of a diverged run is infinite.
    """
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


def next_runs(study: Study, out: Path) -> list[Planned]:
    """Return the runs of the current stage that have not ended.

    The first stage is the grid of learning rates, if the study has a grid. The second stage
    contains the runs that the study's rules compare.
    """
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


def first_runs(study: Study) -> list[Planned]:
    """Return, for each arm, the first run that the study's rules compare."""
    lr = study.lr.grid[0] if study.lr else None
    return [deciding_runs(study, arm, study.seeds[0], lr)[0] for arm in study.arms]
