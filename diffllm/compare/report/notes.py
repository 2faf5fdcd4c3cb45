"""The sentences of a report: what its reader has to know besides the numbers, and what was run."""

from diffllm.compare.report.keys import (
    FACTS,
    HELDOUT,
    MATCHES,
    SPEED,
    as_text,
    differs,
    overrides,
    value_text,
)
from diffllm.compare.report.numbers import clock, compact
from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run, skipped_text
from diffllm.config.matching import width_of

TOLERANCE = 0.005
"""Share by which totals of parameters may differ before it is said."""
LINES = {
    "Data": (
        "data.source", "data.dataset", "data.name", "data.split", "data.paths",
        "data.packing", "data.mask_documents", "corpus",
    ),
    "Tokenizer": ("model.vocab_size", "data.tokenizer"),
    "Training": ("steps", "global_batch_size", "seq_len", "train.skip_step"),
    "Optimizer": (
        "optim.lr", "optim.schedule", "optim.warmup_steps", "optim.min_lr_ratio",
        "optim.weight_decay", "optim.beta1", "optim.beta2", "optim.clip_norm",
    ),
    "Model": (
        "model.dim", "model.n_layers", "model.n_heads", "model.n_kv_heads", "model.head_dim",
        *MATCHES,
    ),
    "Held-out": ("data.heldout_fraction", "heldout_tokens", "eval.sequences"),
    "Machine": ("device", "ranks", "precision", "compute_dtype", "torch"),
}  # fmt: skip
"""Headings of the page's settings, and the config keys and facts below each."""


def run_notes(run: Run) -> list[str]:
    """Sentences about a run that was changed on its way, is incomplete or diverged."""
    notes = []
    if run.changes:
        notes.append(
            f"{run.path} was changed on its way ({'; '.join(run.changes)}): it is a run of neither "
            "config, and no gap is measured to or from it."
        )
    if run.gave_up:
        notes.append(
            f"{run.path} diverged: it stopped at step {run.last_step} of {run.cfg.steps}, because "
            "too many updates in a row were skipped; it is in no loss or gap, which look better "
            "for it."
        )
    elif run.summary is None:
        notes.append(
            f"{run.path} has not finished: step {run.last_step} of {run.cfg.steps}; it is in no "
            "number of the table."
        )
    elif run.final_loss is None:
        notes.append(
            f"{run.path} diverged: it ended with a held-out loss that is not a finite number; it "
            "is in no loss or gap, which look better for it."
        )
    if run.metrics.skipped:
        notes.append(f"{skipped_text(run.path, run.metrics.skipped)}.")
    return notes


def fact_notes(runs: list[Run]) -> list[str]:
    """Runs whose run.json does not say what they were, and what that forbids."""
    everywhere = [fact for fact in FACTS if all(run.facts.get(fact) is None for run in runs)]
    notes = []
    if unsaid := [fact for fact in everywhere if fact != HELDOUT]:
        notes.append(
            f"No run.json says the {', '.join(unsaid)} of a run: the config keys behind it are "
            "compared instead, and these may be equal where the runs are not."
        )
    for run in runs:
        unknown = [f for f in FACTS if run.facts.get(f) is None and f not in everywhere]
        if unknown == [HELDOUT]:
            notes.append(
                f"The held-out loss of {run.path} is that of a sample, as an older version "
                "measured it: no gap is measured to runs where it is of whole documents."
            )
        elif unknown:
            notes.append(
                f"{run.path}/run.json does not say the {', '.join(unknown)} of its run: no gap is "
                "measured to runs where that is known."
            )
    return notes


