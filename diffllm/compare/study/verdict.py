"""The verdict on a study's claim, from its runs and by its rule."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffllm.compare.report.notes import thin_note
from diffllm.compare.report.numbers import compact, ends
from diffllm.compare.report.rows import run_value
from diffllm.compare.report.runs import Run, load_run
from diffllm.compare.study.file import OF_THE_SUMMARY, Rule, Study
from diffllm.compare.study.planned_runs import (
    RATES,
    ChosenRate,
    Planned,
    choose_all,
    config_of_planned,
    deciding_runs,
    is_ended,
    read_mark,
    strayed,
)
from diffllm.config.plugins import several_versions
from diffllm.core.errors import ConfigError
from diffllm.data.progress import track
from diffllm.metrics.records import finite
from diffllm.metrics.table import metric_of
from diffllm.statistics.arm_comparison import ArmComparison, compare_arms, diverged_more
from diffllm.statistics.estimates import Estimate, Times, estimate, sooner
from diffllm.statistics.gap_tests import Gap, equivalence, holm


@dataclass
class StudyArm:
    name: str
    lr: float | None
    runs: list[Run] = field(default_factory=list)
    values: dict[int, float | None] = field(default_factory=dict)
    """By seed; None if it diverged."""
    missing: list[str] = field(default_factory=list)

    @property
    def diverged(self) -> int:
        return sum(run.final_loss is None for run in self.runs)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values.values() if value is not None]

    @property
    def mean(self) -> Estimate | None:
        return estimate(self.finite) if self.finite else None


def value_of(runs: list[Run], study: Study) -> float | None:
    """Return the number of a seed; None if it diverged. Raises ConfigError."""
    run = runs[0]
    if study.lr_sweep:
        value = lr_sensitivity([each.final_loss for each in runs], run.cfg.model.vocab_size)
    else:
        value = None if run.final_loss is None else number_of(run, study.metric)
    if value is None or study.scale == "linear":
        return value
    if value <= 0:
        raise ConfigError(f"{run.path}: {study.metric}={value:g} has no logarithm")
    return math.log(value)


def number_of(run: Run, name: str) -> float | None:
    """Return the final number of a run; None if not finite. Raises ConfigError if not logged."""
    if run.summary and name in run.summary:
        return finite(run.summary[name])
    metric = None if name in OF_THE_SUMMARY else metric_of(name)
    if metric and metric.column:
        value = run_value(run, metric)
    else:
        values = run.series(name).values
        value = float(values[-1]) if len(values) else None
    if value is None:
        raise ConfigError(f"{run.path} has no {name}")
    return value if math.isfinite(value) else None


def lr_sensitivity(losses: Sequence[float | None], vocab_size: int) -> float | None:
    """Return the mean over learning rates of min(loss, initial loss) - best loss, nats per token.

    From Wortsman et al. (arXiv:2309.14322). A diverged run counts as one that learned nothing; None
    if all diverged. The initial loss is the logarithm of the vocabulary's size.
    """
    initial = math.log(vocab_size)
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return None
    capped = [initial if loss is None else min(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(*finite, initial)


def times_of(study: Study, arm: StudyArm, rule: Rule) -> Times:
    assert rule.reaches is not None
    return Times.of(run.reached(study.metric, rule.reaches) for run in arm.runs)


def arm_numbers(arm: StudyArm) -> dict[str, Any]:
    mean, first = arm.mean, arm.runs[0] if arm.runs else None
    return {
        "variant": first and first.variant,
        **{fact: first and first.facts.get(fact) for fact in ("parameters", "flops_per_token")},
        "tokens": first and first.planned_tokens,
        "rates": sorted({run.cfg.optim.lr for run in arm.runs}),
        "lr": arm.lr,
        **{name: mean and getattr(mean, name) for name in ("mean", "low", "high")},
        "values": {str(seed): value for seed, value in arm.values.items()},
        "losses": {run.path.name: run.final_loss for run in arm.runs},
        "diverged": arm.diverged,
        "missing": arm.missing,
    }


SHOWN, REFUTED, EQUIVALENT = "shown", "refuted", "equivalent"
UNDERPOWERED, NOT_COMPARABLE, EXPLORATORY = "underpowered", "not comparable", "exploratory"
ALIKE = ("corpus", "tokenizer", "heldout_tokens", "compute_dtype")
"""Facts of run.json that must agree."""
FACTS = ("corpus", "python", "torch", "device", "ranks", "compute_dtype", "heldout_tokens")


@dataclass(frozen=True)
class Tested:
    rule: Rule
    outcome: ArmComparison
    gap: Gap | None
    p: float | None
    """One-sided."""
    times: tuple[Times, Times] | None = None
    p_adjusted: float | None = None
    """After Holm's correction."""
    verdict: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    study: Study
    verdict: str
    would_be: str
    """The verdict without the reasons that make it exploratory."""
    reasons: list[str]
    tested: list[Tested]
    arms: list[StudyArm]
    choices: list[ChosenRate]

    def numbers(self) -> dict[str, Any]:
        facts = [run.facts for arm in self.arms for run in arm.runs]
        facts = [
            {**each, "python": (each.get("environment") or {}).get("python")} for each in facts
        ]
        return {
            "verdict": self.verdict,
            "would_be": self.would_be,
            "reasons": self.reasons,
            **{key: getattr(self.study, key) for key in ("claim", "source", "metric", "scale")},
            "study": str(self.study.path),
            "hash": self.study.hash,
            "rules": [tested_numbers(each) for each in self.tested],
            "arms": {arm.name: arm_numbers(arm) for arm in self.arms},
            "learning_rates": {
                choice.arm: {
                    "lr": choice.lr,
                    "losses": {f"{lr:g}": finite(loss) for lr, loss in choice.losses.items()},
                }
                for choice in self.choices
            },
            "facts": {
                name: sorted({str(each[name]) for each in facts if each.get(name) is not None})
                for name in FACTS
            },
        }


