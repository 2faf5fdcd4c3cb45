"""Token shards that are not what was prepared end a run with one line; what was saved stays."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runs.command import (
    ForkedRun,
    Gate,
    Result,
    call,
    changes,
    clean_environment,
    documents,
    metrics,
    snapshot,
    train,
    train_module,
    write_jsonl,
)

from diffllm.checkpoint.directory import list_checkpoints
from diffllm.config import load_config
from diffllm.data import shards
from diffllm.data.preparation.prepare import prepare
from diffllm.data.samples import permute
from diffllm.data.shards import Manifest

SEQ_LEN, SEED = 32, 0


class Prepared:
    """A cache with three training shards, the last of which is one sequence short."""

    def __init__(self, path: Path):
        self.path, self.environment = path, clean_environment(path / "cache")
        corpus = write_jsonl(path / "corpus.jsonl", documents(100))
        self.words = [
            *("model=tiny", "model.vocab_size=512", "data=files", f"data.paths=[{corpus}]"),
            *(f"seq_len={SEQ_LEN}", "global_batch_size=1", "steps=400", f"seed={SEED}"),
            *("optim.warmup_steps=1", "checkpoint.interval=4", "log_interval=2"),
            *("eval.interval=400", "eval.sequences=1", "diagnostics.interval=0"),
            *("diagnostics.probe_interval=0", "wandb.mode=disabled", "run.report=false"),
        ]
        self.prepare(2**27)
        total = self.manifest.splits["train"].tokens
        shutil.rmtree(self.directory)
        self.prepare((total - SEQ_LEN) // 2)  # the third shard is read by two sequences only
        assert len(self.manifest.splits["train"].shards) == 3

    def prepare(self, shard_tokens: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "SHARD_TOKENS", shard_tokens)
            prepare(load_config([*self.words, f"data.cache_dir={self.path / 'cache'}"]).data)

    @property
    def directory(self) -> Path:
        (directory,) = (p.parent for p in (self.path / "cache" / "tokens").glob("*/manifest.json"))
        return directory

    @property
    def manifest(self) -> Manifest:
        return Manifest.load(self.directory)

    def first_step_with(self, shard: int) -> int:
        """The step, from 1, that first reads tokens of a training shard."""
        ends = np.cumsum([s.tokens for s in self.manifest.splits["train"].shards])
        n = (int(ends[-1]) - 1) // SEQ_LEN
        order = permute(np.arange(n), n, SEED, 0)
        begin = ends[shard] - self.manifest.splits["train"].shards[shard].tokens
        return int(np.flatnonzero((order + 1) * SEQ_LEN + 1 > begin)[0]) + 1

    def train(self, *words: str) -> Result:
        return train([*self.words, *words], self.path, self.environment)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("original"))


@pytest.fixture
def prepared(original: Prepared, tmp_path: Path) -> Prepared:
    """A copy with nothing verified, to damage."""
    shutil.copytree(original.path / "cache", tmp_path / "cache")
    copy = object.__new__(Prepared)
    copy.path, copy.words = tmp_path, original.words
    copy.environment = clean_environment(tmp_path / "cache")
    return copy


def only_line(result: Result) -> str:
    assert result.code == 2, result
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    return line


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.slow
def test_a_bit_of_a_shard_that_is_read_in_the_middle_of_a_run(prepared: Prepared) -> None:
    """The run ends before the step that would read it, with the steps before saved, and prepared
    again it goes on to what an undisturbed run computes."""
    step = prepared.first_step_with(2)
    assert 8 < step < 390, "choose another seed"
    shard, directory = prepared.directory / "train-00000-00002.bin", prepared.directory
    intact = shard.read_bytes()
    flip(shard)
    line = only_line(prepared.train("run.name=a", "data.num_workers=0"))
    assert f"{shard}: damaged" in line
    assert f"delete {directory} to prepare it again" in line
    run = prepared.path / "outputs" / "a"
    saved = list_checkpoints(run / "checkpoints")
    assert int(saved[-1].name[5:]) == step - 1
    assert f"stopped after step {step - 1}, saved" in line
    assert metrics(run)[-1]["step"] == (step - 1) // 2 * 2
    before = snapshot(run / "checkpoints")
    assert "damaged" in only_line(prepared.train("run.name=a"))  # in a loader process
    assert not changes(before, snapshot(run / "checkpoints"))
    shard.write_bytes(intact)
    last = step + 3
    for name in ("a", "undisturbed"):
        start_until(prepared, last, name)
    lines = [
        {k: v for k, v in line.items() if k == "train/loss"}
        for name in ("a", "undisturbed")
        for line in metrics(prepared.path / "outputs" / name)
        if line["step"] == last // 2 * 2
    ]
    assert lines[0] == lines[1]


def start_until(prepared: Prepared, step: int, name: str) -> None:
    """Train until a step has been made, then stop as a scheduler would."""
    run = prepared.path / "outputs" / name
    gate = Gate(run, step + 1)
    cache = f"data.cache_dir={prepared.path / 'cache'}"
    process = ForkedRun([*prepared.words, f"run.dir={run}", cache])
    process.wait_for(gate.reached, f"step {step}")
    process.signal(signal.SIGTERM)
    gate.open()
    assert "stopped by SIGTERM" in process.finish()


def edit_manifest(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Change the manifest beside a shard."""

    def edit(shard: Path) -> None:
        file = shard.with_name("manifest.json")
        stored = json.loads(file.read_text())
        change(stored)
        file.write_text(json.dumps(stored))

    return edit


def shorter(manifest: dict) -> None:
    for counted in (manifest["splits"]["train"], manifest["splits"]["train"]["shards"][1]):
        counted["tokens"] -= 1


def other_checksum(manifest: dict) -> None:
    shard = manifest["splits"]["heldout"]["shards"][0]
    shard["sha256"] = shard["sha256"][::-1]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-2]),
            ["train-00000-00001.bin", "bytes where"],
        ),
        (edit_manifest(shorter), ["train-00000-00001.bin", "bytes where the manifest says"]),
        (lambda path: path.with_name("manifest.json").unlink(), ["manifest.json", "No such"]),
        (
            lambda path: path.with_name("tokenizer.model").unlink(),
            ["tokenizer.model", "No such file"],
        ),
    ],
    ids=["truncated", "shorter", "no manifest", "no tokenizer"],
)
def test_what_is_wrong_at_the_start_is_said_before_training(
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    named: list[str],
) -> None:
    directory = prepared.directory
    damage(directory / "train-00000-00001.bin")
    monkeypatch.chdir(prepared.path)
    monkeypatch.setenv("DIFFLLM_CACHE", str(prepared.path / "cache"))
    monkeypatch.setattr(sys, "argv", ["train.py", *prepared.words, "run.name=a", "steps=4"])
    before = snapshot(directory)
    line = only_line(call(train_module().main, capfd))
    assert all(word in line for word in named), line
    assert f"delete {directory} to prepare it again" in line
    assert not changes(before, snapshot(directory))
    assert not (prepared.path / "outputs").exists()


def test_a_checksum_that_is_not_the_held_out_splits(prepared: Prepared) -> None:
    """It is read at the first evaluation."""
    edit_manifest(other_checksum)(prepared.directory / "train-00000-00001.bin")
    line = only_line(prepared.train("run.name=a", "steps=4"))
    assert "heldout-00000-00000.bin: damaged" in line
