"""Sentences of a report: the result of each row, and notes about runs and settings."""

from collections.abc import Iterable
from typing import Any

from diffllm.compare.report.keys import (
    CORPUS,
    FACTS,
    HELDOUT,
    MATCHES,
    SPEED,
    differs,
    shown_value,
    value_text,
)
from diffllm.compare.report.numbers import (
    MISSING,
    compact,
    finite,
    fixed,
    plural,
    share_words,
    with_interval,
)
from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run, shortlist, skipped_text
from diffllm.data.shards import thin_heldout
from diffllm.statistics.gap_tests import ALPHA

NAMED = 4
TOLERANCE = 0.005
"""Relative difference in parameters above which a note warns."""
EQUAL = 0.0005
"""Relative difference below which parameters are called equal."""
SETTINGS = (
    "data.source", "data.dataset", "data.name", "data.split", "data.paths", "data.packing",
    "data.mask_documents", "corpus", "model.vocab_size", "data.tokenizer", "steps",
    "global_batch_size", "seq_len", "train.skip_step", "optim.lr", "optim.schedule",
    "optim.warmup_steps", "optim.min_lr_ratio", "optim.weight_decay", "optim.beta1", "optim.beta2",
    "optim.clip_norm", "model.dim", "model.n_layers", "model.n_heads", "model.n_kv_heads",
    "model.head_dim", "model.ffn_dim", *MATCHES, "data.heldout_fraction", HELDOUT,
    "eval.sequences", "device", "ranks", "precision", "compute_dtype", "torch",
)  # fmt: skip


def tested_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.p_holm is not None]


def survives(row: Row) -> bool:
    return row.p_holm is not None and row.p_holm < ALPHA


def p_text(p: float | None) -> str:
    if p is None or p < 0.0001:
        return MISSING if p is None else "<0.0001"
    return f"{p:.2f}" if p >= 0.1 else f"{p:.2g}"


def holm_sentence(rows: list[Row]) -> str:
    if not (tested := tested_rows(rows)):
        return ""
    kept = [(row.label, row.gap.mean) for row in tested if row.gap and survives(row)]
    better, worse = ([name for name, x in kept if side * x > 0] for side in (-1, 1))
    count = f"{len(kept)} of {plural(len(tested), 'gap')}"
    verb = "survives" if len(tested) == 1 else "survive"
    said = [f"{count} {verb} Holm's correction at {ALPHA:g}"]
    said += [f"better: {shortlist(better, NAMED)}"] * bool(better)
    said += [f"worse: {shortlist(worse, NAMED)}"] * bool(worse)
    return f"{'; '.join(said)}."


def thin_note(runs: Iterable[Run]) -> str:
    """Return a warning if a run has too little held-out text for a reliable loss, otherwise ""."""
    found = []
    for run in runs:
        summary, data = run.summary or {}, run.cfg.data
        documents, tokens = (finite(summary.get(f"heldout_{of}")) for of in ("documents", "tokens"))
        if documents and tokens:
            masked = data.prompt_column or getattr(data, "answers_only", False)
            key = "eval.tokens or " * bool(run.cfg.eval.tokens) + "data.heldout_fraction"
            thin = thin_heldout(int(documents), None if masked else int(tokens), key)
            found += [(documents, thin)] if thin else []
    return min(found, default=(0, ""))[1]


def gap_tag(row: Row) -> str:
    found, gap = row.outcome, row.gap
    if found is None:
        return ""
    if found.paired is None or gap is None:
        return "no common seed with finite losses"
    if gap.low is None:
        return "no interval from one seed"
    if found.paired.zero_variance:
        return "seeds do not vary: p counts as 1"
    if found.favours_diverging:
        return "favours the row with more diverged runs: p counts as 1"
    if gap.holds_zero:
        return "no difference shown"
    return "" if survives(row) else "not significant after Holm"


def divergence(row: Row, of: str = "", share: bool = True) -> str:
    """Return a text such as "1 of 3 seeds diverged (33%, 0.84% to 91%)", or "" if no seed diverged.

    Args:
        of: text inserted after "seeds", such as " of standard".
        share: whether to add the percentage of diverged seeds with its confidence interval.
    """
    if not row.diverged:
        return ""
    said = f"{row.diverged} of {row.diverged_share.runs} seeds{of} diverged"
    return f"{said} ({share_words(row.diverged_share)})" if share else said