def judge(study: Study, out: Path) -> Verdict:
    """Judge a study by its ended runs; raises ConfigError without any."""
    choices = choose_all(study, out)
    rates = {choice.arm: choice.lr for choice in choices}
    arms, planned = [StudyArm(name, rates.get(name)) for name in study.arms], []
    with track("reading runs", len(arms) * len(study.seeds)) as advance:
        for arm in arms:
            for seed in study.seeds:
                wanted = deciding_runs(study, arm.name, seed, arm.lr)
                ended = [out / run.name for run in wanted if is_ended(out / run.name)]
                runs = list(map(load_run, ended))
                arm.missing += [run.name for run in wanted if out / run.name not in ended]
                arm.runs += runs
                if len(runs) == len(wanted):
                    arm.values[seed] = value_of(runs, study)
                planned += wanted
                advance(1)
    if not any(arm.runs for arm in arms):
        start = shlex.join(["diffllm", "study", "run", str(study.path), f"out={out}"])
        raise ConfigError(f"{out} has no run of {study.path} that has ended; start with {start}")
    by_name = {arm.name: arm for arm in arms}
    tested = apply_rules(study, by_name)
    verdict, reasons = tested[0].verdict, [tested[0].reason]
    if problems := not_comparable(arms, choices, planned, out):
        verdict, reasons = NOT_COMPARABLE, problems
    would_be = verdict
    if problems := exploratory(study, arms, choices, out):
        verdict, reasons = EXPLORATORY, [*problems, *reasons]
    if study.lr_sweep or study.metric.startswith(("heldout_", "eval/loss")):
        reasons += filter(None, [thin_note(run for arm in arms for run in arm.runs)])
    return Verdict(study, verdict, would_be, reasons, tested, arms, choices)


def apply_rules(study: Study, arms: dict[str, StudyArm]) -> list[Tested]:
    found = []
    for rule in study.rules:
        own, base = arms[rule.arm], arms[rule.against]
        outcome = compare_arms(own.values, base.values)
        if rule.kind == "log_rank":
            times = times_of(study, own, rule), times_of(study, base, rule)
            found.append(Tested(rule, outcome, None, sooner(*times), times))
        else:
            gap = outcome.paired if study.test == "paired" else outcome.welch
            found.append(Tested(rule, outcome, gap, p_of(rule, outcome, gap)))
    adjusted = iter(holm([each.p for each in found if each.p is not None]))
    tested = []
    for each in found:
        p = None if each.p is None else next(adjusted)
        if each.times:
            verdict, reason = decide_times(each.rule, *each.times, p)
        else:
            verdict, reason = decide(study, each.rule, each.outcome, each.gap, p)
        tested.append(replace(each, p_adjusted=p, verdict=verdict, reason=reason))
    return tested


def decide_times(rule: Rule, own: Times, base: Times, p_adjusted: float | None) -> tuple[str, str]:
    said = "; ".join(
        f"{side.count} of {len(side.tokens)} runs of {name} reach it"
        + (f", half of them by {compact(side.median)} tokens" if side.median else "")
        for name, side in ((rule.arm, own), (rule.against, base))
    )
    if p_adjusted is None or min(len(own.tokens), len(base.tokens)) < 2:
        return UNDERPOWERED, f"{said}: no test"
    if p_adjusted < rule.alpha:
        return SHOWN, f"{said}, adjusted p {p_adjusted:.2g}"
    other = sooner(base, own)
    if other is not None and other < rule.alpha / 2:
        return REFUTED, f"{said}: {rule.against} is sooner, p {other:.2g}"
    return UNDERPOWERED, f"{said}: neither shown nor refuted"


def p_of(rule: Rule, outcome: ArmComparison, gap: Gap | None) -> float | None:
    """The one-sided p of a rule; 1 for what favours an arm that diverged more often."""
    if gap is None:
        return None
    if rule.margin is not None and rule.kind == "equivalence":
        found = equivalence(gap, rule.margin, rule.alpha)
        diverged = outcome.own.diverged or outcome.base.diverged
        return None if found is None else 1.0 if diverged else found.p
    p = gap.p_below(rule.below) if rule.below is not None else gap.p_above(rule.above or 0.0)
    return 1.0 if p is not None and outcome.favours_diverging else p


