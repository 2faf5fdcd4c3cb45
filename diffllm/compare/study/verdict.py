"""Compute the verdict of a study: apply the rules of the study to its ended runs."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.budgets import EqualGaps, equal_gaps
from diffllm.compare.study.comparability import exploratory, not_comparable
from diffllm.compare.study.decision import apply_rules, tested_numbers
from diffllm.compare.study.evidence import Evidence, read_evidence
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import ChosenRate
from diffllm.compare.study.rule_tests import Tested
from diffllm.core.errors import ConfigError
from diffllm.metrics.records import finite

NOT_COMPARABLE, EXPLORATORY = "not comparable", "exploratory"
FACTS = ("corpus", "python", "torch", "device", "ranks", "code", "compute_dtype", "heldout_tokens")


@dataclass(frozen=True)
class Verdict:
    """The verdict of a study, the reasons for the verdict, and the underlying results."""

    study: Study
    verdict: str
    would_be: str
    """The verdict if the study were not exploratory; equal to `verdict` for other studies."""
    reasons: list[str]
    tested: list[Tested]
    """One test result per rule."""
    arms: list[StudyArm]
    choices: list[ChosenRate]
    """The chosen learning rate of each arm; empty unless the study has the key `lr`."""
    equal: list[EqualGaps]
    """Loss gaps between arms at equal tokens, parameters and FLOPs."""
    evidence: Evidence

    def numbers(self) -> dict[str, Any]:
        facts = [run.facts for arm in self.arms for run in arm.runs]
        return {
            "verdict": self.verdict,
            "would_be": self.would_be,
            "reasons": self.reasons,
            **{key: getattr(self.study, key) for key in ("claim", "source", "metric", "scale")},
            "study": str(self.study.path),
            "hash": self.study.hash,
            "study_hash": self.evidence.hash_of(self.study),
            "unequal": self.study.unequal,
            "rules": [tested_numbers(each) for each in self.tested],
            "equal": [each.numbers() for each in self.equal],
            "arms": {arm.name: arm.numbers() for arm in self.arms},
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
    """Return the verdict of a study from the ended runs in the directory `out`.

    Raises ConfigError if no run has ended.
    """
    evidence = read_evidence(study, out)
    if not evidence.runs:
        start = shlex.join(["diffllm", "study", "run", str(study.path), f"out={out}"])
        raise ConfigError(f"{out} has no ended run of {study.path}; start its runs with: {start}")
    return judge_evidence(study, evidence)


def judge_evidence(study: Study, evidence: Evidence) -> Verdict:
    """Return the verdict of a study; `evidence` must contain at least one ended run."""
    choices = evidence.choices(study)
    arms = evidence.arms(study, choices)
    by_name = {arm.name: arm for arm in arms}
    tested = apply_rules(study, by_name)
    verdict, reasons = tested[0].verdict, [tested[0].reason]
    if problems := not_comparable(study, arms, choices):
        verdict, reasons = NOT_COMPARABLE, problems
    would_be = verdict
    if problems := exploratory(study, arms, choices, evidence):
        verdict, reasons = EXPLORATORY, [*problems, *reasons]
    if study.lr_sweep or study.metric.startswith(("heldout_", "eval/loss")):
        reasons += sorted({run.thin for arm in arms for run in arm.runs if run.thin})[:1]
    equal = equal_gaps(study, by_name)
    return Verdict(study, verdict, would_be, reasons, tested, arms, choices, equal, evidence)
