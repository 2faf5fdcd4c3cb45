"""Reasons why a verdict is "not comparable" or "exploratory"."""

from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.evidence import Evidence
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import ChosenRate
from diffllm.compare.study.unequal import undeclared
from diffllm.config.plugins import several_versions


def not_comparable(study: Study, arms: list[StudyArm], choices: list[ChosenRate]) -> list[str]:
    problems = [f"learning rate of {c.arm}: {c.problem}" for c in choices if c.problem]
    runs = [run for arm in arms for run in arm.runs]
    if strayed := [run for run in runs if run.strayed]:
        more = f"; so do {len(strayed) - 1} more runs" if len(strayed) > 1 else ""
        first = strayed[0]
        problems.append(f"{first.name} is not the run of the study: {first.strayed}{more}")
    notes = {str(note) for run in runs if (note := run.facts.get("corpus_note"))}
    problems += [f"corpus: {note}" for note in sorted(notes)]
    for name, versions in several_versions([run.plugin_code for run in runs]).items():
        problems.append(f"runs differ in the code of the plugin {name}: {', '.join(versions)}")
    conditions = {arm.name: [run.conditions for run in arm.runs] for arm in arms}
    problems += undeclared(conditions, study.unequal)
    return problems


def exploratory(
    study: Study, arms: list[StudyArm], choices: list[ChosenRate], evidence: Evidence
) -> list[str]:
    marks = [run.mark for arm in arms for run in arm.runs]
    if choices:
        marks += evidence.rate_marks.values()
    known = (
        evidence.hash_of(study),
        study.hash,
    )  # older versions stored the hash of the file
    edited = [mark for mark in marks if mark.partition("/")[0] not in known]
    problems = []
    if edited:
        began = f"began under another version of {study.path.name}, or outside of a study"
        problems.append(f"{len(edited)} of {len(marks)} runs {began}")
    waiting = [name for arm in arms for name in arm.missing]
    waiting += [run.name for choice in choices for run in choice.wanted]
    if waiting:
        problems.append(f"{len(waiting)} runs have not ended: {', '.join(waiting[:3])}")
    return problems
