"""diffllm outliers on a trained run: fixed tokens, only JSON on stdout, single-line errors."""

import json
import shutil

import pytest
import torch
from runs.command import call, prepared_corpus, start
from runs.json_files import read_json, write_json

from diffllm import cli as tools
from diffllm import load_model
from diffllm.config.saved import load_run_config
from diffllm.data.preparation.prepare import prepare
from diffllm.evaluation.load import HeldoutSequence
from diffllm.evaluation.outliers import measure_outliers


@pytest.fixture(scope="module")
def outliers_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    corpus = prepared_corpus(directory)
    words = ("steps=6", "checkpoint.interval=3", "attention=diff_v2")
    start(corpus, directory / "run", *words).finish(0)
    return directory / "run"


@pytest.fixture
def outliers(capfd):
    return lambda *words: call(lambda: tools.main(["outliers", *words]), capfd)


def test_json_output_of_outliers_command_matches_measure_outliers(outliers_run, outliers):
    first = outliers(f"run={outliers_run}", "tokens=100", "--json")
    assert first.code == 0, first.err
    found = json.loads(first.out)
    assert (found["step"], found["sequences"], found["tokens"]) == (6, 2, 128)
    assert found["variant"] == "diff_v2"
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert outliers(f"run={outliers_run}", "tokens=100", "json=true").out == first.out
    tokens = prepare(load_run_config(outliers_run).data).split("heldout").tokens(0, 128)
    rows = torch.tensor(tokens.astype("int64")).view(2, 1, 64)
    sequences = [HeldoutSequence(row, row, None) for row in rows]
    expected = measure_outliers(load_model(outliers_run)[0], sequences)
    told = json.loads(json.dumps(expected))
    for layer, own in zip(found["layers"], told, strict=True):
        assert {**own, "layer": layer["layer"]} == layer


def test_outliers_command_prints_values_of_every_attention_map(outliers_run, outliers):
    done = outliers(f"run={outliers_run}", "step=3", "tokens=64")
    assert done.code == 0, done.err
    assert "diff_v2, step 3, the first 64 held-out tokens (1 sequences), float32" in done.out
    for title in ("Hidden states", "Attention logits", "First token"):
        assert title in done.out
    words = [line.split() for line in done.out.splitlines()]
    assert sum(line[:3] == ["1", "map", "2"] for line in words) == 2
    assert sum(line[:2] == ["1", "difference"] for line in words) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run=gone"], "gone"),
        (["run={run}", "step=4"], "no checkpoint of step 4; available steps: [3, 6]"),
        (["run={run}", "tokens=0"], "tokens=0 must be at least 1"),
        (["run={run}", "prompt=a"], "unknown argument 'prompt=a'"),
    ],
)
def test_outliers_command_refuses_invalid_arguments(outliers_run, outliers, words, named):
    done = outliers(*(word.format(run=outliers_run) for word in words))
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert done.err.count("\n") == 1


def test_outliers_command_refuses_other_corpus_or_lost_checkpoint(outliers_run, outliers, tmp_path):
    other = shutil.copytree(outliers_run, tmp_path / "other")
    facts = read_json(other / "run.json")
    write_json(other / "run.json", facts | {"corpus": "0" * 64})
    done = outliers(f"run={other}")
    assert (done.code, done.out) == (2, "")
    assert "the corpus has changed since training" in done.err
    assert "instead of 000000000000" in done.err
    shutil.rmtree(other / "checkpoints")
    assert "has no complete checkpoint" in outliers(f"run={other}").err
