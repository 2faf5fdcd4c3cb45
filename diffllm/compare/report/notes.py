"""Sentences of a report about its runs: sizes, held-out text, problems, and how to read a page."""

from collections.abc import Collection, Iterable, Sequence

from diffllm.compare.arms.arm import RunArm, have_equal_tokens, runs_of
from diffllm.compare.arms.comparability import HASH, disagrees, shown_value
from diffllm.compare.arms.heldout import HELDOUT, heldout_text
from diffllm.compare.arms.run import Run, skipped_text
from diffllm.compare.arms.run_search import shortlist
from diffllm.compare.arms.sentences import (
    MISSING,
    finite,
    plural,
    range_text,
    two_digits,
)
from diffllm.compare.report.curves import POINTS
from diffllm.compare.report.keys import FACTS, all_declarations
from diffllm.compare.report.results import NAMED, has_intervals, progress, size_against
from diffllm.compare.report.rows import Row
from diffllm.core.run_facts import facts_of, machine_facts
from diffllm.evaluation.heldout import same_documents

SIZE_TOLERANCE = 0.005
"""Relative difference in parameters above which a note warns."""
COMPUTE_OPTIMAL = 20
"""Tokens per parameter of compute-optimal training (Hoffmann et al., 2022, arXiv 2203.15556,
"Chinchilla"). A run with fewer tokens is called early training."""


def run_notes(run: Run) -> list[str]:
    """Return notes about the problems of one run, which are reasons why numbers exclude it."""
    notes = []
    if run.changes:
        changes = "; ".join(run.changes)
        notes.append(f"{run.path} has no gap: its config changed during training ({changes}).")
    if run.diverged:
        reason = "its held-out loss is not finite"
        if run.gave_up:
            reason = (
                f"it stopped at step {run.last_step} of {run.cfg.steps}, because too many updates "
                "in a row were skipped"
            )
        notes.append(f"{run.path} diverged: {reason}; losses and gaps exclude it.")
    elif run.summary is None:
        state = f"has not finished: {progress(run)}"
        if "imported" in run.facts:
            state = "was imported and not trained here"
        notes.append(f"{run.path} {state}; the numbers of the table exclude it.")
    if run.metrics.skipped:
        notes.append(f"{skipped_text(run.path, run.metrics.skipped)}.")
    return notes


def fact_notes(runs: list[Run]) -> list[str]:
    """Return a note about the runs that lack the same facts, for each set of missing facts."""
    facts = []
    for fact in FACTS:
        # Runs of older versions lack these facts, and can be compared with each other.
        is_new = fact in (HELDOUT, "torch")
        if not is_new or any(run.facts.get(fact) for run in runs):
            facts.append(fact)
    missing: dict[str, list[str]] = {}
    for run in runs:
        unrecorded = ", ".join(fact for fact in facts if run.facts.get(fact) is None)
        if unrecorded:
            missing.setdefault(unrecorded, []).append(str(run.path))
    notes = []
    for unrecorded, paths in missing.items():
        notes.append(
            f"{shortlist(paths, NAMED)}: run.json does not record {unrecorded}. These runs have no "
            "gap to runs that do; among themselves, their config keys are compared instead."
        )
    return notes


def parameter_notes(gaps: list[tuple[RunArm, RunArm]]) -> list[str]:
    """Return a note about each row whose model is larger or smaller than that of its baseline."""
    notes = []
    for row, base in gaps:
        size = row.fact("parameters")
        base_size = base.fact("parameters")
        if not size or not base_size or abs(size / base_size - 1) <= SIZE_TOLERANCE:
            continue
        advice = ""
        models = [arm.runs[0].cfg.model for arm in (row, base)]
        # The advice would not help a model that is already matched.
        if not any(model.match_params_to or model.match_flops_to for model in models):
            larger = row if size > base_size else base
            advice = f"; model.match_params_to={larger.variant} makes runs of equal size"
        notes.append(f"{row.label} has {size_against(row, base)} than {base.label}{advice}.")
    return notes


def length_notes(gaps: list[tuple[RunArm, RunArm]]) -> list[str]:
    """Return a note about compared rows that train on different numbers of tokens."""
    labels = [row.label for row, base in gaps if not have_equal_tokens(row, base)]
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
        if not all(same_documents(arm.documents[key], base.documents[key]) for key in common):
            warnings.append(
                f"The gap of {arm.label} to {base.label} is not at equal evaluation: their final "
                "losses were measured on different held-out documents."
            )
    return warnings


def speed_notes(runs: list[Run]) -> list[str]:
    """Return a note about the machines and keys that make the speeds of runs incomparable."""
    values_of_runs = []
    for run in runs:
        values = dict(run.config)
        for name, fact in vars(facts_of(run.facts)).items():
            # Older versions did not record some facts; a missing fact is not a difference.
            if fact is not None:
                values[name] = fact
        values_of_runs.append(values)
    names = set(machine_facts())
    for name, declared in all_declarations(runs).items():
        if declared.effect == "speed":
            names.add(name)
    texts = []
    for name in sorted(names):
        shown_values = set()
        for values in values_of_runs:
            if name in values:
                shown_values.add(shown_value(values[name]))
        if len(shown_values) > 1:
            texts.append(f"{name} ({', '.join(sorted(shown_values))})")
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
    texts = []
    for version, labels in rows_by_version.items():
        texts.append(f"{version} ({shortlist(labels, NAMED)})")
    return [f"Rows were trained by different versions of diffllm's code: {', '.join(texts)}."]


