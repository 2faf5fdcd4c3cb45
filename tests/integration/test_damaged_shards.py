"""Damaged token shards stop a run with one error line; checkpoints are kept."""

import shutil

import numpy as np
import pytest
from runs.command import (
    ForkedRun,
    Gate,
    changes,
    documents,
    metrics,
    snapshot,
    the_error,
    write_texts,
)
from runs.json_files import read_json, write_json
from runs.one_rank import flip_bit

from diffllm.config import load_config
from diffllm.core.run_files import list_checkpoints
from diffllm.data import shards
from diffllm.data.preparation.prepare import prepare
from diffllm.data.samples import permute
from diffllm.data.shards import Manifest

SEQ_LEN, SEED = 32, 3
WORDS = [
    *("model=tiny", "model.vocab_size=512", "data=files", f"seq_len={SEQ_LEN}", f"seed={SEED}"),
    *("global_batch_size=1", "steps=400", "optim.warmup_steps=1", "checkpoint.interval=4"),
    *("log_interval=2", "eval.interval=400", "eval.sequences=1", "diagnostics.interval=0"),
    *("diagnostics.probe_interval=0", "wandb.mode=disabled", "run.report=false"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a directory of tokens with three training shards, and the overrides of a run."""
    path = tmp_path_factory.mktemp("original")
    corpus = write_texts(path / "corpus.jsonl", documents(100))
    words = [*WORDS, f"data.paths=[{corpus}]", f"data.cache_dir={path / 'cache'}"]
    data = prepare(load_config(words).data)
    shutil.rmtree(data.directory)
    # The third shard is so small that only two sequences read tokens of the third shard.
    tokens = (data.manifest.splits["train"].tokens - SEQ_LEN) // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", tokens)
        data = prepare(load_config(words).data)
    assert len(data.manifest.splits["train"].shards) == 3
    return data.directory, words


@pytest.fixture
def prepared(original, tmp_path):
    """Return a copy to damage, without marks of verified files."""
    directory, words = original
    shutil.copytree(directory.parents[1], tmp_path / "cache")
    words = [*words, f"data.cache_dir={tmp_path / 'cache'}"]
    return tmp_path / "cache" / "tokens" / directory.name, words


def first_step_with(directory, shard):
    """Return the first step, counted from 1, that reads tokens of a training shard."""
    counts = [each.tokens for each in Manifest.load(directory).splits["train"].shards]
    n = (sum(counts) - 1) // SEQ_LEN
    order = permute(np.arange(n), n, SEED, 0)
    return int(np.flatnonzero((order + 1) * SEQ_LEN + 1 > sum(counts[:shard]))[0]) + 1


@pytest.mark.slow
def test_run_stops_before_first_step_that_reads_damaged_shard(prepared, tmp_path):
    """The run saves and stops before the step that reads the damaged shard.

    With the shard restored, the run resumes with the losses of an undisturbed run.
    """
    directory, words = prepared
    step = first_step_with(directory, 2)
    assert 8 < step < 390, "choose another seed"
    run, shard = tmp_path / "run", directory / "train-00000-00002.bin"
    intact = shard.read_bytes()
    flip_bit(shard)
    mine = [*words, f"run.dir={run}"]
    line = the_error(ForkedRun([*mine, "data.num_workers=0"]).finish(2))
    assert f"{shard}: damaged" in line
    assert f"delete {directory} to prepare it again" in line
    assert int(list_checkpoints(run / "checkpoints")[-1].name[5:]) == step - 1
    assert f"stopped after step {step - 1}, saved" in line
    assert metrics(run)[-1]["step"] == (step - 1) // 2 * 2
    before = snapshot(run / "checkpoints")
    assert "damaged" in the_error(ForkedRun(mine).finish(2))  # found by a loader process
    assert not changes(before, snapshot(run / "checkpoints"))
    shard.write_bytes(intact)
    last, losses = step + 3, []
    for directory in (run, tmp_path / "undisturbed"):
        gate = Gate(directory, last + 1)
        ForkedRun([*words, f"run.dir={directory}"]).stop_at(gate)
        losses.append({line["step"]: line["train/loss"] for line in metrics(directory)})
    assert losses[0][last // 2 * 2] == losses[1][last // 2 * 2]


def truncate(directory):
    shard = directory / "train-00000-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])


def shorten_in_manifest(directory):
    manifest = read_json(directory / "manifest.json")
    for counted in (manifest["splits"]["train"], manifest["splits"]["train"]["shards"][1]):
        counted["tokens"] -= 1
    write_json(directory / "manifest.json", manifest)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "train-00000-00001.bin"),
        (shorten_in_manifest, "train-00000-00001.bin"),
        (lambda directory: (directory / "tokenizer.model").unlink(), "tokenizer.model"),
    ],
)
def test_train_stops_at_start_if_prepared_corpus_is_damaged(prepared, tmp_path, damage, named):
    directory, words = prepared
    damage(directory)
    before = snapshot(directory)
    line = the_error(ForkedRun([*words, f"run.dir={tmp_path / 'run'}"]).finish(2))
    assert named in line
    assert ("bytes, expected" in line) == named.startswith("train")
    assert f"delete {directory} to prepare it again" in line
    assert not changes(before, snapshot(directory))
    assert not (tmp_path / "run").exists()
