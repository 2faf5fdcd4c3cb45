"""The study file: a claim, the runs that decide the claim, and the rules."""

import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from diffllm.compare.study.declared_differences import check_unequal
from diffllm.compare.timing_profile import SecondsBudget, TimingProfile
from diffllm.config.compose import LENGTHS
from diffllm.config.overrides import check_shared
from diffllm.config.yaml_file import read_yaml
from diffllm.core.bounds import at_most, bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.typed import made
from diffllm.metrics.metric import possible_values
from diffllm.metrics.table import METRICS, metric_of
from diffllm.statistics.trend import FEWEST_POINTS

ARM = re.compile(r"(?!\.)[\w.+-]+")
RULE_KEYS = {
    "difference": ({"below"}, {"above"}, {"below", "margin"}, {"above", "margin"}),
    "equivalence": ({"margin"},),
    "log_rank": ({"reaches"},),
    "trend": ({"over", "below"}, {"over", "above"}),
}
"""Kinds of rules, and the keys that each takes."""
TOKENS, POSITION, PARAMETERS = TREND_AXES = ("tokens", "position", "parameters")
FLOPS = "flops"
OF_THE_SUMMARY = {
    "heldout_loss": "nats per token", "heldout_bits_per_byte": "bits per byte",
    "train_loss": "nats per token", "tokens_per_s": "tokens per second", "seconds": "seconds",
}  # fmt: skip
"""Numbers of summary.json, and their units."""
LR_SENSITIVITY, TASKS = "lr_sensitivity", "tasks/"
AT_POSITION = f"{POSITION}/"
"""Prefix of the metrics position/N: held-out loss at the positions N to 2N - 1 of documents."""
MACHINE_METRICS = ("tokens_per_s", "seconds", "train_seconds", "wall_seconds", "perf/")
"""Prefixes of metrics that depend on the machine."""
LOWER_IS_BETTER = (
    "heldout_", "train_loss", "train/loss", "eval/loss", "seconds", LR_SENSITIVITY, AT_POSITION,
)  # fmt: skip
HIGHER_IS_BETTER = (TASKS, "tokens_per_s", "perf/tokens_per_s", "perf/mfu")
"""Prefixes of metrics; for other metrics neither direction is better."""
OCTAVES = tuple(str(2**n) for n in range(27))
MOST_SEEDS, MOST_ENTRIES, MOST_RUNS = 1000, 100, 10_000


@dataclass(frozen=True)
class Rule:
    kind: str = field(metadata={"choices": tuple(RULE_KEYS)})
    """See docs/studies.md."""
    arm: str
    against: str
    below: float | None = None
    above: float | None = None
    margin: float | None = bounded(None, above=0)
    reaches: float | None = None
    """For log_rank: a level of a logged, rising metric."""
    over: str | None = bounded(None, choices=TREND_AXES)
    """For trend: parameters, or in studies of older versions tokens or position."""
    smaller: dict[str, str] = field(default_factory=dict)
    """For trend over parameters: smaller versions of `arm`, each with its version of `against`."""
    alpha: float = bounded(0.05, above=0, below=0.5)
    at: str = bounded("tokens", choices=("tokens", "flops"))
    """tokens, or in studies of older versions flops."""

    @property
    def needs_curve(self) -> bool:
        """Whether the rule uses values of the metric that were logged during training."""
        return self.kind == "log_rank"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [*self.smaller.items(), (self.arm, self.against)]

    def statement(self, metric: str) -> str:
        candidate = f"{metric} of {self.arm}"
        if self.kind == "log_rank":
            base = f"{self.against} (log-rank permutation test, one-sided, alpha {self.alpha:g})"
            return f"{candidate} reaches {self.reaches:g} in fewer tokens than that of {base}"
        gap = f"{candidate} minus that of {self.against}"
        if self.kind == "equivalence":
            return f"{gap} is within ±{self.margin:g} (two one-sided tests, alpha {self.alpha:g})"
        side, bound = ("below", self.below) if self.above is None else ("above", self.above)
        if self.kind == "trend":
            gap = f"slope per doubling of {self.over} of {gap}"
        return f"{gap} is {side} {bound:g} (one-sided, alpha {self.alpha:g})"


