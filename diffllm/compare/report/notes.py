"""Sentences of a report about its runs: sizes, held-out text, settings and problems."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from diffllm.compare.arms.arm import RunArm
from diffllm.compare.arms.comparable import (
    ATTENTION,
    HASH,
    disagrees,
    shown_value,
    value_text,
)
from diffllm.compare.arms.directories import shortlist
from diffllm.compare.arms.heldout import HELDOUT, HELDOUT_SPLIT
from diffllm.compare.arms.run import Run, skipped_text
from diffllm.compare.arms.sentences import (
    finite,
    plural,
    range_text,
    two_digits,
)
from diffllm.compare.report.keys import (
    FACTS,
    HEADLINE,
    SEEDS,
    all_declarations,
    default_values,
    differs,
    keys_of_fact,
    overrides,
)
from diffllm.compare.report.results import NAMED, progress, size_against
from diffllm.compare.report.rows import Row
from diffllm.config.changes import is_within
from diffllm.core.keys import declaration_of
from diffllm.evaluation.heldout import same_documents
from diffllm.metrics.facts import fact_declarations, facts_of, machine_facts

TOLERANCE = 0.005
"""Relative difference in parameters above which a note warns."""
COMPUTE_OPTIMAL = 20
"""Tokens per parameter of compute-optimal training (Hoffmann et al., 2022, arXiv 2203.15556,
"Chinchilla"). A run with fewer tokens is called early training."""


def run_notes(run: Run) -> list[str]:
    notes = []
    if run.changes:
        changes = "; ".join(run.changes)
        notes.append(f"{run.path} has no gap: its config changed during training ({changes}).")
    if run.diverged:
        why = "its held-out loss is not finite"
        if run.gave_up:
            where = f"step {run.last_step} of {run.cfg.steps}"
            why = f"it stopped at {where}, because too many updates in a row were skipped"
        notes.append(f"{run.path} diverged: {why}; losses and gaps exclude it.")
    elif run.summary is None:
        unfinished = f"has not finished: {progress(run)}"
        why = "was imported and not trained here" if "imported" in run.facts else unfinished
        notes.append(f"{run.path} {why}; the numbers of the table exclude it.")
    if run.metrics.skipped:
        notes.append(f"{skipped_text(run.path, run.metrics.skipped)}.")
    return notes


def fact_notes(runs: list[Run]) -> list[str]:
    facts = []
    for fact in FACTS:
        # Runs of older versions lack these facts, and can be compared with each other.
        is_new = fact in (HELDOUT, "torch")
        if not is_new or any(run.facts.get(fact) for run in runs):
            facts.append(fact)
    missing: dict[str, list[str]] = {}
    for run in runs:
        if unknown := [fact for fact in facts if run.facts.get(fact) is None]:
            missing.setdefault(", ".join(unknown), []).append(str(run.path))
    return [
        f"{shortlist(paths, NAMED)}: run.json does not record {unknown}. These runs have no "
        "gap to runs that do; among themselves, their config keys are compared instead."
        for unknown, paths in missing.items()
    ]


def parameter_notes(gaps: list[tuple[RunArm, RunArm]]) -> list[str]:
    notes = []
    for row, base in gaps:
        size, other = (each.fact("parameters") for each in (row, base))
        if not size or not other or abs(size / other - 1) <= TOLERANCE:
            continue
        advice, models = "", [each.runs[0].cfg.model for each in (row, base)]
        if not any(model.match_params_to or model.match_flops_to for model in models):
            larger = (row if size > other else base).runs[0].variant
            advice = f"; model.match_params_to={larger} makes runs of equal size"
        notes.append(f"{row.label} has {size_against(row, base)} than {base.label}{advice}.")
    return notes


def length_notes(gaps: list[tuple[RunArm, RunArm]]) -> list[str]:
    """Return a note about compared rows that train on different numbers of tokens."""
    labels = []
    for row, base in gaps:
        lengths = {run.planned_tokens for run in (*row.runs, *base.runs)}
        if len(lengths) > 1:
            labels.append(row.label)
    if not labels:
        return []
    return [
        f"Not at equal tokens: {shortlist(labels, NAMED)}. A budget in FLOPs or seconds determines "
        "the lengths of these rows and of their baseline."
    ]


def document_warnings(gaps: list[tuple[RunArm, RunArm]]) -> list[str]:
    """Return a warning about gaps whose runs of a seed have losses of different documents."""
    warnings = []
    for arm, base in gaps:
        common = arm.documents.keys() & base.documents.keys()
        if not all(same_documents(arm.documents[s], base.documents[s]) for s in common):
            warnings.append(
                f"The gap of {arm.label} to {base.label} is not at equal evaluation: their final "
                "losses were measured on different held-out documents."
            )
    return warnings


def speed_notes(runs: list[Run]) -> list[str]:
    values = []
    for run in runs:
        # Older versions did not record some facts; a missing fact is not a difference.
        facts = {name: fact for name, fact in vars(facts_of(run.facts)).items() if fact is not None}
        values.append(run.config | facts)
    declared = all_declarations(runs)
    speed_keys = [name for name, key in declared.items() if key.effect == "speed"]
    names = sorted({*machine_facts(), *speed_keys})
    texts = []
    for name in names:
        recorded = [run_values for run_values in values if name in run_values]
        if differs(name, recorded):
            different = sorted({shown_value(run_values[name]) for run_values in recorded})
            texts.append(f"{name} ({', '.join(different)})")
    if not texts:
        return []
    return [f"Tokens per second and MFU are not comparable: the runs differ in {', '.join(texts)}."]


def code_notes(rows: Sequence[RunArm]) -> list[str]:
    """Return a note if rows were trained by different versions of diffllm's source files.

    Versions may differ between seeds, if the runs of each seed have the same version.
    """
    versions = []
    rows_by_version: dict[str, list[str]] = {}
    for row in rows:
        for run in row.runs:
            version = (facts_of(run.facts).code or "unknown")[:HASH]
            versions.append((row.label, run.cfg.seed, version))
            labels = rows_by_version.setdefault(version, [])
            if row.label not in labels:
                labels.append(row.label)
    if not disagrees(versions):
        return []
    texts = [
        f"{version} ({shortlist(labels, NAMED)})" for version, labels in rows_by_version.items()
    ]
    return [f"Rows were trained by different versions of diffllm's code: {', '.join(texts)}."]


def settings(rows: list[Row]) -> dict[str, str]:
    """Return the values of the settings of all runs, as text, by key or fact.

    These are the keys in HEADLINE, then all keys that decide numbers, order or a measurement and
    are not at their default in every run, then facts.
    """
    runs = [run for row in rows for run in row.runs]
    by_run = [settings_of(run) for run in runs]
    keys = [key for key in all_declarations(runs) if key not in fact_declarations()]
    order = {name: place for place, name in enumerate(dict.fromkeys((*HEADLINE, *keys)))}
    names = sorted(
        {name for values in by_run for name in values},
        key=lambda name: (order.get(name, len(order)), name),
    )
    texts = {}
    for name in names:
        shown: list[str] = []
        for run, values in zip(runs, by_run, strict=True):
            value = values.get(name, run.config.get(name))
            if value not in (None, [], ""):
                shown.append(value_text(name, value))
        if shown:
            texts[name] = " or ".join(dict.fromkeys(shown))
    return texts


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings of one run that are not at their default, by key or fact.

    The training corpus of a run that `diffllm import` created is not known: its fact is "unknown",
    and the config keys of the corpus have the value None.
    """
    defaults = default_values()
    values: dict[str, Any] = {"model": run.cfg.resolved.choices["model"]}
    for name, value in run.config.items():
        declared = declaration_of(name, run.declarations)
        # A mixture can have 500 sources; config.yaml lists them.
        if declared.harmless or name in SEEDS or is_within(name, ["resolved", "data.sources"]):
            continue
        if name.startswith(ATTENTION) or declared.effect == "logging":
            continue
        default = defaults.get(name)
        if declared.follows:
            default = run.config.get(declared.follows)
        if name in HEADLINE or value != default:
            values[name] = value
    values |= overrides(run)
    facts = vars(facts_of(run.facts))
    for name in (*FACTS, *machine_facts()):
        values[name] = facts[name]
    values[HELDOUT_SPLIT] = run.facts.get(HELDOUT_SPLIT)
    if "imported" in run.facts:
        for name in keys_of_fact("corpus", run.declarations):
            values[name] = None
        values["corpus"] = "unknown"
    git = run.facts.get("git")
    if isinstance(git, dict) and isinstance(commit := git.get("commit"), str):
        changes = ", with uncommitted changes" if git.get("dirty") else ""
        values["commit"] = f"{commit[:12]}{changes}"
    return values


