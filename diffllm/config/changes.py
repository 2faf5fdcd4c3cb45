"""Rules on config keys that may change between two launches of a run, and texts about changes."""

from typing import Any

from diffllm.core.errors import listed

# Keys that do not affect the computed values of a run.
OF_NO_EFFECT = (
    "run.name", "run.dir", "run.report", "run.sweep", "run.swept", "run.matched",
    "run.allow_changes", "wandb", "resume", "force", "metrics", "profile", "prepare",
    "log_interval", "checkpoint", "eval", "diagnostics", "distributed", "parallel",
    "train.max_consecutive_skips",
    "micro_batch_size", "compile", "activation_checkpointing", "model.attention.backend",
    "model.loss_chunk", "model.attention.values",
    "data.cache_dir", "data.num_workers", "data.prefetch_factor", "data.sample_prompt",
    "data.visible_keys", "data.document_lengths", "plugins",
    *(f"run.choices.{group}" for group in ("model", "data", "optim", "parallel", "experiment")),
)  # fmt: skip
# Keys that may differ between two launches of one run; steps and corpus are compared directly.
FREE = (*OF_NO_EFFECT, "max_tokens", "epochs", "data.paths", "data.tokenizer", "data.eos_token")
# Keys whose change cannot help a run that stopped because training diverged.
NO_WAY_ON = tuple(
    key for key in OF_NO_EFFECT if key not in ("run.allow_changes", "train.max_consecutive_skips")
)

Changes = dict[str, tuple[Any, Any]]
"""The values of changed keys by dotted key: (before, now)."""


def is_allowed(key: str, allowed: list[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def what_differs(changes: Changes) -> str:
    what = "other plugin code" if changes.keys() == {"plugins"} else "another config"
    return f"{what} ({changes_text(changes)})"


def changes_text(changes: Changes, origin: str = "the run") -> str:
    values = [(key, *pair) for key, pair in changes.items()]
    return listed([f"{key}: {old} in {origin}, {new} in this command" for key, old, new in values])
