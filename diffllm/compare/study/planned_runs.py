"""The planned runs of a study, with their stages and learning rates.

With the key `lr`, a study first runs a grid of learning rates. The deciding runs follow: the runs
that the study's rules compare.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from diffllm.compare.arms.comparability import Terms, starting_point
from diffllm.compare.study.declared_differences import allowed_names
from diffllm.compare.study.file import FLOPS, TOKENS, Study
from diffllm.compare.timing_profile import SecondsBudget
from diffllm.config import TrainConfig
from diffllm.config.changes import is_fixed
from diffllm.config.compose import LENGTHS
from diffllm.config.loading import check_keys_of_flops, solved
from diffllm.config.matching import totals
from diffllm.config.origin import compose_with_origin
from diffllm.config.saved import Counts, changes_to, flatten, load_run_config
from diffllm.config.schema import ContextError
from diffllm.config.words import typed_override
from diffllm.core.errors import ConfigError
from diffllm.core.run_files import RunFile, diverged, read_summary

DECIDING, RATES = "deciding", "rates"


@dataclass(frozen=True)
class Planned:
    """A run in the plan of a study.

    `stage` is "rates" (grid of learning rates) or "deciding". `name` is the run directory relative
    to the study's directory. If `lr` is None, the config determines the learning rate.
    """

    stage: str
    arm: str
    seed: int
    lr: float | None
    name: str
    arm_words: tuple[str, ...]
    """Overrides of the arm, without seed and learning rate."""

    @property
    def words(self) -> list[str]:
        """All overrides of the run."""
        words = [*self.arm_words, f"seed={self.seed}"]
        if self.lr is not None:
            words.append(f"optim.lr={self.lr!r}")  # repr keeps all digits.
        return words


def deciding_runs(study: Study, arm: str, seed: int, lr: float | None) -> list[Planned]:
    """Return the runs of one arm and seed that the study's rules compare.

    This is a single run, or with `lr_sweep` one run per learning rate. If the learning rate `lr` is
    None, the arm's config sets the learning rate.
    """
    words = words_of_arm(study, arm)
    if study.lr_sweep is None:
        return [Planned(DECIDING, arm, seed, lr, f"{arm}-seed{seed}", words)]
    runs = []
    for rate in study.lr_sweep:
        name = f"{arm}-lr{rate:g}-seed{seed}"
        runs.append(Planned(DECIDING, arm, seed, rate, name, words))
    return runs


def rate_run(study: Study, arm: str, seed: int, lr: float) -> Planned:
    assert study.lr
    words = words_of_arm(study, arm, study.lr.steps)
    return Planned(RATES, arm, seed, lr, f"{RATES}/{arm}-lr{lr:g}-seed{seed}", words)


@cache
def words_of_arm(study: Study, arm: str, baseline_steps: int | None = None) -> tuple[str, ...]:
    """Return the overrides of an arm, without its seed and learning rate.

    Args:
        baseline_steps: steps of the baseline arm, if they differ from those of its compared runs.
    """
    overrides = (*study.base, *study.arms[arm])
    steps = baseline_steps
    if study.budget != TOKENS:
        steps = steps_of_arm(study, arm, baseline_steps)
    if steps is None:
        return overrides
    words = []
    for word in overrides:
        # Another override of the length, such as max_tokens, would contradict the steps.
        if word.partition("=")[0] not in LENGTHS:
            words.append(word)
    return (*words, f"steps={steps}")


def steps_of_arm(study: Study, arm: str, baseline_steps: int | None = None) -> int:
    """Return the steps of an arm that cost the study's budget in FLOPs or seconds.

    Raises ConfigError if the budget is less than one step. For `baseline_steps`, see
    `words_of_arm`.
    """
    cost = cost_of_step(study, arm)
    if isinstance(study.budget, SecondsBudget) and baseline_steps is None:
        amount = study.budget.seconds
    else:
        steps = baseline_steps or config_before_budget(study, study.baseline).steps
        amount = steps * cost_of_step(study, study.baseline)
    # A quotient of equal costs can be rounded.
    if amount < cost * (1 - 1e-9):
        raise ConfigError(
            f"arm {arm}: the budget of a run, {amount:.3g}, is less than one training step, "
            f"{cost:.3g} (FLOPs or seconds)"
        )
    return round(amount / cost)


def cost_of_step(study: Study, arm: str) -> float:
    """Return the FLOPs or seconds of a training step in a study with such a budget.

    Raises ConfigError if the config does not determine the FLOPs.
    """
    if study.profile:
        return study.profile.arm(arm).seconds_per_step
    cfg = config_before_budget(study, arm)
    with errors_of_arm(arm):
        check_keys_of_flops(cfg, f"budget={FLOPS}")
    flops_per_token = totals(cfg.model, cfg.visible_keys)["flops"]
    return cfg.global_batch_size * cfg.seq_len * flops_per_token


def config_before_budget(study: Study, arm: str) -> TrainConfig:
    """Return the config of an arm with the length of its overrides."""
    # Any rate: the learning rate changes no length and no cost.
    lr = 1.0 if study.sets_rates else None
    words = (*study.base, *study.arms[arm])
    return config_of_planned(Planned(DECIDING, arm, 0, lr, arm, words))


def terms_of(study: Study) -> Terms:
    """Return the terms of the comparison of the study's arms.

    A budget in FLOPs or seconds declares tokens and FLOPs per token. It also declares keys such as
    optim.warmup_steps, if they follow the steps in every arm.
    """
    reads_curve = study.logged or any(rule.needs_curve for rule in study.rules)
    terms = Terms("study", allowed_names(study.unequal), study.measures_time, reads_curve)
    if study.budget == TOKENS:
        return terms
    following = []
    for words in study.arms.values():
        overrides = (*study.base, *words)
        following.append(interpolated_keys(overrides, study.sets_rates, "${of_steps:"))
    # A key that follows the steps only in some arms is compared like other keys.
    names = sorted(set.intersection(*following))
    allowed = [*terms.allowed, "tokens", "flops_per_token", *names]
    return terms._replace(allowed=allowed)


def planned_by_name(
    study: Study, rates: Mapping[str, float | None] | None = None
) -> dict[str, Planned]:
    """Return all runs that the study's rules compare, by run name.

    Args:
        rates: chosen learning rates by arm, which the names of the runs do not contain.
    """
    runs = {}
    for arm in study.arms:
        lr = rates.get(arm) if rates else None
        for seed in study.seeds:
            for run in deciding_runs(study, arm, seed, lr):
                runs[run.name] = run
    return runs


def first_runs(study: Study, seed: int | None = None) -> list[Planned]:
    """Return, for each arm, the first run of a seed that the study's rules compare.

    The default is the first seed.
    """
    lr = study.lr.grid[0] if study.lr else None
    if seed is None:
        seed = study.seeds[0]
    return [deciding_runs(study, arm, seed, lr)[0] for arm in study.arms]


def config_of_planned(planned: Planned) -> TrainConfig:
    """Return the complete config of a planned run; raises ConfigError if the config is invalid."""
    words = (*planned.arm_words, "run.report=false")
    with errors_of_arm(planned.arm):
        seeded = interpolated_keys(words, planned.lr is not None, "seed")
        # One solved config serves all seeds, unless a further key follows the seed.
        seed = planned.seed if seeded - {"model.init_seed"} else 0
        cfg = solved_config(words, planned.lr, seed)
    init_seed = planned.seed if "model.init_seed" in seeded else cfg.model.init_seed
    # `replace` copies, because the solved config is cached and serves all seeds.
    model = replace(cfg.model, init_seed=init_seed)
    return replace(cfg, seed=planned.seed, model=model)


@contextmanager
def errors_of_arm(arm: str) -> Iterator[None]:
    """Name the arm in a ConfigError."""
    try:
        yield
    except ContextError:  # `configs_of` combines these errors of all arms
        raise
    except ConfigError as error:
        raise ConfigError(f"arm {arm}: {error}") from error


@lru_cache(4096)
def solved_config(overrides: tuple[str, ...], lr: float | None, seed: int) -> TrainConfig:
    """Return the complete config of an arm with the seed `seed` and the learning rate `lr`.

    If `lr` is None, the arm keeps the learning rate of its config. The result is cached and
    shared, so callers must not change the result.
    """
    config = config_of_arm(overrides, lr is not None)
    # `config` is cached too, so each call sets both keys that differ between calls.
    config.seed = seed
    if lr is not None:
        config.optim.lr = lr
    return solved(config, [*overrides])


@cache
def interpolated_keys(overrides: tuple[str, ...], study_sets_lr: bool, source: str) -> set[str]:
    """Return the config keys of an arm with an interpolation that contains the text `source`.

    The interpolation of a key that follows the seed is "${seed}", for example.
    """
    config = config_of_arm(overrides, study_sets_lr)
    content = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    values = flatten(content)  # type: ignore[arg-type]
    keys = set()
    for name, value in values.items():
        text = str(value)
        if "${" in text and source in text:
            keys.add(name)
    return keys


@cache
def config_of_arm(overrides: tuple[str, ...], study_sets_lr: bool) -> DictConfig:
    """Compose the config of an arm; cached, because Hydra needs 0.1 s per config.

    The default of eval.tokens is null here: "auto" would give arms of unequal length unequal
    documents.
    """
    words = [*overrides, "seed=0"]
    if study_sets_lr:
        words.append("optim.lr=1.0")
    config = compose_with_origin(words)
    is_default = OmegaConf.is_interpolation(config.eval, "tokens")
    if is_default and not any(word.startswith("eval.tokens=") for word in overrides):
        config.eval.tokens = None
    return config


def start_words(planned: Planned, out: Path, digest: str) -> list[str]:
    """Return the overrides that start or resume a planned run.

    `out` is the directory of the study's runs, and `digest` is the hash of the study. A new run
    records this hash in `run.study`.
    """
    path = out / planned.name
    mark = f"{digest}/{planned.stage}/{planned.arm}"
    if (path / RunFile.CONFIG).is_file():
        # A resumed run keeps the hash of its start: a verdict compares it with the study.
        mark = load_run_config(path).run.study or ""
    words = [*planned.words, "run.report=false"]
    if config_of_planned(planned).eval.tokens is None:
        # The default of studies, which differs from that of `diffllm train`.
        words.insert(0, "eval.tokens=null")
    words.append(typed_override("run.dir", str(path)))
    words.append(typed_override("run.study", mark))
    return words


def is_ended(path: Path) -> bool:
    return read_summary(path) is not None or diverged(path)


def strayed(run_path: Path, saved: TrainConfig, planned: Planned, counts: Counts = is_fixed) -> str:
    """Describe the differences between the saved and the planned config of a run.

    Only differences that count are described. If there are no differences, return a note if the
    config changed during the run, and "" if it did not.
    """
    cfg = config_of_planned(planned)
    changes = changes_to(saved, cfg, counts)
    # The planned config has no mark of the study.
    changes.pop("run.study", None)
    if starting_point(saved, run_path) != starting_point(cfg):
        changes["resume"] = (saved.resume, cfg.resume)
    if not changes and (run_path / RunFile.CHANGES).exists():
        return "its config changed during the run"
    texts = [f"{key} is {value}, not {plan}" for key, (value, plan) in changes.items()]
    return ", ".join(texts)
