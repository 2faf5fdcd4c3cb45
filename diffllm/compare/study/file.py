"""The study file: a claim, the runs that decide the claim, and the rules."""

import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path

from diffllm.compare.arms.comparable import Terms
from diffllm.compare.study.training_budget import (
    SecondsBudget,
    budget_profile,
    check_budget,
)
from diffllm.compare.study.unequal import allowed_names, check_unequal
from diffllm.compare.timing_profile import TimingProfile
from diffllm.config.overrides import check_shared
from diffllm.config.yaml_file import read_yaml
from diffllm.core.bounds import at_most, bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.typed import made
from diffllm.metrics.metric import possible_values
from diffllm.metrics.table import METRICS, metric_of
from diffllm.statistics.trend import FEWEST_POINTS

ARM = re.compile(r"(?!\.)[\w.+-]+")
BOUNDS = {
    "difference": ({"below"}, {"above"}, {"below", "margin"}, {"above", "margin"}),
    "equivalence": ({"margin"},),
    "log_rank": ({"reaches"},),
    "trend": ({"below"}, {"above"}),
}
"""Kinds of rules, and the bounds that each takes."""
TESTS = ("paired", "welch")
SCALES = ("linear", "log")
TOKENS, POSITION, PARAMETERS = OVER = ("tokens", "position", "parameters")
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
    kind: str
    """See docs/studies.md."""
    arm: str
    against: str
    below: float | None = None
    above: float | None = None
    margin: float | None = bounded(None, above=0)
    reaches: float | None = None
    """For log_rank: a level of a logged, rising metric."""
    over: str | None = None
    """For trend: parameters, or in studies of older versions tokens or position."""
    smaller: dict[str, str] = field(default_factory=dict)
    """For trend over parameters: smaller versions of `arm`, each with its version of `against`."""
    alpha: float = bounded(0.05, above=0, below=0.5)
    at: str = "tokens"
    """tokens, or in studies of older versions flops."""

    @property
    def needs_curve(self) -> bool:
        """Whether the rule uses values of the metric that were logged during training."""
        return self.kind == "log_rank"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [*self.smaller.items(), (self.arm, self.against)]

    def words(self, metric: str) -> str:
        own = f"{metric} of {self.arm}"
        if self.kind == "log_rank":
            base = f"{self.against} (log-rank permutation test, one-sided, alpha {self.alpha:g})"
            return f"{own} reaches {self.reaches:g} in fewer tokens than that of {base}"
        gap = f"{own} minus that of {self.against}"
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

    grid: list[float]
    seeds: list[int]
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


@dataclass(frozen=True)
class Study:
    claim: str
    base: list[str]
    arms: dict[str, list[str]]
    """Names to overrides."""
    baseline: str
    seeds: list[int]
    rule: Rule
    source: str = ""
    metric: str = "heldout_loss"
    """A number of summary.json, a logged metric, position/N, or lr_sensitivity."""
    scale: str = "linear"
    """linear, or log: gaps and bounds are of the logarithm."""
    also: list[Rule] = field(default_factory=list)
    """Further rules of the family that p is adjusted for."""
    test: str = "paired"
    """paired, or in studies of older versions welch."""
    unequal: list[str] = field(default_factory=list)
    """Words, keys, sections and facts in which arms may differ; see docs/studies.md."""
    lr: Rates | None = None
    lr_sweep: list[float] | None = None
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
    def allowed(self) -> list[str]:
        """Keys, sections and facts in which arms may differ."""
        return allowed_names(self.unequal)

    @property
    def measures_time(self) -> bool:
        """Whether the metric is a time, a speed or memory, which depends on the machine."""
        return self.metric.startswith(MACHINE_METRICS)

    @property
    def terms(self) -> Terms:
        """Terms of the comparison of the arms, without the budget's; see `terms_of`."""
        reads_curve = self.logged or any(rule.needs_curve for rule in self.rules)
        return Terms("study", self.allowed, self.measures_time, reads_curve)

    @property
    def quantity(self) -> str:
        return self.metric if self.scale == "linear" else f"log {self.metric}"

    @property
    def unit(self) -> str:
        """Unit of gaps; "" if the scale is "log" or the metric has no unit."""
        if self.scale == "log":
            return ""
        if self.metric == LR_SENSITIVITY or self.octave:
            return OF_THE_SUMMARY["heldout_loss"]
        return OF_THE_SUMMARY.get(self.metric) or metric_of(self.metric).unit

    @property
    def limits(self) -> tuple[float, float]:
        """Least and largest possible value of the metric, or of its logarithm if scale is "log"."""
        unit = replace(self, scale="linear").unit
        limits = possible_values(unit)
        if self.scale == "log":
            return -math.inf, math.log(limits[1])
        return limits

    @property
    def octave(self) -> int | None:
        """First position of the octave of the metric position/N; None for other metrics."""
        prefix, _, name = self.metric.rpartition("/")
        return int(name) if prefix == POSITION and name in OCTAVES else None

    @property
    def logged(self) -> bool:
        """Whether runs log the metric during training."""
        return not (self.metric in (*OF_THE_SUMMARY, LR_SENSITIVITY) or self.octave)

    @property
    def rules(self) -> list[Rule]:
        return [self.rule, *self.also]


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
                profile, profile_text = budget_profile(study.budget, path.parent, study.arms)
                text += profile_text
            else:
                study = replace(study, budget=TOKENS)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    digest = hashlib.sha256(text).hexdigest()
    return replace(study, path=path, profile=profile, hash=digest)