def runs_summary(rows: list[Row]) -> str:
    """Return the numbers of rows, seeds and finished runs, and the tokens per run, as a text."""
    runs = runs_of(rows)
    finished = sum(run.summary is not None for run in runs)
    tokens = range_text([run.planned_tokens for run in runs])
    # Rows can have different numbers of seeds, such as "3/2 seeds".
    numbers_of_seeds = [str(len(row.runs)) for row in rows]
    seeds = "/".join(dict.fromkeys(numbers_of_seeds))
    unit = "seed" if seeds == "1" else "seeds"
    text = (
        f"{plural(len(rows), 'row')} × {seeds} {unit}: "
        f"{finished} of {plural(len(runs), 'run')} finished; "
        f"{tokens} tokens per run"
    )
    length = training_length(runs)
    if length:
        text += f", {length}"
    return f"{text}."


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
    """Return whether all runs have fewer tokens per parameter than compute-optimal training."""
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


def reading_terms(rows: list[Row]) -> list[tuple[str, str]]:
    """Return pairs of a term and its explanation for the page of these rows."""
    runs = runs_of(rows)
    terms = [
        (
            "Held-out loss",
            f"Cross-entropy of {heldout_text(runs)} after the last step, in nats per token. A "
            "token's cross-entropy is minus the logarithm of its predicted probability; lower is "
            "better. Word frequencies alone are a model that predicts each token with its share "
            "of the held-out text.",
        ),
        (
            "Held-out sample loss",
            "Cross-entropy of a fixed sample of the held-out split (`eval.sequences`), measured "
            "during training.",
        ),
    ]
    if is_early(runs):
        terms.append(EARLY_TRAINING)
    if has_intervals(rows):
        terms.append(INTERVALS_OVER_SEEDS)
    trend_interval = "; mean and Student's t interval over seeds" if has_intervals(rows) else ""
    terms += [
        (
            "Gaps",
            "Differences to the baseline of the same seed, which starts from the same weights "
            f"and reads the same data in the same order. {interval_text(rows)} An arrow marks an "
            "interval, or a whole row, beyond the scale.",
        ),
        (
            "Trends",
            "Slope of a gap of held-out sample losses over log2 of tokens: a least-squares line "
            f"for each seed through the evaluations after 10% of training{trend_interval}. The "
            "learning rate decays over the same tokens.",
        ),
        *MEASUREMENTS,
    ]
    return terms


def interval_text(rows: list[Row]) -> str:
    """Explain intervals of gaps, and how many of them exclude 0 by chance."""
    if not has_intervals(rows):
        return "A single seed has no interval and no test."
    gaps = sum(row.gap is not None for row in rows)
    chance = "If the true gap is 0, one interval in twenty excludes 0 by chance"
    if gaps > 1:
        chance += (
            f": of the {gaps} gaps here, {round(gaps / 20, 2)} on average. Holm's correction "
            "accounts for this: with it, one page in twenty shows a gap if no true gap exists"
        )
    return (
        "Mean and interval are over the seeds of both rows. An interval that contains 0 shows no "
        f"difference, but does not show that the rows are equal. {chance}."
    )


EARLY_TRAINING = (
    "Early training",
    f"Fewer than {COMPUTE_OPTIMAL} tokens per parameter, about the number of compute-optimal "
    'training (Hoffmann et al., 2022, arXiv 2203.15556, "Chinchilla"). Gaps can change with more '
    "tokens.",
)
INTERVALS_OVER_SEEDS = (
    "Intervals",
    "95%, Student's t over seeds: the uncertainty of the mean that is due to the seeds. A single "
    "seed has no interval. Student's t assumes that losses of seeds, and their differences, are "
    "normally distributed; a few seeds cannot show whether this holds.",
)
MEASUREMENTS = (
    (
        "Diverged runs",
        "Runs that ended without a finite held-out loss, at their last step or because too many "
        "updates in a row were skipped. Means and t tests exclude diverged runs, and look better "
        "without them. The share of diverged runs has Clopper and Pearson's interval and "
        "Fisher's exact test against the baseline. A gap that favours the row with the larger "
        "share of diverged runs is never significant.",
    ),
    (
        "Events",
        "Values of the loss, or of the logarithm of the gradient norm, that are 4 standard "
        "deviations above a line through the 32 values before. Values with fewer than 8 quiet "
        "steps in between form one event. NaN and infinity always count. Rates are per judged "
        "step (a step with enough earlier values) over all seeds, with exact Poisson intervals "
        "(Garwood, 95%). The table of runs has the numbers of spikes of each run.",
    ),
    (
        "Figures",
        "Curves of training loss, gradient norm and learning rate show every step if the run "
        "has steps.npy, and all other training curves show logged steps, as do the tables. "
        "Where all seeds that logged a metric have a value, a line shows the mean over seeds "
        "and a band the range from lowest to highest. Elsewhere, thin lines show single seeds, "
        "and a cross marks the last finite value of a seed that ends early. Running means are "
        "centred. A triangle marks the first step of an event, as in the table; at the upper "
        "edge, its value is above the scale or not finite. Runs without events.jsonl have no "
        "triangles. The band of training loss and gradient norm covers every step of every "
        "seed. Longer runs are drawn in at most 1,000 intervals. A band has at most "
        f"{POINTS} points, each with the lowest and the highest value up to the next point. "
        "Figures by layer show the finished runs of a row, or all runs if no run has finished, "
        "at the last common logged step. The values are in the tables and in report.csv. If a "
        "legend names variants because there are more than ten rows, rows of a variant share a "
        "hue, with shades and dashes in the order of the table.",
    ),
    ("Directories", "Relative to the directory that contains all runs."),
    (MISSING, "Not measured, or not finite."),
)
