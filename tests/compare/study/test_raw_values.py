"""values.json of a study: size, equal verdicts, and errors for damaged files."""

import math
from dataclasses import replace

import numpy as np
import pytest
from runs.json_files import read_json, write_json
from runs.written import LOWER, SOONER, TWO_ARMS, study_file, write_ended, write_lines

from diffllm.cli import main
from diffllm.compare.study.rates import next_runs
from diffllm.compare.study.raw_values import read_values
from diffllm.compare.study.verdict import judge, judge_evidence
from diffllm.compare.study.verdict_page import verdict_page, write_verdict
from diffllm.core.errors import CheckpointError
from diffllm.evaluation.heldout import DocumentLosses


def write_curves(study, out, documents=30, evaluations=20, left=0):
    """Write ended runs with curves of the loss and of a task, and with losses of documents.

    Args:
        left: number of deciding runs that are not written.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 900, documents)
    texts = rng.integers(-(2**62), 2**62, documents)
    facts = {"corpus": "a1" * 32, "environment": {"python": "3.12.1"}}
    facts["heldout_tokens"] = int(tokens.sum())
    while len(runs := next_runs(study, out)) > left:
        if runs[0].stage == "deciding":
            runs = runs[: len(runs) - left]
        for run in runs:
            rate_loss = 0.1 * abs(math.log2((run.lr or 0.002) / 0.002))
            loss = {"half": 4.4, "v2": 4.3}[run.arm] + rate_loss + 0.01 * rng.random()
            diverges = (run.arm, run.seed, run.lr) in (("v2", 2, None), ("v2", 1, 0.004))
            path = write_ended(study, run, out, math.nan if diverges else loss, **facts)
            lines = []
            for step in range(1, evaluations + 1):
                scores = {"eval/loss": loss + 1 / step, "tasks/mqar": rng.random()}
                lines.append({"step": step, "tokens": 256 * step, **scores})
            write_lines(path, lines)
            nats = tokens * (loss + rng.normal(0, 0.1, documents))
            nats *= loss * tokens.sum() / nats.sum()
            DocumentLosses(nats, tokens, 4 * tokens, texts, 0 * tokens).save(path, 20)


RATES = "[0.001, 0.002, 0.004]"
KINDS = {
    "loss": {},
    "log": {"scale": "log", "also": f"[{LOWER.replace('}', ', at: flops}')}]"},
    "log_rank": {"metric": "tasks/mqar", "rule": SOONER},
    "rates": {"lr": f"{{grid: {RATES}, seeds: [100, 101], steps: 10, extend: 1}}"},
    "sweep": {"lr_sweep": RATES, "metric": "lr_sensitivity"},
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("kind", "left"), [("loss", 1), *((kind, 0) for kind in KINDS)])
def test_verdict_from_values_json_equals_verdict_from_runs(tmp_path, output_of, kind, left):
    keys = {"rule": LOWER, **TWO_ARMS, **KINDS[kind]}
    study, out = study_file(tmp_path / "study.yaml", **keys), tmp_path / "out"
    write_curves(study, out, left=left)
    verdict = judge(study, out)
    assert (verdict.verdict == "exploratory") == bool(left)
    write_verdict(verdict, out)
    again = judge_evidence(study, read_values(study, out / "values.json"))
    assert verdict_page(again).markdown() == verdict_page(verdict).markdown()
    assert verdict_page(again).html() == verdict_page(verdict).html()
    assert verdict_page(verdict).markdown() in output_of(
        "study", "verdict", study.path, f"values={out / 'values.json'}"
    )


def test_error_about_missing_file_values_json_suggests_similar_path(tmp_path, capsys):
    study = study_file(tmp_path / "study.yaml", LOWER, **TWO_ARMS)
    (tmp_path / "values.json").write_text("{}", encoding="utf-8")
    missing = tmp_path / "valus.json"
    assert main(["study", "verdict", str(study.path), f"values={missing}"]) == 2
    message = f"values={missing} does not exist; did you mean {tmp_path / 'values.json'}?"
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    """A study of 40 runs, and its values.json."""
    root = tmp_path_factory.mktemp("forty")
    study = study_file(root / "study.yaml", LOWER, **TWO_ARMS, seeds=str([*range(20)]))
    write_curves(study, root / "out", documents=60)
    write_verdict(judge(study, root / "out"), root / "out")
    return study, root / "out" / "values.json"


def test_values_json_of_forty_runs_is_smaller_than_300_kb(forty):
    study, file = forty
    assert len(read_values(study, file).runs) == 40
    assert file.stat().st_size < 300_000
    assert file.read_text(encoding="utf-8").count("a1" * 32) == 2, "arm facts are stored once"


def test_verdict_from_values_json_is_exploratory_if_study_was_edited(forty, tmp_path):
    study, file = forty
    seeds = str(study.seeds)
    edited = study_file(
        tmp_path / "study.yaml", LOWER.replace("0.0", "0.1"), **TWO_ARMS, seeds=seeds
    )
    verdict = judge_evidence(edited, read_values(edited, file))
    assert verdict.verdict == "exploratory"
    assert verdict.reasons[0].startswith("40 of 40 runs began under another version of study.yaml")


def change(*keys, value):
    """Return an edit of one value; keys is its place."""

    def edit(content):
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return edit


RATE = {"name": "rates/half-lr1-seed0", "loss": 4.0}


def repeat_rate(content):
    content["marks"] = {RATE["name"]: ""}
    content["rates"] = [RATE, RATE]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (repeat_rate, "rates contains rates/half-lr1-seed0 twice"),
        (change("format", value=2), "format=2 must be 1"),
        (change("metric", value="tasks/mqar"), "metric=tasks/mqar is not the study's heldout_loss"),
        (change("more", value=1), "unknown key more"),
        (change("study_hash", value="0"), "study_hash does not match sha256 and digests"),
        (change("runs", 0, "arm", value="v2"), "the study has no run half-seed0 of arm v2, seed 0"),
        (change("runs", 1, "name", value="half-seed0"), "runs contains a name twice"),
        (change("runs", value=[]), "runs is empty"),
        (change("runs", 0, "loss", value=None), "of a diverged run must be null"),
        (change("runs", 0, "loss", value="low"), "runs[0].loss='low' must be a number"),
        (change("runs", 0, "loss", value=1e200), "runs[0].loss=1e+200 must be at most 1e+40"),
        (change("runs", 0, "facts", value=5), "runs[0].facts=5 is out of range of facts"),
        (change("runs", 0, "facts", value=True), "runs[0].facts=True is out of range of facts"),
        (change("runs", 0, "loss", value=-1), "runs[0].loss=-1.0 must not be negative"),
        (change("runs", 0, "value", value=3.5), "half-seed0.value=3.5 must be its loss=4.4"),
        (change("runs", 0, "nats", 0, value=9e5), "half-seed0.loss=4.4"),
        (change("runs", 0, "nats", 0, value=None), "half-seed0.nats of a run with a loss must"),
        (change("runs", 0, "tokens", 1, value=256), "half-seed0.tokens must increase"),
        (change("rates", value=[RATE]), "rates contains rates/half-lr1-seed0, which is not in"),
        (change("runs", 0, "nats", value=[1.0]), "half-seed0: nats and texts are of unequal"),
        (
            change("runs", 0, "values", value=[]),
            "half-seed0: tokens and values do not form a curve",
        ),
        (change("runs", 0, "nats", 3, value=1e50), "runs[0].nats[3]=1e+50 must be at most 1e+40"),
        (change("runs", 0, "tokens", 0, value=-1), "runs[0].tokens[0]=-1 must not be negative"),
        (change("facts", 0, "parameters", value=0), "facts[0].parameters=0.0 must be positive"),
        (change("texts", 0, "tokens", 0, value=0), "texts[0].tokens[0]=0 must be at least 1"),
    ],
)
def test_verdict_command_prints_one_error_line_for_invalid_values_json(
    forty, tmp_path, error_of, edit, message
):
    study, file = forty
    content = read_json(file)
    edit(content)
    write_json(tmp_path / "values.json", content)
    words = ["study", "verdict", str(study.path), f"values={tmp_path / 'values.json'}"]
    error = error_of(*words)
    assert f"{tmp_path}/values.json does not have the values of this study: " in error
    assert message in error


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "\x00", None])
def test_read_values_raises_error_if_file_is_missing_or_invalid(forty, tmp_path, text):
    file = tmp_path / "values.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="values"):
        read_values(forty[0], file)


def test_values_with_losses_of_documents_need_a_metric_of_losses(forty, tmp_path):
    study, file = forty[0], tmp_path / "values.json"
    text = (study.path.parent / "out/values.json").read_text(encoding="utf-8")
    file.write_text(text.replace('"heldout_loss"', '"train_loss"'), encoding="utf-8")
    other = replace(study, metric="train_loss")
    with pytest.raises(CheckpointError, match=r"half-seed0\.texts must be null with metric"):
        read_values(other, file)