def decide(
    study: Study, rule: Rule, outcome: ArmComparison, gap: Gap | None, p_adjusted: float | None
) -> tuple[str, str]:
    """Return the verdict by one rule, and why."""
    diverged = outcome.own.diverged + outcome.base.diverged
    shares = (
        f"{outcome.own.diverged} of {outcome.own.runs} runs of {rule.arm} and "
        f"{outcome.base.diverged} of {outcome.base.runs} of {rule.against} diverged"
    )
    wants_lower = rule.above is None and rule.kind == "difference"
    worse = diverged and wants_lower and diverged_more(outcome.own, outcome.base)
    if worse and outcome.p_diverged < rule.alpha:
        return REFUTED, f"{shares} (Fisher's p {outcome.p_diverged:.2g})"
    interval = gap.interval(1 - rule.alpha) if gap else None
    if gap is None or interval is None:
        return UNDERPOWERED, "fewer than two seeds have a number in both arms"
    low, high = interval
    seeds = f"{gap.seeds} paired" if study.test == "paired" else f"{gap.seeds} and {gap.base_seeds}"
    mean = f"{rule.arm} minus {rule.against} is {gap.mean:+.4g} {study.unit}".rstrip()
    level = f"{100 * (1 - rule.alpha):g}% interval"
    said = f"{mean} ({level} {low:+.4g} to {high:+.4g}, {seeds} seeds)"
    if rule.kind == "difference" and p_adjusted is not None and p_adjusted < rule.alpha:
        return SHOWN, f"{said}, adjusted p {p_adjusted:.2g}"
    close = equivalence(gap, rule.margin, rule.alpha) if rule.margin is not None else None
    by_test = gap.zero_variance or rule.kind == "difference" or (p_adjusted or 0) < rule.alpha
    if close and close.inside and not diverged and by_test:
        return EQUIVALENT, f"{said}, within ±{rule.margin:g}"
    if gap.zero_variance:
        return UNDERPOWERED, f"{mean} in every seed: without variance nothing is shown"
    if rule.kind == "equivalence":
        refuted = rule.margin is not None and (low > rule.margin or high < -rule.margin)
    else:
        refuted = low > rule.below if rule.below is not None else high < (rule.above or 0.0)
    if refuted:
        return REFUTED, f"{said}: the interval lies wholly on the other side"
    return UNDERPOWERED, f"{said}{f'; {shares}' if diverged else ''}: neither shown nor refuted"


def not_comparable(
    arms: list[StudyArm], choices: list[ChosenRate], planned: list[Planned], out: Path
) -> list[str]:
    problems = [f"learning rate of {c.arm}: {c.problem}" for c in choices if c.problem]
    runs = [run for arm in arms for run in arm.runs]
    wanted = {out / each.name: each for each in planned}
    for run in runs:
        problem = strayed(run.path, run.cfg, config_of_planned(wanted[run.path]))
        problems += [f"{run.path.name} is not the run of the study: {problem}"] if problem else []
    notes = {str(note) for run in runs if (note := run.facts.get("corpus_note"))}
    problems += [f"corpus: {note}" for note in sorted(notes)]
    for name, versions in several_versions([run.plugin_code for run in runs]).items():
        problems.append(f"runs differ in the code of the plugin {name}: {', '.join(versions)}")
    for fact in ALIKE:
        known = sorted({str(run.facts.get(fact)) for run in runs})
        if len(known) > 1:
            problems.append(f"runs differ in {fact}: {', '.join(text[:12] for text in known)}")
    return problems


def exploratory(
    study: Study, arms: list[StudyArm], choices: list[ChosenRate], out: Path
) -> list[str]:
    marks = [run.cfg.run.study for arm in arms for run in arm.runs]
    if choices:
        marks += map(read_mark, filter(Path.is_dir, (out / RATES).glob("*")))
    edited = [mark for mark in marks if (mark or "").partition("/")[0] != study.hash]
    problems = []
    if edited:
        began = f"began under another version of {study.path.name}, or outside of a study"
        problems.append(f"{len(edited)} of {len(marks)} runs {began}")
    waiting = [name for arm in arms for name in arm.missing]
    waiting += [run.name for choice in choices for run in choice.wanted]
    if waiting:
        problems.append(f"{len(waiting)} runs have not ended: {', '.join(waiting[:3])}")
    return problems


def tested_numbers(tested: Tested) -> dict[str, Any]:
    rule, gap, other = tested.rule, tested.gap, tested.outcome
    interval = gap.interval(1 - rule.alpha) if gap else None
    return {
        **vars(rule),
        "verdict": tested.verdict,
        "reason": tested.reason,
        "gap": gap and gap.mean,
        "gap_low": interval and interval[0],
        "gap_high": interval and interval[1],
        "seeds": gap and gap.seeds,
        "p": tested.p,
        "p_adjusted": tested.p_adjusted,
        "seed_correlation": other.correlation,
        **ends("gap_welch", other.welch),
        "diverged": {rule.arm: other.own.diverged, rule.against: other.base.diverged},
    }