@dataclass(frozen=True)
class Rates:
    """The key `lr` of a study file: each arm uses the learning rate with the lowest loss in `grid`.

    Runs of the grid have other seeds than the compared runs. `steps` is the length of the runs of
    the grid; None means the length of the compared runs. If the best rate is the first or last of
    `grid`, up to `extend` further rates are tried at this end.
    """

    grid: list[float] = field(metadata={"above": 0, "entries": MOST_ENTRIES})
    seeds: list[int] = field(metadata={"least": 0, "entries": MOST_SEEDS})
    steps: int | None = bounded(None, least=1)
    extend: int = bounded(3, least=0, most=20)


@dataclass(frozen=True)
class Power:
    """The key `power` of a study file: numbers from which the study's power is computed.

    `gap` is the true gap that the study should find, and `sd` the standard deviation of an arm's
    metric between seeds. `source` says where `sd` comes from.
    """

    gap: float = field(metadata={"above": 0})
    sd: float = field(metadata={"above": 0})
    source: str = ""


@dataclass(frozen=True, eq=False)
class Study:
    claim: str
    base: list[str]
    arms: dict[str, list[str]] = field(metadata={"entries": MOST_ENTRIES})
    """Names to overrides."""
    baseline: str
    seeds: list[int] = field(metadata={"least": 0, "entries": MOST_SEEDS})
    rule: Rule
    source: str = ""
    metric: str = "heldout_loss"
    """A number of summary.json, a logged metric, position/N, or lr_sensitivity."""
    scale: str = bounded("linear", choices=("linear", "log"))
    """linear, or log: gaps and bounds are of the logarithm."""
    also: list[Rule] = field(default_factory=list, metadata={"entries": MOST_ENTRIES})
    """Further rules of the family that p is adjusted for."""
    test: str = bounded("paired", choices=("paired", "welch"))
    """paired, or in studies of older versions welch."""
    unequal: list[str] = field(default_factory=list)
    """Words, keys, sections and facts in which arms may differ; see docs/studies.md."""
    lr: Rates | None = None
    lr_sweep: list[float] | None = bounded(None, above=0, entries=MOST_ENTRIES)
    """Increasing learning rates at which all arms run."""
    budget: str | SecondsBudget = TOKENS
    """Cost of training that is equal in all arms: tokens, flops, or seconds of a profile."""
    power: Power | None = None
    notes: str = ""
    path: Path = Path()
    profile: TimingProfile | None = None
    """Content of `budget.profile`; None unless the budget is in seconds."""
    hash: str = ""
    """SHA-256 of the file, followed by the profile if there is one; hexadecimal."""

    @property
    def sets_rates(self) -> bool:
        return self.lr is not None or self.lr_sweep is not None

    @property
    def measures_time(self) -> bool:
        """Whether the metric is a time, a speed or memory, which depends on the machine."""
        return self.metric.startswith(MACHINE_METRICS)

    @property
    def quantity(self) -> str:
        return self.metric if self.scale == "linear" else f"log {self.metric}"

    @property
    def unit(self) -> str:
        """Unit of gaps; "" if the scale is "log" or the metric has no unit."""
        return "" if self.scale == "log" else self.metric_unit

    @property
    def metric_unit(self) -> str:
        if self.metric == LR_SENSITIVITY or self.octave:
            return OF_THE_SUMMARY["heldout_loss"]
        return OF_THE_SUMMARY.get(self.metric) or metric_of(self.metric).unit

    @property
    def limits(self) -> tuple[float, float]:
        """Least and largest possible value of the metric, or of its logarithm if scale is "log"."""
        low, high = possible_values(self.metric_unit)
        if self.scale == "linear":
            return low, high
        return -math.inf, math.log(high)

    @property
    def octave(self) -> int | None:
        """First position of the octave of the metric position/N; None for other metrics."""
        prefix, _, name = self.metric.rpartition("/")
        if prefix == POSITION and name in OCTAVES:
            return int(name)
        return None

    @property
    def logged(self) -> bool:
        """Whether runs log the metric during training."""
        return not (self.metric in (*OF_THE_SUMMARY, LR_SENSITIVITY) or self.octave)

    @property
    def rules(self) -> list[Rule]:
        return [self.rule, *self.also]

    @property
    def named_rules(self) -> list[tuple[str, Rule]]:
        """The keys of all rules in the study file, and the rules."""
        rules = [("rule", self.rule)]
        for i, rule in enumerate(self.also):
            rules.append((f"also[{i}]", rule))
        return rules