def parameter_notes(gaps: list[tuple[Row, Row]]) -> list[str]:
    """Rows of another size than the one they are measured from, and how to make them equal.

    Args:
        gaps: rows, each with its baseline's row.
    """
    notes = []
    matched_to = {run.cfg.model.match_params_to for pair in gaps for r in pair for run in r.runs}
    for row, base in gaps:
        size, other = (r.runs[0].facts.get("parameters") for r in (row, base))
        if not size or not other or abs(size / other - 1) <= TOLERANCE:
            continue
        more = f"{abs(size / other - 1):.1%} {'more' if size > other else 'fewer'}"
        larger = max(
            (r for pair in gaps if pair[1] is base for r in pair),
            key=lambda r: r.runs[0].facts.get("parameters") or 0,
        )
        target = larger.runs[0].variant
        mend = f"; model.match_params_to={target} makes them equal"
        by_flops = any(run.cfg.model.match_flops_to for side in (row, base) for run in side.runs)
        if target in matched_to or by_flops or overrides(larger.runs[0]):
            mend = ""  # it is there already, not wanted, or its YAML does not have these parameters
        notes.append(f"{row.label} has {more} parameters than {base.label}{mend}.")
    return notes


def speed_notes(runs: list[Run]) -> list[str]:
    """Why tokens a second cannot be compared, if they cannot."""
    values = [run.config | run.facts for run in runs]
    found = []
    for key in SPEED:
        known = [each for each in values if key in each]
        if differs(key, known):
            found.append(f"{key} ({', '.join(sorted({as_text(each[key]) for each in known}))})")
    if not found:
        return []
    return [f"Tokens a second and MFU are not comparable: the runs differ in {', '.join(found)}."]


def settings(rows: list[Row]) -> dict[str, str]:
    """Heading to settings, each with every value that occurs; what no run has set is left out."""
    runs = [run for row in rows for run in row.runs]
    lines = {}
    for heading, keys in LINES.items():
        parts = []
        for key in keys:
            found = [run.facts.get(key, run.config.get(key)) for run in runs]
            texts = [value_text(key, value) for value in found if value not in (None, [], "")]
            if texts:
                parts.append(f"{key.rpartition('.')[2]} {' or '.join(dict.fromkeys(texts))}")
        if parts:
            lines[heading] = ", ".join(parts)
    lines["FFN width"] = ffn_width(rows)
    commits = dict.fromkeys(filter(None, map(commit_text, runs)))
    return lines | ({"Code": " or ".join(commits)} if commits else {})


def commit_text(run: Run) -> str:
    """The git commit that a run was made with; nothing where its run.json does not say."""
    git = run.facts.get("git")
    if not isinstance(git, dict) or not isinstance(commit := git.get("commit"), str):
        return ""
    return f"commit {commit[:12]}{', with uncommitted changes' if git.get('dirty') else ''}"


def ffn_width(rows: list[Row]) -> str:
    """FFN width as text, with row labels where widths differ; for MoE, one expert's."""
    labels: dict[int, list[str]] = {}
    for row in rows:
        for width in dict.fromkeys(width_of(run.cfg.model) for run in row.runs):
            labels.setdefault(width, []).append(row.label)
    if len(labels) == 1:
        return str(*labels)
    return "; ".join(f"{width} in {', '.join(names)}" for width, names in sorted(labels.items()))


def runs_summary(rows: list[Row]) -> str:
    """How many runs of what size, without a verdict."""
    runs = [run for row in rows for run in row.runs]
    finished = sum(run.summary is not None for run in runs)
    if len(runs) == 1:
        parts = ["One run" if finished else "One run, not finished"]
    else:
        count = f"{len(rows)} rows" if len(rows) > 1 else rows[0].label
        each = span([float(len(row.runs)) for row in rows], "seed", "seeds")
        parts = [f"{count} × {each}: {finished} of {len(runs)} runs finished"]
    each = " a run" if len(runs) > 1 else ""
    for name, what in (("tokens", f"tokens{each}"), ("parameters", "parameters")):
        known = [row.values[name] for row in rows if row.values.get(name) is not None]
        if known:
            parts.append(span(known, what, what))
    times = [row.values["seconds"] for row in rows if row.values.get("seconds") is not None]
    if times:
        low, high = clock(min(times)), clock(max(times))
        parts.append(f"{low if low == high else f'{low} to {high}'}{each}")
    for group in ("model", "data"):
        chosen = sorted({run.cfg.run.choices[group] for run in runs})
        parts.append(f"{group} {', '.join(chosen)}")
    return "; ".join(parts) + "."


def span(values: list[float], one: str, many: str) -> str:
    low, high = compact(min(values)), compact(max(values))
    return f"{low if low == high else f'{low} to {high}'} {one if high == '1' else many}"