def check_study(study: Study) -> None:
    check_bounds("", study)
    check_numbers_of_runs(study)
    if len(study.arms) < 2:
        raise ConfigError(f"arms has {len(study.arms)} entries; a study needs at least two arms")
    for name, words in study.arms.items():
        if not ARM.fullmatch(name):
            raise ConfigError(
                f"arms: {name!r} must contain only letters, digits and _ . + - and must not start "
                "with a dot"
            )
        check_arm_overrides(f"arms.{name}", words, study.sets_rates)
    check_arm_overrides("base", study.base, study.sets_rates)
    named = [("baseline", study.baseline)]
    for i, rule in enumerate(study.rules):
        where = f"also[{i - 1}]" if i else "rule"
        check_rule(where, rule)
        named += [(f"{where}.arm", rule.arm), (f"{where}.against", rule.against)]
        named += [(f"{where}.smaller", name) for pair in rule.smaller.items() for name in pair]
    for where, arm in named:
        if arm not in study.arms:
            raise ConfigError(
                f"{where}={arm} is not one of the arms {', '.join(sorted(study.arms))}"
            )
    check_seeds("seeds", study.seeds, least=2)
    if any(rule.kind == "log_rank" for rule in study.rules) and (
        not study.logged or study.lr_sweep is not None
    ):
        raise ConfigError(
            f"kind=log_rank is not supported with metric={study.metric}"
            f"{' and lr_sweep' * bool(study.lr_sweep)}; use a metric that is logged during "
            "training, such as tasks/mqar, without lr_sweep"
        )
    check_budget_of_study(study)
    words = [*study.base, *chain.from_iterable(study.arms.values())]
    check_unequal(study.unequal, plugins=any(word.startswith("plugins=") for word in words))
    one_of("test", study.test, TESTS)
    one_of("scale", study.scale, SCALES)
    if study.lr_sweep is None:
        check_metric(study.metric)
    else:
        check_grid("lr_sweep", study.lr_sweep)
        if study.lr:
            raise ConfigError(
                "lr and lr_sweep cannot be combined: lr chooses one learning rate per arm, but "
                "lr_sweep compares all learning rates; remove one of them"
            )
        one_of("with lr_sweep, metric", study.metric, (LR_SENSITIVITY,))
    if study.lr:
        check_grid("lr.grid", study.lr.grid)
        check_seeds("lr.seeds", study.lr.seeds, least=1)
        if both := sorted({*study.lr.seeds} & {*study.seeds}):
            raise ConfigError(
                f"lr.seeds and seeds both contain {both}, but must not share a seed; use other "
                "seeds in lr.seeds"
            )


def check_numbers_of_runs(study: Study) -> None:
    grid, choosing = (study.lr.grid, study.lr.seeds) if study.lr else ([], [])
    sweep = study.lr_sweep or [0.0]
    lists = {"arms": study.arms, "also": study.also, "lr.grid": grid, "lr_sweep": sweep}
    lists |= {"base": study.base, **{f"arms.{arm}": words for arm, words in study.arms.items()}}
    for where, each in {**lists, "seeds": study.seeds, "lr.seeds": choosing}.items():
        most = MOST_SEEDS if where.endswith("seeds") else MOST_ENTRIES
        at_most(f"entries in {where}", len(each), most)
    runs = len(study.arms) * (len(study.seeds) * len(sweep) + len(choosing) * len(grid))
    at_most("runs (arms x seeds x learning rates)", runs, MOST_RUNS)


