"""Damaged files of runs, sweeps, studies and tasks are read, or refused with the file name."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import damaged, edited, outcome, try_all
from omegaconf import OmegaConf
from runs.written import config_yaml

from diffllm.cli.events import table_of
from diffllm.compare.arms.run import Metrics
from diffllm.compare.study.file import Study, load_study
from diffllm.compare.sweep.sweep_directory import SweepDirectory
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.config.words import with_recipe
from diffllm.config.yaml_file import parse_yaml
from diffllm.core.errors import CheckpointError, UserError
from diffllm.core.run_files import metrics_lines, read_changes, read_record
from diffllm.data.tasks.task import OwnFile
from diffllm.evaluation.evaluation import all_results, read_result, store_result
from diffllm.evaluation.heldout import DocumentLosses, document_losses
from diffllm.metrics.events import Event, read_events

pytestmark = pytest.mark.fuzz
FACTS = {
    "parameters": 10, "flops_per_token": 6.0, "corpus": "c0", "diffllm": {"dirty": 1},
    "plugin_code": {"mine": "1"},
}  # fmt: skip
SUMMARY = {"steps": 20, "tokens": 640, "heldout_loss": 4.0, "sample": "a"}
CHANGE = {"step": 3, "changes": {"log_interval": [1, 2]}}
METRICS = {"step": 2, "tokens": 128, "train/loss": 5.0, "x": None}
CONFIG = parse_yaml(config_yaml(("attention=diff_v2",)))
SWEEP = {"keys": ["seed"], "runs": {"seed0": ["seed=0"]}, "jobs": {"seed0": "17"}}
STUDY = {
    "claim": "a", "base": ["model=tiny", "steps=20"], "baseline": "a", "seeds": [0, 1, 2],
    "arms": {"a": ["attention=standard"], "b": ["attention=diff_v2"]},
    "rule": {"kind": "difference", "arm": "b", "against": "a", "below": 0.0},
    "lr": {"grid": [0.001, 0.002], "seeds": [7]}, "power": {"sd": 0.1, "gap": 0.2},
}  # fmt: skip
RECIPE = {
    "sources": {"code": {"source": "files", "paths": ["a.txt"], "weight": 1.5}},
    "curriculum": [{"until": 0.5, "weights": {"code": 1.0}}],
}
EVENT = {
    "kind": "loss_spike", "step": 7, "tokens": 448, "definition": "spikes", "value": 5.5,
    "height": 9.1, "lr": 1e-3, "detail": "", "batch": {
        "tokens_hash": "9da6", "seed": 0, "stage": 0, "seq_len": 32, "packing": "stream",
        "samples": {"corpus": [48, 56]},
    },
}  # fmt: skip
TASK = {"prompt": "a", "answer": "b", "candidates": ["b", "c"], "level": {"kind": "x", "n": 1}}


def usable_record(found: dict[str, Any]) -> None:
    json.dumps(found).encode()
    assert all(math.isfinite(value) for value in found.values() if isinstance(value, float))
    assert found.get("parameters") is None or found["parameters"] > 0


def usable_changes(found: list[dict[str, Any]]) -> None:
    assert all(len(pair) == 2 for line in found for pair in line["changes"].values())


def usable_events(found: list[Event]) -> None:
    for event in found:
        json.loads(event.line())
        table_of([event]).text()


def usable_metrics(found: Metrics) -> None:
    assert (np.diff(found.steps) > 0).all()
    assert found.steps[0] == 1, "the line before the damage"
    assert not any(np.isinf(values).any() for _, values in found.columns.values())


def usable_config(found: TrainConfig) -> None:
    assert isinstance(found.steps, int)
    OmegaConf.to_yaml(OmegaConf.structured(found)).encode()


def usable_sweep(found: SweepDirectory) -> None:
    assert all(".." not in Path(name).parts for name in found.record["runs"])
    assert all(isinstance(word, str) for words in found.record["runs"].values() for word in words)


def usable_study(found: Study) -> None:
    assert {found.baseline, found.rule.arm, found.rule.against} <= {*found.arms}
    assert len({*found.seeds}) == len(found.seeds) >= 2
    json.dumps(dataclasses.asdict(found), default=str, allow_nan=False)


def usable_task(found: OwnFile) -> None:
    for level in found.levels(100):
        for example in found.examples(level, 10, 0, len):  # type: ignore[arg-type]
            assert example.candidates[example.answer]
            assert all(text.encode() for text in example.candidates)


FILES: dict[str, tuple[Any, Callable[[Path], Any], Callable[[Any], None]]] = {
    "run.json": (FACTS, read_record, usable_record),
    "summary.json": (SUMMARY, read_record, usable_record),
    "changes.jsonl": (CHANGE, lambda file: read_changes(file.parent), usable_changes),
    "events.jsonl": (EVENT, lambda file: read_events(file.parent), usable_events),
    "metrics.jsonl": (METRICS, lambda file: Metrics(metrics_lines(file.parent)), usable_metrics),
    "config.yaml": (CONFIG, lambda file: load_run_config(file.parent), usable_config),
    "sweep.json": (SWEEP, lambda file: SweepDirectory(file.parent), usable_sweep),
    "study.yaml": (STUDY, load_study, usable_study),
    "recipe.yaml": (RECIPE, lambda file: with_recipe(f"data={file}"), lambda found: None),
    "task.jsonl": (TASK, OwnFile, usable_task),
}
"""File name to valid content, reader, and check of the values that the reader returns."""


@pytest.mark.parametrize("name", FILES)
def test_reader_of_damaged_file_raises_user_error_or_returns_valid_content(
    tmp_path: Path, name: str
) -> None:
    (whole, read, usable), file = FILES[name], tmp_path / name
    lines = [json.dumps({**METRICS, "step": step}).encode() for step in (1, 3)]

    def check(content: bytes) -> None:
        if name == "metrics.jsonl":
            content = b"\n".join([lines[0], content, lines[1], b""])
        found = outcome(lambda: read(file), file, content)
        if name == "metrics.jsonl" or not isinstance(found, UserError):  # skips bad lines
            usable(found)

    kinds = damaged(json.dumps(whole).encode()) | edited(whole)
    try_all(check, kinds, 30 if name == "config.yaml" else 100)


KEY = {"evaluation": "own"}
FIRST = {
    "key": KEY, "unit": "share of right answers",
    "scores": [{"of": "a", "value": 0.5, "interval": [0.1, 0.9], "by_place": {"0": 0.5}}],
}  # fmt: skip


COUNTS = np.arange(1, 9)
LOSSES = DocumentLosses(COUNTS / 3, COUNTS, COUNTS * 2, COUNTS * 3, COUNTS * 0)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run with an evaluation result and losses of held-out documents."""
    run = tmp_path_factory.mktemp("ended")
    store_result(run / "evaluation" / "step-00000004" / "own.jsonl", FIRST, [{"correct": True}] * 3)
    LOSSES.save(run, 4)
    return run


def test_damaged_evaluation_file_never_gives_wrong_values(ended: Path) -> None:
    file = ended / "evaluation" / "step-00000004" / "own.jsonl"
    whole, before = file.read_bytes(), read_result(file, KEY)
    first, *lines = whole.splitlines(keepends=True)

    def check(content: bytes) -> None:
        problems: dict[str, list[str]] = {}
        read = outcome(
            lambda: (read_result(file, KEY), all_results(ended, problems)), file, content
        )
        assert read[0] in (None, before)
        assert read[1] == {4: {"own": before}} or list(problems.values()) == [[str(file)]]

    other_first = edited(json.loads(first)).map(lambda new: b"".join([new + b"\n", *lines]))
    try_all(check, damaged(whole) | other_first, 100)


def test_damaged_document_losses_file_never_gives_wrong_values(
    ended: Path,
) -> None:
    file = ended / "heldout" / "step-00000004.npz"

    def check(content: bytes) -> None:
        found = outcome(lambda: document_losses(ended), file, content)
        assert isinstance(found, CheckpointError) or all(
            np.array_equal(getattr(found, f.name), getattr(LOSSES, f.name))
            for f in dataclasses.fields(LOSSES)
        )

    try_all(check, damaged(file.read_bytes()), 100)
