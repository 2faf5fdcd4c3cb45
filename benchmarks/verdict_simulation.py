"""Simulate studies with known truth, and count false verdicts and missed intervals.

    python benchmarks/verdict_simulation.py [FAMILIES] [OUT.json]

Each family is a study with three arms and three rules, judged as in `study verdict`. A scenario
defines the distribution of the arms' numbers. The script prints, per scenario and number of seeds:

- shown: share of families in which a rule is "shown" or "equivalent" although its claim is false;
- refuted: share of families in which a rule is "refuted" although its opposite is false;
- lower, upper: share of the one-sided 95% bounds of the first rule that contain the true gap.

Without a true difference, both "shown" and "refuted" are false. An arm that diverges more often
counts as worse, regardless of the losses of its other runs. The exit status is 1 if a share of
false verdicts is above 5%, or a share of bounds is outside 93% to 97%, by more than two standard
errors.

The last rows show the effect of looking early: a study of one rule, without a true difference, is
judged after several numbers of seeds, and the first "shown" or "refuted" counts. Shares above 5%
are expected, and do not change the exit status.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.compare.study.arms import StudyArm, StudyRun, Texts
from diffllm.compare.study.decision import (
    EQUIVALENT,
    REFUTED,
    SHOWN,
    UNEQUAL,
    apply_rules,
)
from diffllm.compare.study.file import Rule, Study
from diffllm.evaluation.heldout import DocumentLosses

SEED, FAMILIES = 20_261_126, 2000
SD, MARGIN, ALPHA = 0.01, 0.02, 0.05
NAMES = ("v2", "half", "standard")
EVALUATIONS = np.arange(100, 2001, 100)

BOUNDS: dict[tuple[str, str], dict[str, Any]] = {
    ("difference", "difference"): {"below": 0.0},
    ("equivalence", "equivalence"): {"margin": MARGIN},
    ("log_rank", "log_rank"): {"reaches": 0.9},
    ("two kinds", "difference"): {"below": 0.0},
    ("two kinds", "equivalence"): {"margin": MARGIN},
}
"""Settings of a rule by the kinds of scenario and rule."""

Rng = np.random.Generator


@dataclass(frozen=True)
class Scenario:
    """Distribution of the values of each arm, (seeds,), around its true mean."""

    gaps: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """True mean of each arm, in units of SD."""
    sds: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Deviation between seeds, in units of SD."""
    correlation: float = 0.0
    """Correlation between arms over seeds."""
    digits: int | None = None
    """Decimal places to which values are rounded, which makes ties; None: no rounding."""
    diverging: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Probability that a run of each arm diverges."""
    kind: str = "difference"
    documents: float | None = None
    """Deviation of losses between documents, in units of SD; None: no losses of documents."""
    covers: bool = field(default=True)
    """Whether bounds are exact in theory, so that the coverage must also be at most 97%."""


SCENARIOS = {
    "null": Scenario(),
    "null, correlated seeds": Scenario(correlation=0.8),
    "null, unequal variance": Scenario(sds=(3.0, 1.0, 0.3)),
    "null, ties": Scenario(digits=2, covers=False),
    "small gap": Scenario(gaps=(-0.5, 0.0, 0.5)),
    "large gap": Scenario(gaps=(-3.0, 0.0, 3.0)),
    "large gap, unequal variance": Scenario(gaps=(-3.0, 0.0, 3.0), sds=(3.0, 1.0, 0.3)),
    "null, all arms diverge": Scenario(diverging=(0.3, 0.3, 0.3)),
    "null, one arm diverges": Scenario(diverging=(0.5, 0.0, 0.0)),
    "better, but diverges": Scenario(gaps=(-3.0, 0.0, 3.0), diverging=(0.5, 0.0, 0.0)),
    "gap of the margin": Scenario(gaps=(-2.0, 0.0, 2.0), kind="equivalence"),
    "null, equivalence": Scenario(kind="equivalence"),
    "null, documents vary": Scenario(documents=3.0, covers=False),
    "log-rank, null": Scenario(kind="log_rank"),
    "log-rank, sooner": Scenario(gaps=(-2.0, 0.0, 2.0), kind="log_rank"),
    "log-rank, sooner, but diverges": Scenario(
        gaps=(-2.0, 0.0, 2.0), diverging=(0.5, 0.0, 0.0), kind="log_rank"
    ),
    "gap of the margin, two kinds": Scenario(gaps=(2.0, 0.0, 0.0), kind="two kinds"),
}

LOOKS = {"8": (8,), "3, 5, 8": (3, 5, 8), "5 to 20": tuple(range(5, 21))}
"""Numbers of seeds after which a study is judged."""


def study_of(scenario: Scenario, seeds: int) -> Study:
    pairs = [("v2", "half"), ("v2", "standard"), ("half", "standard")]
    kinds = [scenario.kind] * 3
    if scenario.kind == "two kinds":
        kinds = ["difference", "equivalence", "difference"]
    rules = [
        Rule(kind, arm, against, **BOUNDS[scenario.kind, kind], alpha=ALPHA)
        for kind, (arm, against) in zip(kinds, pairs, strict=True)
    ]
    metric = "tasks/mqar" if scenario.kind == "log_rank" else "heldout_loss"
    return Study(
        "", [], {name: [] for name in NAMES}, "standard", [*range(seeds)], rules[0], metric=metric,
        also=rules[1:],
    )  # fmt: skip


def draw(scenario: Scenario, seeds: int, rng: Rng) -> tuple[dict[str, StudyArm], dict[str, float]]:
    """Draw the arms of a family; return the arms, and the true mean of each arm."""
    common = rng.normal(size=seeds)
    share = scenario.correlation
    texts = rng.normal(size=(len(NAMES), 24)) * (scenario.documents or 0.0) * SD
    arms, truth = {}, {}
    for i, name in enumerate(NAMES):
        own = math.sqrt(share) * common + math.sqrt(1 - share) * rng.normal(size=seeds)
        truth[name] = SD * scenario.gaps[i]
        values = 4 + truth[name] + SD * scenario.sds[i] * own
        if scenario.digits is not None:
            values = values.round(scenario.digits)
        lost = rng.random(seeds) < scenario.diverging[i]
        runs = []
        for seed, value in enumerate(values):
            curve: dict[str, Any] = {}
            documents: dict[str, Any] = {}
            if scenario.documents is not None:
                losses = losses_of(value + texts[i])
                documents = {"texts": Texts.of(losses), "nats": losses.nats.tolist()}
                value = losses.loss
            if scenario.kind == "log_rank":
                reach = 1000 * math.exp((value - 4) / SD / 2)  # a larger value is reached later
                levels = np.where(reach <= EVALUATIONS, 0.95, 0.3)
                curve = {"tokens": EVALUATIONS.tolist(), "values": levels.tolist()}
            number = None if lost[seed] else float(value)
            run = StudyRun(name, name, seed, 1e-3, number, number, 2000, 4096, **curve, **documents)
            runs.append(run)
        arms[name] = arm_of(name, runs)
    return arms, truth


def arm_of(name: str, runs: list[StudyRun]) -> StudyArm:
    return StudyArm(name, {run.seed: run.value for run in runs}, runs=runs)


def losses_of(losses: np.ndarray) -> DocumentLosses:
    tokens, n = np.full(len(losses), 100), len(losses)
    return DocumentLosses(losses * tokens, tokens, tokens, np.arange(n), np.zeros(n, np.int64))


def simulate(scenario: Scenario, seeds: int, families: int, rng: Rng) -> dict[str, Any]:
    """Return the shares of false verdicts, and of confidence bounds that contain the true gap."""
    study = study_of(scenario, seeds)
    diverging = dict(zip(NAMES, scenario.diverging, strict=True))
    shown = refuted = within = lower = upper = judged = decided = 0
    for _ in range(families):
        arms, truth = draw(scenario, seeds, rng)
        false = [False] * 3
        tested = apply_rules(study, arms)
        for each in tested:
            rule, verdict = each.rule, each.verdict
            gap = truth[rule.arm] - truth[rule.against]
            worse = diverging[rule.arm] - diverging[rule.against]
            close = abs(gap) < MARGIN and not worse
            if rule.kind == "equivalence":
                claim, opposite = close, abs(gap) > MARGIN or bool(worse)
            else:
                claim, opposite = gap < 0 and worse <= 0, gap > 0 or worse > 0
            says_close = verdict in (EQUIVALENT, UNEQUAL)
            false[0] |= (verdict == SHOWN or says_close) and not claim
            false[1] |= verdict == REFUTED and not opposite
            false[2] |= says_close and not close
            decided += verdict in (SHOWN, EQUIVALENT, UNEQUAL, REFUTED)
        shown, refuted, within = shown + false[0], refuted + false[1], within + false[2]
        if bounds := tested[0].bounds:
            gap = truth["v2"] - truth["half"]
            lower, upper = lower + (bounds[0] <= gap), upper + (bounds[1] >= gap)
            judged += 1
    share = {"shown": shown / families, "refuted": refuted / families}
    if any(rule.margin is not None for rule in study.rules):
        share |= {"within": within / families}
    share |= {"decided": decided / families / len(study.rules)}
    if judged:
        share |= {"lower": lower / judged, "upper": upper / judged, "judged": judged}
    return share


def simulate_looks(looks: tuple[int, ...], families: int, rng: Rng) -> dict[str, float]:
    """Return the shares of studies without a difference of which a look is "shown" or "refuted".

    Args:
        looks: numbers of seeds after which a study is judged, in increasing order.
    """
    study = replace(study_of(Scenario(), looks[-1]), also=[])
    counts = {SHOWN: 0, REFUTED: 0}
    for _ in range(families):
        arms, _ = draw(Scenario(), looks[-1], rng)
        verdicts = set()
        for seeds in looks:
            seen = {name: arm_of(name, arm.runs[:seeds]) for name, arm in arms.items()}
            verdicts.add(apply_rules(study, seen)[0].verdict)
        for verdict in counts:
            counts[verdict] += verdict in verdicts
    return {verdict: count / families for verdict, count in counts.items()}


def problems(
    scenario: Scenario, found: dict[str, Any], families: int, errors: float = 2.0
) -> list[str]:
    """Return the names of shares that exceed the limits by more than `errors` standard errors."""
    wrong = []
    error = errors * math.sqrt(ALPHA * (1 - ALPHA) / families)
    sides = ("shown", "refuted", "within")
    wrong += [side for side in sides if found.get(side, 0.0) > ALPHA + error]
    if "lower" in found:
        error = errors * math.sqrt(ALPHA * (1 - ALPHA) / found["judged"])
        most = 0.97 + error if scenario.covers else 1.0
        wrong += [end for end in ("lower", "upper") if not 0.93 - error <= found[end] <= most]
    return wrong


def run(
    families: int, echo: Callable[[str], None] = print, errors: float = 2.0
) -> list[dict[str, Any]]:
    """Simulate all scenarios, each with its own random generator."""
    echo(f"{'scenario':<34}seeds  shown  refuted  decided   lower   upper")
    rows = []
    for i, (name, scenario) in enumerate(SCENARIOS.items()):
        for seeds in (5, 8):
            rng = np.random.default_rng((SEED, i, seeds))
            found = simulate(scenario, seeds, families, rng)
            wrong = problems(scenario, found, families, errors)
            ends = [f"{found[end]:8.3f}" for end in ("lower", "upper") if end in found]
            echo(
                f"{name:<34}{seeds:>5}{found['shown']:7.3f}{found['refuted']:9.3f}"
                f"{found['decided']:9.3f}{''.join(ends)}  {', '.join(wrong)}".rstrip()
            )
            rows.append({"scenario": name, "seeds": seeds, **found, "beyond_limits": wrong})
    return rows


def run_looks(families: int, echo: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Simulate each entry of LOOKS with its own random generator."""
    echo(f"\n{'judged after seeds':<39}  shown  refuted")
    rows = []
    for i, (name, looks) in enumerate(LOOKS.items()):
        shares = simulate_looks(looks, families, np.random.default_rng((SEED, len(SCENARIOS), i)))
        echo(f"{name:<39}{shares[SHOWN]:7.3f}{shares[REFUTED]:9.3f}")
        rows.append({"seeds": list(looks), **shares})
    return rows


def main() -> int:
    families = int(sys.argv[1]) if len(sys.argv) > 1 else FAMILIES
    rows = run(families)
    looks = run_looks(families)
    if len(sys.argv) > 2:
        content = {
            "seed": SEED, "families": families, "alpha": ALPHA, "rows": rows, "looks": looks
        }  # fmt: skip
        Path(sys.argv[2]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(row["beyond_limits"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