def size_against(row: Row, base: Row) -> str:
    size, other = (finite(each.fact("parameters")) for each in (row, base))
    if not size or not other:
        return ""
    share = size / other - 1
    if abs(share) < EQUAL:
        return "equal parameters"
    return f"{abs(share):.1%} {'more' if share > 0 else 'fewer'} parameters"


def finding(row: Row) -> str:
    if row.gap is not None and (base := row.baseline):
        parts = [f"{row.label} {with_interval(row.gap, signed=True)} against {base.label}"]
        parts += [plural(row.gap.seeds, "seed"), size_against(row, base), divergence(row)]
        return ", ".join(filter(None, [*parts, divergence(base, f" of {base.label}")]))
    if row.loss is None or finite(row.loss.mean) is None:
        ahead = max(row.runs, key=lambda run: run.last_step)
        return f"{row.label}: {divergence(row) or f'not finished: {progress(ahead)}'}"
    loss = f"{row.label} held-out loss {with_interval(row.loss)}"
    parts = [loss, "the baseline" if row.is_baseline else "", plural(row.loss.seeds, "seed")]
    return ", ".join(filter(None, [*parts, divergence(row)]))


def progress(run: Run) -> str:
    losses = run.series("eval/loss").values
    sample = f", held-out sample loss {fixed(losses[-1], 3)} nats per token" if len(losses) else ""
    return f"step {run.last_step} of {run.cfg.steps}{sample}"


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
    facts = [f for f in FACTS if f != HELDOUT or any(run.facts.get(f) for run in runs)]
    missing: dict[str, list[str]] = {}
    for run in runs:
        if unknown := [fact for fact in facts if run.facts.get(fact) is None]:
            missing.setdefault(", ".join(unknown), []).append(str(run.path))
    return [
        f"{shortlist(paths, NAMED)}: run.json does not record {unknown}. These runs have no "
        "gap to runs that do; among themselves, their config keys are compared instead."
        for unknown, paths in missing.items()
    ]


def parameter_notes(gaps: list[tuple[Row, Row]]) -> list[str]:
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


def speed_notes(runs: list[Run]) -> list[str]:
    values = [run.config | run.facts for run in runs]
    known = {key: [each for each in values if key in each] for key in SPEED}
    found = [
        f"{key} ({', '.join(sorted({shown_value(each[key]) for each in those}))})"
        for key, those in known.items()
        if differs(key, those)
    ]
    said = f"Tokens per second and MFU are not comparable: the runs differ in {', '.join(found)}."
    return [said] if found else []


def setting_of(run: Run, key: str) -> Any:
    """Return the value of `key` in run.json or, if run.json lacks the key, in the config.

    The training corpus of a run that `diffllm import` created is not known. For such a run, return
    "unknown" for the key "corpus", and None for config keys of the corpus, such as data.source.
    """
    if "imported" in run.facts and key in ("corpus", *CORPUS):
        return "unknown" if key == "corpus" else None
    return run.facts.get(key, run.config.get(key))


def settings(rows: list[Row]) -> dict[str, str]:
    runs = [run for row in rows for run in row.runs]
    found = {
        key: [value_text(key, value) for run in runs
              if (value := setting_of(run, key)) not in (None, [], "")]
        for key in SETTINGS
    }  # fmt: skip
    gits = [git for run in runs if isinstance(git := run.facts.get("git"), dict)]
    found["commit"] = [
        f"{commit[:12]}{', with uncommitted changes' if git.get('dirty') else ''}"
        for git in gits
        if isinstance(commit := git.get("commit"), str)
    ]
    return {key: " or ".join(dict.fromkeys(texts)) for key, texts in found.items() if texts}


def runs_summary(rows: list[Row]) -> str:
    runs = [run for row in rows for run in row.runs]
    finished = sum(run.summary is not None for run in runs)
    seeds = "/".join(dict.fromkeys(str(len(row.runs)) for row in rows))
    count = f"{plural(len(rows), 'row')} × {seeds} seed{'s' * (seeds != '1')}"
    tokens = [run.planned_tokens for run in runs]
    ends = " to ".join(dict.fromkeys(map(compact, (min(tokens), max(tokens)))))
    return f"{count}: {finished} of {plural(len(runs), 'run')} finished; {ends} tokens per run."
