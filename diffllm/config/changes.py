"""The changes of a run that goes on, and whether they were asked for."""

from typing import Any

from diffllm.errors import listed

# Keys that change nothing of what a run computes.
OF_NO_EFFECT = (
    "run.name", "run.dir", "run.report", "run.sweep", "run.swept", "run.matched",
    "run.allow_changes", "wandb", "resume", "metrics", "profile", "prepare",
    "log_interval", "checkpoint", "eval", "diagnostics", "distributed", "parallel",
    "train.max_consecutive_skips",
    "micro_batch_size", "compile", "activation_checkpointing", "model.attention.backend",
    "model.loss_chunk", "model.attention.values",
    "data.cache_dir", "data.num_workers", "data.prefetch_factor", "data.sample_prompt",
    "plugins",
    *(f"run.choices.{group}" for group in ("model", "data", "optim", "parallel", "experiment")),
)  # fmt: skip
# Keys that may differ between two starts of one run: what follows from the last four, the steps and
# the corpus, is compared itself.
FREE = (*OF_NO_EFFECT, "max_tokens", "epochs", "data.paths", "data.tokenizer")
# Keys that may differ between two starts of a run that stopped because it had diverged, without a
# chance that the second one gets further.
NO_WAY_ON = tuple(
    key for key in OF_NO_EFFECT if key not in ("run.allow_changes", "train.max_consecutive_skips")
)

Changes = dict[str, tuple[Any, Any]]
"""The values of changed keys by dotted key: (before, now)."""


def is_allowed(key: str, allowed: list[str]) -> bool:
    """Whether a key, or a group that it belongs to, is in `allowed`."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def what_differs(changes: Changes) -> str:
    """Say whether code or config differs, and how: 'another config (seed: 0 there, 1 here)'."""
    what = "other plugin code" if changes.keys() == {"plugins"} else "another config"
    return f"{what} ({described(changes)})"


def described(changes: Changes) -> str:
    """Describe the first changes: 'seed: 0 there, 1 here; ...'."""
    return listed([f"{key}: {there} there, {here} here" for key, (there, here) in changes.items()])
