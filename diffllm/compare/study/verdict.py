"""Compute the verdict of a study: apply the rules of the study to its ended runs."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.compare.arms.arm import runs_of
from diffllm.compare.arms.comparability import TOLERANCES, Comparand, Difference, differences
from diffllm.compare.arms.sentences import plural
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.costs import spending_numbers, spending_problems
from diffllm.compare.study.decision import Tested, apply_rules, tested_numbers
from diffllm.compare.study.declared_differences import undeclared
from diffllm.compare.study.evidence import Evidence, read_evidence
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import terms_of
from diffllm.compare.study.positions import unequal_positions
from diffllm.compare.study.rates import ChosenRate, choose_rates
from diffllm.compare.study.removed_rules import margin_note
from diffllm.compare.study.size_trends import unequal_pairs
from diffllm.config.plugin_code import several_versions
from diffllm.core.errors import ConfigError
from diffllm.core.run_facts import fact_declarations
from diffllm.core.run_files import finite

NOT_COMPARABLE, EXPLORATORY = "not comparable", "exploratory"


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
    evidence: Evidence
    differences: list[Difference]
    """Differences between the arms that the study declares or that have no influence."""

    def numbers(self) -> dict[str, Any]:
        """Return the content of verdict.json."""
        learning_rates = {}
        for choice in self.choices:
            losses = {}
            for lr, loss in choice.losses.items():
                losses[f"{lr:g}"] = finite(loss)  # JSON has no infinity for a diverged rate.
            learning_rates[choice.arm] = {"lr": choice.lr, "losses": losses}
        return {
            "verdict": self.verdict,
            "would_be": self.would_be,
            "reasons": self.reasons,
            "claim": self.study.claim,
            "source": self.study.source,
            "metric": self.study.metric,
            "scale": self.study.scale,
            "study": str(self.study.path),
            "hash": self.study.hash,
            "study_hash": self.evidence.hash_of(self.study),
            "unequal": self.study.unequal,
            "budget": spending_numbers(self.study, self.arms),
            "differences": [difference._asdict() for difference in self.differences],
            "rules": [tested_numbers(rule) for rule in self.tested],
            "arms": {arm.label: arm.numbers(self.study.limits) for arm in self.arms},
            "learning_rates": learning_rates,
            "facts": self.facts,
        }

    @property
    def facts(self) -> dict[str, list[str]]:
        """Values of each fact of run.json as text, except facts of the model size (TOLERANCES)."""
        texts = {}
        for name in fact_declarations():
            if name in TOLERANCES:
                continue
            distinct = set()
            for run in runs_of(self.arms):
                value = getattr(run.facts, name)
                if value is not None:
                    distinct.add(str(value))
            texts[name] = sorted(distinct)
        return texts


def judge(study: Study, out: Path) -> Verdict:
    """Return the verdict of a study from the ended runs in the directory `out`.

    Raises ConfigError if no run has ended.
    """
    evidence = read_evidence(study, out)
    if not evidence.runs:
        words = ["diffllm", "study", "run", str(study.path), f"out={out}"]
        start = shlex.join(words)
        raise ConfigError(f"{out} has no ended run of {study.path}; start its runs with: {start}")
    return judge_evidence(study, evidence)


def judge_evidence(study: Study, evidence: Evidence) -> Verdict:
    """Return the verdict of a study; `evidence` must contain at least one ended run."""
    choices = choose_rates(study, evidence.rates)
    rates = {choice.arm: choice.lr for choice in choices}
    arms_by_name = {}
    for name in study.arms:
        arms_by_name[name] = evidence.arm(study, name, rates.get(name))
    arms = list(arms_by_name.values())
    tested = apply_rules(study, arms_by_name)
    # Only the first rule decides the verdict; Holm's correction covers all rules.
    verdict, reasons = tested[0].verdict, [tested[0].reason]
    comparands = []
    for run in runs_of(arms):
        comparands.append(Comparand(run.arm, run.seed, run.conditions))
    differences_of_arms = differences(comparands, terms_of(study))
    problems = run_problems(arms, choices) + unequal_pairs(study, comparands)
    problems += spending_problems(study, arms) + undeclared(differences_of_arms)
    if problems:
        verdict, reasons = NOT_COMPARABLE, problems
    # Set before the exploratory reasons: the page of an exploratory study also states the verdict
    # without these reasons.
    would_be = verdict
    exploratory_reasons = exploratory(study, arms, choices, evidence)
    if exploratory_reasons:
        verdict, reasons = EXPLORATORY, [*exploratory_reasons, *reasons]
    reasons += notes_on_design(study, arms)
    allowed = [difference for difference in differences_of_arms if difference.role != "condition"]
    return Verdict(
        study=study,
        verdict=verdict,
        would_be=would_be,
        reasons=reasons,
        tested=tested,
        arms=arms,
        choices=choices,
        evidence=evidence,
        differences=allowed,
    )


def notes_on_design(study: Study, arms: list[StudyArm]) -> list[str]:
    """Return notes about too little held-out text and about keys of rules without effect."""
    notes = []
    if study.lr_sweep or study.metric.startswith(("heldout_", "eval/loss")):
        warnings = {run.thin for run in runs_of(arms)} - {""}
        notes += sorted(warnings)[:1]
    for rule in study.rules:
        # Studies that began under an older version can have rules with a margin.
        note = margin_note(rule)
        if note and note not in notes:
            notes.append(note)
    return notes


def run_problems(arms: list[StudyArm], choices: list[ChosenRate]) -> list[str]:
    """Return why runs cannot be compared, except differences between arms in keys and costs."""
    problems = []
    for choice in choices:
        if choice.problem:
            problems.append(f"learning rate of {choice.arm}: {choice.problem}")
    strayed = []
    corpus_notes = set()
    plugin_code = []
    position_settings = set()
    for run in runs_of(arms):
        plugin_code.append(run.plugin_code)
        if run.strayed:
            strayed.append(run)
        if run.facts.corpus_note:
            corpus_notes.add(run.facts.corpus_note)
        if run.positions:
            position_settings.add(run.position_settings)
    if strayed:
        first = strayed[0]
        problem = f"{first.name} is not the run of the study: {first.strayed}"
        if len(strayed) > 1:
            problem += f"; runs that differ from the study: {len(strayed)}"
        problems.append(problem)
    for note in sorted(corpus_notes):
        problems.append(f"corpus: {note}")
    for name, versions in several_versions(plugin_code).items():
        problems.append(f"runs differ in the code of the plugin {name}: {', '.join(versions)}")
    return problems + unequal_positions(position_settings)


def exploratory(
    study: Study, arms: list[StudyArm], choices: list[ChosenRate], evidence: Evidence
) -> list[str]:
    """Return the reasons why the claim was not fixed before all runs ended."""
    marks = [run.mark for run in runs_of(arms)]
    if choices:
        # The grid decides the learning rates, so its runs must also belong to this study.
        marks += evidence.rate_marks.values()
    # Each run saved the hash of its study before its first step.
    planned_hash = evidence.hash_of(study)
    edited = 0
    for mark in marks:
        saved_hash, _, _ = mark.partition("/")
        edited += saved_hash != planned_hash
    problems = []
    if edited:
        began = f"began under another version of {study.path.name}, or outside of a study"
        problems.append(f"{edited} of {len(marks)} runs {began}")
    waiting: list[str] = []
    for arm in arms:
        waiting += arm.missing
    for choice in choices:
        for run in choice.remaining:
            waiting.append(run.name)
    if waiting:
        verb = "has" if len(waiting) == 1 else "have"
        names = ", ".join(waiting[:3])
        problems.append(f"{plural(len(waiting), 'run')} {verb} not ended: {names}")
    return problems