def check_rule(where: str, rule: Rule) -> None:
    one_of(f"{where}.kind", rule.kind, tuple(BOUNDS))
    for arm, against in rule.pairs:
        if arm == against:
            raise ConfigError(f"{where}: {arm} cannot be compared with itself")
    one_of(f"{where}.at", rule.at, ("tokens", "flops"))
    names = ("below", "above", "margin", "reaches")
    given = {name for name in names if getattr(rule, name) is not None}
    if given not in BOUNDS[rule.kind]:
        keys = ", or ".join(" with ".join(sorted(each)) for each in BOUNDS[rule.kind])
        found = ", ".join(filter(given.__contains__, names)) or "none of these keys"
        raise ConfigError(f"{where}: kind={rule.kind} must set {keys}, but sets {found}")
    check_trend(where, rule)


def check_trend(where: str, rule: Rule) -> None:
    if rule.kind == "trend":
        one_of(f"{where}.over", str(rule.over), OVER)
    elif rule.over is not None:
        raise ConfigError(f"{where}.over={rule.over} is allowed only with kind=trend")
    sizes = len(rule.smaller) + 1
    if rule.over == PARAMETERS and sizes < FEWEST_POINTS:
        example = "smaller: {v2_10m: standard_10m, v2_30m: standard_30m}"
        raise ConfigError(
            f"{where}: over={PARAMETERS} needs at least {FEWEST_POINTS} model sizes, but the "
            f"rule has {sizes}; add smaller versions of both arms, for example {example}"
        )
    if rule.over != PARAMETERS and rule.smaller:
        raise ConfigError(f"{where}.smaller is allowed only with over={PARAMETERS}")
    for side in zip(*rule.pairs, strict=True):
        if len({*side}) < len(side):
            raise ConfigError(
                f"{where}: {', '.join(side)} contains an arm twice; name each arm once"
            )


def check_budget_of_study(study: Study) -> None:
    check_budget(study.budget, study.base, study.arms, study.baseline)
    for rule in study.rules:
        if study.budget != TOKENS and rule.kind in ("log_rank", "trend"):
            raise ConfigError(f"kind={rule.kind} compares equal tokens; it needs budget=tokens")


def check_grid(where: str, grid: list[float]) -> None:
    if len(grid) < 2 or grid[0] <= 0 or any(b <= a for a, b in pairwise(grid)):
        raise ConfigError(f"{where}={grid} must be two or more increasing learning rates above 0")


def check_seeds(where: str, seeds: list[int], least: int) -> None:
    if len({*seeds}) < max(least, len(seeds)) or min(seeds) < 0:
        raise ConfigError(
            f"{where}={seeds} must list {least} or more seeds >= 0 without repetition"
        )


def check_arm_overrides(where: str, words: list[str], rates: bool) -> None:
    check_shared(words, where)
    for word in words:
        key, equals, _ = word.partition("=")
        key = key.lstrip("+~")
        if not equals:
            raise ConfigError(f"{where}: {word!r} is not of the form key=value")
        if key in ("seed", "run") or key.startswith("run.") or (rates and key == "optim.lr"):
            raise ConfigError(f"{where}: remove {word}, because the study itself sets {key}")


def one_of(where: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{where}={value} is not one of {', '.join(known)}")


def check_metric(name: str) -> None:
    if name == LR_SENSITIVITY:
        raise ConfigError(
            f"metric={name} needs the key lr_sweep; add learning rates, such as "
            "lr_sweep: [0.001, 0.002]"
        )
    if name.startswith(AT_POSITION):
        octave = name.removeprefix(AT_POSITION)
        if octave not in OCTAVES:
            raise ConfigError(
                f"metric={name} must be {AT_POSITION}N, with N a power of 2 up to 2^26"
            )
        return
    try:
        name in OF_THE_SUMMARY or metric_of(name)
    except ConfigError:
        known = [
            *OF_THE_SUMMARY,
            f"{AT_POSITION}1024",
            *(metric.quantity for metric in METRICS if metric.column),
        ]
        raise ConfigError(f"metric={name} is not one of {', '.join(known)}") from None