def better(metric: str) -> int:
    """Return 1 if larger values of a metric are better, -1 if smaller values are, else 0."""
    return metric.startswith(HIGHER_IS_BETTER) - metric.startswith(LOWER_IS_BETTER)


def load_study(path: Path, is_timed: bool = True) -> Study:
    """Read and check a study file; raises ConfigError if the file or its profile is invalid.

    `is_timed=False` is for the measurement of the profile of a budget in seconds. The profile may
    then be missing, and all arms have the lengths of their configs.
    """
    content, text = read_yaml(path)
    profile = None
    try:
        study = made(Study, content, strict=True, omit=("path", "profile", "hash"))
        check_study(study)
        if isinstance(study.budget, SecondsBudget):
            if is_timed:
                profile, profile_text = study.budget.read(path.parent, study.arms)
                # The hash covers the profile, which decides the steps of the arms.
                text += profile_text
            else:
                study = replace(study, budget=TOKENS)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    digest = hashlib.sha256(text).hexdigest()
    return replace(study, path=path, profile=profile, hash=digest)


def check_study(study: Study) -> None:
    check_bounds("", study)
    if len(study.arms) < 2:
        raise ConfigError(f"arms has {len(study.arms)} entries; a study needs at least two arms")
    check_overrides("base", study.base, study.sets_rates)
    for name, words in study.arms.items():
        if not ARM.fullmatch(name):
            raise ConfigError(
                f"arms: {name!r} must contain only letters, digits and _ . + - and must not start "
                "with a dot"
            )
        check_overrides(f"arms.{name}", words, study.sets_rates)
    named = [("baseline", study.baseline)]
    for key, rule in study.named_rules:
        check_rule(study, key, rule)
        named += [(f"{key}.arm", rule.arm), (f"{key}.against", rule.against)]
        for arm, against in rule.smaller.items():
            named += [(f"{key}.smaller", arm), (f"{key}.smaller", against)]
    for key, arm in named:
        if arm not in study.arms:
            raise ConfigError(f"{key}={arm} is not one of the arms {', '.join(sorted(study.arms))}")
    overrides = chain(study.base, *study.arms.values())
    has_plugins = any(word.startswith("plugins=") for word in overrides)
    check_unequal(study.unequal, plugins=has_plugins)
    check_budget(study)
    check_seeds_and_rates(study)
    check_metric(study)


def check_rule(study: Study, key: str, rule: Rule) -> None:
    names = ("over", "below", "above", "margin", "reaches")
    present = [name for name in names if getattr(rule, name) is not None]
    if set(present) not in RULE_KEYS[rule.kind]:
        choices = [" with ".join(sorted(keys)) for keys in RULE_KEYS[rule.kind]]
        listing = ", ".join(present) or "none of these keys"
        raise ConfigError(
            f"{key}: kind={rule.kind} must set {', or '.join(choices)}, but sets {listing}"
        )
    for arm, against in rule.pairs:
        if arm == against:
            raise ConfigError(f"{key}: {arm} cannot be compared with itself")
    sizes = len(rule.smaller) + 1
    if rule.over == PARAMETERS and sizes < FEWEST_POINTS:
        example = "smaller: {v2_10m: standard_10m, v2_30m: standard_30m}"
        raise ConfigError(
            f"{key}: over={PARAMETERS} needs at least {FEWEST_POINTS} model sizes, but the "
            f"rule has {sizes}; add smaller versions of both arms, for example {example}"
        )
    if rule.over != PARAMETERS and rule.smaller:
        raise ConfigError(f"{key}.smaller is allowed only with over={PARAMETERS}")
    # The arms on the side of `arm`, then those on the side of `against`.
    for side in zip(*rule.pairs, strict=True):
        if len({*side}) < len(side):
            raise ConfigError(f"{key}: {', '.join(side)} contains an arm twice; name each arm once")
    if rule.kind == "log_rank" and not (study.logged and study.lr_sweep is None):
        sweep = " and lr_sweep" if study.lr_sweep else ""
        raise ConfigError(
            f"kind=log_rank is not supported with metric={study.metric}{sweep}; use a metric that "
            "is logged during training, such as tasks/mqar, without lr_sweep"
        )
    if rule.kind in ("log_rank", "trend") and study.budget != TOKENS:
        raise ConfigError(f"kind={rule.kind} compares equal tokens; it needs budget=tokens")


