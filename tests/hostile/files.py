"""Table of files: reader, and check of the values that the reader returns."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from runs.one_rank import sign

from diffllm.checkpoint.hf.model_directory import ModelDirectory
from diffllm.checkpoint.manifest import faults, read_manifest, read_state
from diffllm.checkpoint.reader import load_tensors
from diffllm.cli.events import table_of
from diffllm.compare.arms.run import Metrics
from diffllm.compare.study.file import Study, load_study
from diffllm.compare.sweep.sweep_directory import SweepDirectory
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.config.words import with_recipe
from diffllm.core.errors import CheckpointError, UserError
from diffllm.core.run_files import metrics_lines, read_changes, read_record
from diffllm.data.prepared import TokenData
from diffllm.data.tasks.task import OwnFile
from diffllm.data.token_files import open_tokens
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.evaluation import all_results, read_result
from diffllm.evaluation.heldout import document_losses
from diffllm.metrics.events import Event, read_events
from diffllm.metrics.steps import read_steps
from diffllm.model import without_storage
from diffllm.training.state import LoopState
from hostile.damage import RAN
from hostile.places import KEY, read_cache

STEP = "checkpoints/step-00000003"
TOKENS = "cache/tokens/*"


# Readers: they get the directory, and return the values of its files or raise UserError


def read_results(run: Path) -> Any:
    """Read the results of evaluations as a report does; raise the first problem of a file."""
    problems: dict[str, list[str]] = {}
    results, file = all_results(run, problems), run / "evaluation" / "step-00000004" / "own.jsonl"
    stored = read_result(file, KEY)
    for reason, (path,) in problems.items():
        assert not stored, "the evaluation must run again"
        assert not results.get(4)
        raise CheckpointError(f"{path} {reason}")
    assert stored or not file.exists()
    return results, stored


def read_checkpoint(run: Path) -> Any:
    """Return the manifest and the state of the newest checkpoint, and the bytes of all files.

    The bytes show damage of tensors that this function does not load. The manifest has no bytes,
    because its white space can change.
    """
    path, norm = run / STEP, torch.empty(32)
    if problems := faults(path):
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    load_tensors(path, {"model.norm.weight": norm}, no_dist=True)
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    return read_manifest(path), read_state(path), {file: file.read_bytes() for file in files}


def tokens_directory(place: Path) -> Path:
    (directory,) = (path for path in place.glob(TOKENS) if path.is_dir())
    return directory


def read_shards(place: Path) -> list[list[int]]:
    """Read all tokens of the prepared shards."""
    data = TokenData(tokens_directory(place))
    data.check()
    assert 0 <= data.manifest.eos_id < data.manifest.vocab_size
    streams = [data.split(name) for name in ("train", "heldout")]
    return [stream.tokens(0, len(stream)).tolist() for stream in streams]


def read_pieces(place: Path) -> Tokenizer:
    return Tokenizer.from_file(tokens_directory(place) / "tokenizer.model")


def read_imported(name: str) -> Callable[[Path], Any]:
    def read(place: Path) -> Any:
        file = open_tokens(place / name, 400, 1)
        ends = np.array([int(file.end_of(i)) for i in range(file.documents)])
        return file.tokens(0, len(file)), ends

    return read


def read_model(place: Path) -> dict[str, Any]:
    """Return the shapes of all tensors, which must fit the config."""
    directory = ModelDirectory(place)
    assert math.isfinite(directory.model.norm_eps)
    assert directory.model.n_layers <= 10_000
    parameters = without_storage(directory.model).named_parameters()
    shapes = {name: directory.tensor(name).shape for name in directory.names}
    assert shapes == {name: parameter.shape for name, parameter in parameters}
    return shapes


# Checks: they get the values of the damaged and of the valid file


Check = Callable[[Any, Any], None]


def anything(value: Any, valid: Any) -> None:
    pass


def same(value: Any, valid: Any) -> None:
    assert value == valid


def same_results(value: Any, valid: Any) -> None:
    assert value in (valid, ({}, None))


def same_arrays(value: Any, valid: Any) -> None:
    for field in dataclasses.fields(valid):
        assert np.array_equal(getattr(value, field.name), getattr(valid, field.name))


def usable_record(record: dict[str, Any], valid: Any) -> None:
    json.dumps(record).encode()
    assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
    assert record.get("parameters") is None or record["parameters"] > 0


def usable_changes(changes: list[dict[str, Any]], valid: Any) -> None:
    assert all(len(pair) == 2 for line in changes for pair in line["changes"].values())


def usable_events(events: list[Event], valid: Any) -> None:
    for event in events:
        json.loads(event.line())
        table_of([event]).text()


def usable_steps(rows: np.ndarray, valid: Any) -> None:
    assert (np.diff(rows["step"].astype(int)) > 0).all()


def usable_metrics(metrics: Metrics, valid: Any) -> None:
    assert (np.diff(metrics.steps) > 0).all()
    assert not any(np.isinf(values).any() for _, values in metrics.columns.values())


def usable_config(cfg: TrainConfig, valid: Any) -> None:
    assert isinstance(cfg.steps, int)
    OmegaConf.to_yaml(OmegaConf.structured(cfg)).encode()


def usable_sweep(sweep: SweepDirectory, valid: Any) -> None:
    assert all(".." not in Path(name).parts for name in sweep.record["runs"])
    for words in sweep.record["runs"].values():
        assert all(isinstance(word, str) for word in words)


def usable_study(study: Study, valid: Any) -> None:
    assert {study.baseline, study.rule.arm, study.rule.against} <= {*study.arms}
    assert len({*study.seeds}) == len(study.seeds) >= 2
    json.dumps(dataclasses.asdict(study), default=str, allow_nan=False)


def usable_task(task: OwnFile, valid: Any) -> None:
    for level in task.levels(100):
        for example in task.examples(level, 10, 0, len):  # type: ignore[arg-type]
            assert example.candidates[example.answer]
            assert all(text.encode() for text in example.candidates)


def usable_state(checkpoint: Any, valid: Any) -> None:
    """Assert that a run can resume from the state, or start from its parameters."""
    state = checkpoint[1]
    if state["loop"] is None:  # The checkpoint contains only parameters.
        return
    loop = LoopState.of(state["loop"])
    loop.spikes.update(1.0, 1.0)
    assert loop.step == state["step"] >= 0
    assert state["ranks"] >= 1
    json.dumps(loop.state_dict()).encode()


def usable_tokenizer(tokenizer: Tokenizer, valid: Any) -> None:
    assert 0 <= tokenizer.eos_id < tokenizer.vocab_size
    assert all(0 <= token < tokenizer.vocab_size for token in tokenizer.encode("def ab(x): \u00e9"))
    assert tokenizer.decode(list(range(tokenizer.vocab_size))), "a piece is not text"
    assert tokenizer.pieces_hash


def usable_tokens(value: Any, valid: Any) -> None:
    tokens, ends = value
    assert ((tokens >= 0) & (tokens < 400)).all()
    assert ((ends >= 0) & (ends <= len(tokens))).all()
    assert ends[-1] == len(tokens)


@dataclass(frozen=True)
class HostileFile:
    """A file of a directory of PLACES.

    Attributes:
        path: path in the directory; a pattern selects several files, which are damaged together.
        named: the path that errors contain, if not the path of the file.
        examples: number of contents that Hypothesis draws; 0 if only the table damages the file.
        settle: runs after each damage, for example to sign a forged checkpoint.
        writes: the reader may write files.
    """

    place: str
    path: str
    read: Callable[[Path], Any]
    check: Check = anything
    named: str | None = None
    examples: int = 100
    settle: Callable[[Path], object] = lambda place: None
    writes: bool = False

    def files(self, place: Path) -> list[Path]:
        files = sorted(place.glob(self.path))
        assert files, f"{place} contains no {self.path}"
        return files

    def outcome(self, place: Path, files: list[Path]) -> Any:
        """Read after damage of `files`; return the values of the reader, or its UserError.

        Assert that the error is one line with the path, and that the reader runs no code and
        writes no file.
        """
        self.settle(place)
        before = contents(place)
        try:
            value = self.read(place)
        except UserError as error:
            value = error
        assert self.writes or contents(place) == before
        assert not RAN
        if isinstance(value, UserError):
            paths = files if self.named is None else [place / self.named]
            paths += [file.parent for file in files if not file.exists()]
            assert any(str(path) in str(value) for path in paths), value
            assert str(value).isprintable()
        return value


def contents(directory: Path) -> dict[str, bytes | None]:
    """Map paths to contents, None for directories and special files; skip locks and checksums."""
    files = [path for path in directory.rglob("*") if path.suffix not in (".verified", ".lock")]
    small = {path for path in files if path.is_file() and path.stat().st_size < 2**30}
    return {str(path): path.read_bytes() if path in small else None for path in files}


def sign_checkpoint(run: Path) -> None:
    sign(run / STEP)


def retrain(place: Path) -> None:
    """Delete the tokens, because only their preparation reads the tokenizer of the cache."""
    shutil.rmtree(place / "cache" / "tokens")


def run_file(path: str, read: Callable[[Path], Any], check: Check) -> HostileFile:
    return HostileFile("run", path, read, check)


def user_file(path: str, read: Callable[[Path], Any], check: Check = anything) -> HostileFile:
    return HostileFile("inputs", path, lambda place: read(place / path), check)


def checkpoint(name: str) -> HostileFile:
    return HostileFile("checkpoint", f"{STEP}/{name}", read_checkpoint, same, STEP, 60)


def signed(name: str, check: Check, examples: int) -> HostileFile:
    """Return a file of a checkpoint whose checksums fit the damaged file."""
    path = f"{STEP}/{name}"
    return HostileFile(
        "checkpoint", path, read_checkpoint, check, STEP, examples, settle=sign_checkpoint
    )


def cached(path: str, examples: int = 0, **more: Any) -> HostileFile:
    """Return a file of a cache, which is prepared again or refused."""
    more = {"place": "cache", "writes": True, **more}
    return HostileFile(
        path=f"cache/{path}", read=read_cache, check=same, named="cache/", examples=examples, **more
    )


def tokens_file(name: str, read: Callable[[Path], Any], check: Check, examples: int) -> HostileFile:
    return HostileFile("cache", f"{TOKENS}/{name}", read, check, "cache/tokens/", examples)


def tokenizer_file(name: str) -> HostileFile:
    return HostileFile("tokenizer", name, Tokenizer.from_file, usable_tokenizer, "", 60)


def imported(path: str, opened: str) -> HostileFile:
    return HostileFile("imported", path, read_imported(opened), usable_tokens, "", 60)


def model_file(place: str, name: str) -> HostileFile:
    return HostileFile(place, name, read_model, anything, "", 60)


FILES: dict[str, HostileFile] = {
    "run.json": run_file("run.json", lambda run: read_record(run / "run.json"), usable_record),
    "summary.json": run_file(
        "summary.json", lambda run: read_record(run / "summary.json"), usable_record
    ),
    "changes.jsonl": run_file("changes.jsonl", read_changes, usable_changes),
    "events.jsonl": run_file("events.jsonl", read_events, usable_events),
    "metrics.jsonl": run_file(
        "metrics.jsonl", lambda run: Metrics(metrics_lines(run)), usable_metrics
    ),
    "config.yaml": replace(run_file("config.yaml", load_run_config, usable_config), examples=30),
    "steps.npy": run_file("steps.npy", lambda run: read_steps(run / "steps.npy"), usable_steps),
    "evaluation": run_file("evaluation/step-00000004/own.jsonl", read_results, same_results),
    "document losses": run_file("heldout/step-00000004.npz", document_losses, same_arrays),
    "sweep.json": HostileFile("sweep", "sweep.json", SweepDirectory, usable_sweep),
    "study.yaml": user_file("study.yaml", load_study, usable_study),
    "recipe.yaml": user_file("recipe.yaml", lambda file: with_recipe(f"data={file}")),
    "task.jsonl": user_file("task.jsonl", OwnFile, usable_task),
    "manifest.json": checkpoint("manifest.json"),
    "state.json": checkpoint("state.json"),
    ".metadata": checkpoint(".metadata"),
    "tensors": checkpoint("__0_0.distcp"),
    "signed state.json": signed("state.json", usable_state, 80),
    "signed .metadata": signed(".metadata", anything, 25),
    "signed tensors": signed("__0_0.distcp", anything, 25),
    "file index": cached("file_index.json", 30),
    "packing plan": cached("packing/*/plan.json", 30),
    "starts of pieces": cached("packing/*/starts.bin"),
    "lengths of pieces": cached("packing/*/lengths.bin"),
    "first pieces": cached("packing/*/firsts.bin"),
    "checksums": cached("*/*/.*.verified"),
    "cached tokenizer": cached("tokenizers/*/tokenizer.model", settle=retrain),
    "cached manifest": cached("tokens/*/manifest.json"),
    "partial tokens": cached("tokens/*.partial-*/tokens/heldout-*.bin", place="interrupted"),
    "manifest of tokens": tokens_file("manifest.json", read_shards, same, 200),
    "tokens": tokens_file("train-*.bin", read_shards, same, 60),
    "tokenizer.model": tokens_file("tokenizer.model", read_pieces, usable_tokenizer, 200),
    "tokenizer.json": tokenizer_file("tokenizer.json"),
    "tokenizer_config.json": tokenizer_file("tokenizer_config.json"),
    "Megatron tokens": imported("megatron_uint16.bin", "megatron_uint16.bin"),
    "Megatron index": imported("megatron_uint16.idx", "megatron_uint16.bin"),
    "datatrove tokens": imported("datatrove_2.ds", "datatrove_2.ds"),
    "datatrove index": imported("datatrove_2.ds.index", "datatrove_2.ds"),
    "datatrove metadata": imported("datatrove_2.ds.metadata", "datatrove_2.ds"),
    "config of Llama": model_file("llama", "config.json"),
    "config of Qwen3 MoE": model_file("qwen3_moe", "config.json"),
    "config of diffllm": model_file("differential", "config.json"),
    "model.safetensors": model_file("llama", "model.safetensors"),
    "safetensors index": model_file("sharded", "model.safetensors.index.json"),
}
"""Files by their names in tests."""