def runs_summary(rows: list[Row]) -> str:
    runs = [run for row in rows for run in row.runs]
    finished = sum(run.summary is not None for run in runs)
    seeds = "/".join(dict.fromkeys(str(len(row.runs)) for row in rows))
    count = f"{plural(len(rows), 'row')} × {seeds} seed{'s' * (seeds != '1')}"
    tokens = [run.planned_tokens for run in runs]
    sentence = (
        f"{count}: {finished} of {plural(len(runs), 'run')} finished; {range_text(tokens)} tokens "
        "per run"
    )
    return ", ".join(filter(None, [sentence, training_length(runs)])) + "."


def training_length(runs: Collection[Run]) -> str:
    """Return a text such as "0.31 tokens per parameter (early training: fewer than 20)".

    If the sizes of the models are unknown, return "".
    """
    ratios = tokens_per_parameter(runs)
    if not ratios:
        return ""
    early = f" (early training: fewer than {COMPUTE_OPTIMAL})" if is_early(runs) else ""
    return f"{range_text(ratios, two_digits)} tokens per parameter{early}"


def is_early(runs: Collection[Run]) -> bool:
    ratios = tokens_per_parameter(runs)
    return bool(ratios) and max(ratios) < COMPUTE_OPTIMAL


def tokens_per_parameter(runs: Iterable[Run]) -> list[float]:
    """Return the ratios of complete runs; in mixtures of experts, active parameters count."""
    ratios = []
    for run in runs:
        size = finite(run.facts.get("active_parameters")) or finite(run.facts.get("parameters"))
        if size:
            ratios.append(run.planned_tokens / size)
    return ratios
