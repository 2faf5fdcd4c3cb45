"""`diffllm evaluate` with position, outliers and quantise: output, stored results, errors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs.json_files import read_json, read_jsonl, write_json
from runs.written import data_words, made

from diffllm.checkpoint.writer import write_parameters
from diffllm.evaluation.load import load_model
from diffllm.evaluation.suite import EVALUATIONS

NAMES = ["position", "outliers", "quantise"]


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("measures")
    made(directory / "run", *data_words(directory), "seq_len=64", "attention=diff_v2")
    return directory / "run"


def run_without_results(run: Path, to: Path) -> Path:
    """Copy a run without its results."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("evaluation"))
    return to


def test_repeated_evaluation_prints_stored_results(measured_run, output_of, monkeypatch, tmp_path):
    measured_run = run_without_results(measured_run, tmp_path / "run")
    words = ["evaluate", f"run={measured_run}", "suite=checkpoint", "limit=9", "--json"]
    first = output_of(*words)
    said = json.loads(first)
    assert list(said) == NAMES
    directory = measured_run / "evaluation" / "step-00000000"
    for name, number in {"position": 9, "outliers": 2, "quantise": 16 * 9}.items():
        head, *lines = read_jsonl(directory / f"{name}.jsonl")
        assert head["key"]["evaluation"] == name
        assert head["scores"] == said[name]["scores"]
        assert len(head["scores"]) > 10
        assert len(lines) == number
    for name in NAMES:
        monkeypatch.setattr(type(EVALUATIONS[name]), "lines", lambda *_: pytest.fail("made again"))
    assert output_of(*words) == first
    table = output_of("evaluate", f"run={measured_run}", "tasks=[position,outliers]", "limit=9")
    expected = ("nats per token", "position 4-7", "distance none", "span repeated", "hidden top_1")
    for text in expected:
        assert text in table


def test_outliers_evaluation_matches_outliers_command(measured_run, output_of):
    told = json.loads(output_of("outliers", f"run={measured_run}", f"tokens={5 * 64}", "--json"))
    output = output_of("evaluate", f"run={measured_run}", "tasks=[outliers]", "limit=5", "--json")
    scores = {s["of"]: s for s in json.loads(output)["outliers"]["scores"]}
    kept = measured_run / "evaluation" / "step-00000000" / "outliers.jsonl"
    _, *lines = read_jsonl(kept)
    about = {"sequences": told["sequences"], "tokens": told["tokens"]}
    assert lines == [layer | about for layer in told["layers"]]
    assert about == {"sequences": 5, "tokens": 320}
    for name in ("top_1", "top_2", "top_3", "top_10", "top_100", "median", "rms", "kurtosis"):
        hidden = [layer["hidden"][name] for layer in told["layers"]]
        score = scores[f"hidden {name}"]
        assert score["value"] == max(hidden)
        assert score["layer"] == hidden.index(max(hidden))
        logits = {
            (layer["layer"], key): numbers[name]
            for layer in told["layers"]
            for key, numbers in layer["logits"].items()
        }
        assert len(logits) == 4, "two maps, two layers"
        score = scores[f"logits {name}"]
        assert score["value"] == max(logits.values())
        assert logits[score["layer"], score["map"]] == score["value"]


def test_new_results_require_the_original_corpus(measured_run, tmp_path, output_of, error_of):
    words = data_words(tmp_path)
    made(tmp_path / "run", *words, "seq_len=64")
    own = f"run={tmp_path / 'run'}"
    first = output_of("evaluate", own, "tasks=[outliers]", "limit=2", "--json")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "corpus.jsonl").unlink()
    assert output_of("evaluate", own, "tasks=[outliers]", "limit=2", "--json") == first
    for name in NAMES:
        assert "corpus.jsonl" in error_of("evaluate", own, f"tasks=[{name}]", "limit=1")
    other = run_without_results(measured_run, tmp_path / "other")
    facts = read_json(other / "run.json")
    write_json(other / "run.json", facts | {"corpus": "0" * 64})
    for name in NAMES:
        error = error_of("evaluate", f"run={other}", f"tasks=[{name}]")
        assert "has changed since training" in error


def test_evaluation_of_diverged_model_prints_single_error_line(measured_run, tmp_path, error_of):
    own = run_without_results(measured_run, tmp_path / "run")
    model, _ = load_model(own)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    tensors["layers.1.ffn.w2.weight"][0, 0] = torch.nan
    shutil.rmtree(own / "checkpoints")
    write_parameters(own / "checkpoints", tensors, list(tensors))
    for name in NAMES:
        error = error_of("evaluate", f"run={own}", f"tasks=[{name}]", "limit=2")
        assert "step-00000000: the " in error
        assert "not finite" in error
        assert not (own / "evaluation" / "step-00000000" / f"{name}.jsonl").exists()