def check_budget(study: Study) -> None:
    """Raise ConfigError for an unknown budget, and for lengths that the budget would replace."""
    if study.budget == TOKENS:
        return
    places = {f"arms.{arm}": words for arm, words in study.arms.items()}
    if isinstance(study.budget, SecondsBudget):
        name = "budget.seconds"
        places = {"base": study.base, **places}
    else:
        name = f"budget={study.budget}"
        if study.budget != FLOPS:
            raise ConfigError(
                f"{name} is not one of {TOKENS}, {FLOPS}, or a mapping such as "
                "{seconds: 600, profile: timing.json}"
            )
        # The length of the baseline determines the budget.
        del places[f"arms.{study.baseline}"]
    for place, words in places.items():
        for word in words:
            if word.partition("=")[0].lstrip("+~") in LENGTHS:
                raise ConfigError(f"{place}: remove {word}, because {name} sets the steps")


def check_seeds_and_rates(study: Study) -> None:
    runs = len(study.seeds)
    check_seeds("seeds", study.seeds, least=2)
    if study.lr_sweep is not None:
        check_grid("lr_sweep", study.lr_sweep)
        runs *= len(study.lr_sweep)
    if study.lr:
        check_grid("lr.grid", study.lr.grid)
        check_seeds("lr.seeds", study.lr.seeds, least=1)
        runs += len(study.lr.grid) * len(study.lr.seeds)
        common_seeds = sorted({*study.lr.seeds} & {*study.seeds})
        if common_seeds:
            raise ConfigError(
                f"lr.seeds and seeds both contain {common_seeds}, but must not share a seed; use "
                "other seeds in lr.seeds"
            )
    if study.lr and study.lr_sweep is not None:
        raise ConfigError(
            "lr and lr_sweep cannot be combined: lr chooses one learning rate per arm, but "
            "lr_sweep compares all learning rates; remove one of them"
        )
    at_most("runs (arms x seeds x learning rates)", len(study.arms) * runs, MOST_RUNS)


def check_grid(key: str, grid: list[float]) -> None:
    if len(grid) < 2 or sorted({*grid}) != grid:
        raise ConfigError(f"{key}={grid} must be two or more increasing learning rates")


def check_seeds(key: str, seeds: list[int], least: int) -> None:
    if len({*seeds}) < max(least, len(seeds)):
        raise ConfigError(f"{key}={seeds} must list {least} or more seeds without repetition")


def check_overrides(place: str, words: list[str], study_sets_lr: bool) -> None:
    at_most(f"entries in {place}", len(words), MOST_ENTRIES)
    check_shared(words, place)
    for word in words:
        key, equals, _ = word.partition("=")
        key = key.lstrip("+~")
        if not equals:
            raise ConfigError(f"{place}: {word!r} is not of the form key=value")
        is_set = key == "optim.lr" and study_sets_lr
        if is_set or key in ("seed", "run") or key.startswith("run."):
            raise ConfigError(f"{place}: remove {word}, because the study itself sets {key}")


def check_metric(study: Study) -> None:
    name = study.metric
    if (name == LR_SENSITIVITY) != (study.lr_sweep is not None):
        raise ConfigError(
            f"metric={name} and lr_sweep={study.lr_sweep}: metric={LR_SENSITIVITY} needs learning "
            "rates, such as lr_sweep: [0.001, 0.002], and lr_sweep needs this metric"
        )
    if name.startswith(AT_POSITION):
        if study.octave is None:
            raise ConfigError(
                f"metric={name} must be {AT_POSITION}N, with N a power of 2 up to 2^26"
            )
    elif study.logged:
        try:
            metric_of(name)
        except ConfigError:
            choices = [*OF_THE_SUMMARY, f"{AT_POSITION}1024"]
            for metric in METRICS:
                if metric.column:
                    choices.append(metric.quantity)
            raise ConfigError(f"metric={name} is not one of {', '.join(choices)}") from None
