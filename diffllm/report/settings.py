"""What was run: the settings that all runs share, and what those that differ are."""

from typing import Any

from diffllm.config.matching import width_of
from diffllm.report.comparison import Row
from diffllm.report.keys import as_text
from diffllm.report.numbers import compact
from diffllm.report.runs import Run

LINES = {
    "Data": {
        "data.source": "source", "data.dataset": "dataset", "data.name": "name",
        "data.split": "split", "data.paths": "paths", "data.mask_documents": "documents masked",
        "corpus": "corpus",
    },
    "Tokenizer": {"model.vocab_size": "vocabulary", "data.tokenizer": "from"},
    "Training": {
        "steps": "steps", "global_batch_size": "sequences a step", "seq_len": "tokens a sequence",
        "train.skip_step": "skip_step",
    },
    "Optimizer": {
        "optim.lr": "lr", "optim.schedule": "schedule", "optim.warmup_steps": "warmup steps",
        "optim.min_lr_ratio": "min_lr_ratio", "optim.weight_decay": "weight decay",
        "optim.beta1": "beta1", "optim.beta2": "beta2", "optim.clip_norm": "clip_norm",
    },
    "Model": {
        "model.dim": "dim", "model.n_layers": "layers", "model.n_heads": "heads",
        "model.n_kv_heads": "KV heads", "model.head_dim": "head_dim",
        "model.match_params_to": "parameters matched to",
    },
    "Held-out": {"data.heldout_fraction": "share of the corpus", "eval.sequences": "sequences"},
    "Machine": {
        "device": "device", "ranks": "ranks", "precision": "precision",
        "compute_dtype": "compute dtype", "torch": "torch",
    },
}  # fmt: skip
"""Config keys and facts, and what the page calls them."""
UNSET: tuple[Any, ...] = (None, [], "")
HASH = 8
"""Characters of a hash that are shown."""


def settings(rows: list[Row]) -> dict[str, str]:
    """Heading to settings; what no run has set is left out."""
    runs = [run for row in rows for run in row.runs]
    lines = {}
    for heading, keys in LINES.items():
        parts = [f"{what} {text}" for key, what in keys.items() if (text := values(runs, key))]
        if parts:
            lines[heading] = ", ".join(parts)
    if runs:
        lines["FFN width"] = ffn_width(rows)
    return lines


def values(runs: list[Run], key: str) -> str:
    """The value of all runs, or each that occurs."""
    found = [run.facts.get(key, run.config.get(key)) for run in runs]
    return " or ".join(dict.fromkeys(as_words(key, v) for v in found if v not in UNSET))


def as_words(key: str, value: Any) -> str:
    if key == "corpus":
        return str(value)[:HASH]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return as_text(value)


def ffn_width(rows: list[Row]) -> str:
    """Of all rows, or which have which where parameters were matched; with experts, of one."""
    labels: dict[int, list[str]] = {}
    for row in rows:
        for width in dict.fromkeys(width_of(run.cfg.model) for run in row.runs):
            labels.setdefault(width, []).append(row.label)
    if len(labels) == 1:
        return str(*labels)
    return "; ".join(f"{width} in {', '.join(names)}" for width, names in sorted(labels.items()))


def summary(rows: list[Row]) -> str:
    """How many runs of what size, without a verdict."""
    runs = [run for row in rows for run in row.runs]
    if not runs:
        return "No runs."
    finished = sum(run.summary is not None for run in runs)
    if len(runs) == 1:
        parts = ["One run" if finished else "One run, not finished"]
    else:
        count = f"{len(rows)} rows" if len(rows) > 1 else rows[0].label
        each = span([float(len(row.runs)) for row in rows], "seed", "seeds")
        parts = [f"{count} × {each}: {finished} of {len(runs)} runs finished"]
    for name, what in (("tokens", "tokens a run"), ("parameters", "parameters")):
        known = [row.values[name] for row in rows if row.values.get(name) is not None]
        if known:
            parts.append(span(known, what, what))
    for group in ("model", "data"):
        chosen = sorted({run.cfg.run.choices[group] for run in runs})
        parts.append(f"{group} {', '.join(chosen)}")
    return "; ".join(parts) + "."


def span(values: list[float], one: str, many: str) -> str:
    """One number or a range, with its noun."""
    low, high = compact(min(values)), compact(max(values))
    return f"{low if low == high else f'{low} to {high}'} {one if high == '1' else many}"
