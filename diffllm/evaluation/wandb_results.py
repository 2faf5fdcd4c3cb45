"""Results of evaluations in the wandb run of the run that was evaluated: a summary and a table."""

from collections.abc import Mapping
from typing import Any

from diffllm.checkpoint import read_state
from diffllm.config.saved import yaml_dict
from diffllm.evaluation.evaluation import Subject
from diffllm.evaluation.suite import Result
from diffllm.metrics.wandb_run import WandbRun, resolve_mode

COLUMNS = ("task", "of", "value", "low", "high", "chance", "examples", "unit")


def record(subject: Subject, results: Mapping[str, Result]) -> bool:
    """Add `evaluation/<task>/<of>` to the summary of the run's own wandb run, and a table of all
    scores, `evaluation/<checkpoint>`; false where the run's config disables wandb.

    A run that has none, as an import, gets one.
    """
    cfg = subject.cfg
    if resolve_mode(cfg.wandb) == "disabled":
        return False
    import wandb

    loop = read_state(subject.checkpoint)["loop"] or {}
    run = WandbRun(
        cfg.wandb, subject.run, cfg.run.choices, cfg.run.sweep, yaml_dict(cfg), loop.get("wandb_id")
    )
    table = wandb.Table(columns=list(COLUMNS), data=rows(results))
    run.log({f"evaluation/{subject.checkpoint.name}": table})
    run.finish(summary_of(results))
    return True


def rows(results: Mapping[str, Result]) -> list[list[Any]]:
    """List the scores of all evaluations, in the order of COLUMNS."""
    return [
        [
            name, score["of"], score["value"], *(score.get("interval") or (None, None)),
            score.get("chance"), score.get("examples"), result["unit"],
        ]
        for name, result in results.items()
        for score in result["scores"]
    ]  # fmt: skip


def summary_of(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the scores that are numbers, by name."""
    return {
        "/".join(filter(None, ("evaluation", name, score["of"]))): score["value"]
        for name, result in results.items()
        for score in result["scores"]
        if score["value"] is not None
    }
