"""The evaluation `position` against loops over its definition, in float64."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from runs.written import data_words, made, subject_of

from diffllm.data.heldout import heldout_documents
from diffllm.data.prepared import TokenData
from diffllm.evaluation.evaluation import EvaluationOptions, Line, Subject
from diffllm.evaluation.position import octave, sums
from diffllm.evaluation.suite import EVALUATIONS
from diffllm.model.transformer import build_model
from diffllm.statistics.bootstrap import of_documents

POSITION = EVALUATIONS["position"]
Bins = dict[str, dict[str, list[float]]]


def bin_of(number: int) -> str:
    ends = [(2**k, 2 ** (k + 1) - 1) for k in range(1, 20)]
    if number < 2:
        return str(number)
    return next(f"{low}-{high}" for low, high in ends if low <= number <= high)


def bins_by_definition(text: list[int], losses: list[float], predicted: list[bool]) -> Bins:
    """Sum a document's losses by position, distance and span, one target at a time."""
    found: Bins = {"all": {}, "position": {}, "distance": {}, "span": {}}
    for i, token in enumerate(text):
        same = [j for j in range(i) if text[j] == token]
        distance = bin_of(i - same[-1]) if same else "none"
        bins = {"all": "", "position": bin_of(i), "distance": distance}
        seen = [text[j] for j in range(2, i) if text[j - 2 : j] == text[i - 2 : i]]
        if i >= 2 and token in seen:
            bins["span"] = "repeated"
        elif i >= 2 and not seen:
            bins["span"] = "first"
        for kind, name in bins.items():
            if predicted[i]:
                nats, tokens = found[kind].get(name, [0.0, 0])
                found[kind][name] = [nats + losses[i], tokens + 1]
    return found


def test_loss_sums_of_position_evaluation_match_reference():
    rng = random.Random(0)
    for length in (1, 2, 3, 40, 300):
        text = rng.choices(range(6), k=length)
        losses = [rng.random() for _ in text]
        for share in (0.0, 0.3):
            predicted = [rng.random() >= share for _ in text]
            assert sums(text, losses, predicted) == bins_by_definition(text, losses, predicted)


def test_position_evaluation_separates_first_and_repeated_spans():
    text = [*b"ab1.ab1.ab2."]
    found = sums(text, [float(i) for i in range(12)], [True] * 12)["span"]
    #   a b 1 . a b 1 . a b 2 .    "b2." follows two tokens that are new in this order
    assert found == {"first": [2.0 + 3 + 4 + 5 + 11, 5], "repeated": [6.0 + 7 + 8 + 9, 4]}
    expected = ["0", "1", "2-3", "2-3", "4-7", "4-7", "8-15", "1024-2047"]
    assert [octave(n) for n in (0, 1, 2, 3, 4, 7, 8, 1024)] == expected


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "masked"])
def subject_and_data(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Subject, TokenData]:
    directory = tmp_path_factory.mktemp("position")
    words = (*data_words(directory), f"data.mask_documents={request.param}", "seq_len=48")
    _, data = made(directory / "run", *words, "attention=diff_v2")
    return subject_of(directory / "run"), data


def position_lines(
    subject: Subject, limit: int | None = None, seq_len: int | None = None
) -> list[Line]:
    options = EvaluationOptions(limit=limit, seq_len=seq_len)
    return POSITION.lines(subject, POSITION.settings(subject, options))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("seq_len", [None, 16, 100])
@torch.no_grad()
def test_batched_position_evaluation_matches_float64_reference(subject_and_data, seq_len):
    subject, data = subject_and_data
    stream, eos_id = data.split("heldout"), data.manifest.eos_id
    every = heldout_documents(stream, eos_id)
    assert max(every.lengths) > 48 > 20 > min(every.lengths), "some are cut"
    lines = position_lines(subject, seq_len=seq_len)
    assert subject.model.cfg.seq_len == subject.model.rope.seq_len == 48
    assert [line["start"] for line in lines] == every.starts.tolist()
    # A batch with different documents and padding.
    for line in position_lines(subject, limit=5, seq_len=seq_len):
        (same,) = (each for each in lines if each["start"] == line["start"])
        assert line["all"][""] == pytest.approx(same["all"][""], rel=1e-5)
    exact = build_model(dataclasses.replace(subject.cfg.model, seq_len=100))
    exact.load_state_dict(subject.model.state_dict())
    exact = exact.double()
    for line, length in zip(lines, every.lengths.tolist(), strict=True):
        text = stream.tokens(line["start"], line["start"] + min(length, seq_len or 48)).tolist()
        logits = exact(torch.tensor([[eos_id, *text[:-1]]]))[0]
        if subject.cfg.data.mask_documents:  # The EOS belongs to the previous document.
            logits = torch.cat((exact(torch.tensor([[eos_id]]))[0], exact(torch.tensor([text]))[0]))
        logs = logits.log_softmax(-1)
        losses = [-logs[i, token].item() for i, token in enumerate(text)]
        expected = bins_by_definition(text, losses, [True] * len(text))
        assert line.keys() == {"start", *expected}
        for kind, bins in expected.items():
            assert line[kind].keys() == bins.keys()
            for name, (nats, tokens) in bins.items():
                assert line[kind][name] == [pytest.approx(nats, rel=1e-4), tokens]


def test_position_score_equals_mean_loss_of_tokens_in_bin(subject_and_data):
    subject, _ = subject_and_data
    settings = POSITION.settings(subject, EvaluationOptions())
    lines = POSITION.lines(subject, settings)
    scores = {score.of: score for score in POSITION.scores(settings, lines)}
    bins = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63")
    assert list(scores) == [
        "all",
        *(f"position {name}" for name in bins),
        *(f"distance {name}" for name in (*bins[1:], "none")),
        *("span repeated", "span first"),
    ]
    totals = dict.fromkeys(scores, 0.0)
    tokens = dict.fromkeys(scores, 0)
    for line in lines:
        for kind in ("all", "position", "distance", "span"):
            for name, (nats, count) in line[kind].items():
                totals[f"{kind} {name}".strip()] += nats
                tokens[f"{kind} {name}".strip()] += count
    for name, score in scores.items():
        assert score.value == pytest.approx(totals[name] / tokens[name])
        kind, _, numbers = name.partition(" ")
        start = numbers.partition("-")[0]
        level = {"level": {kind: int(start)}} if start.isdigit() else {}
        assert score.more == {"tokens": tokens[name], **level}
        if score.examples < 8:
            assert score.interval is None
        else:
            assert score.interval is not None
            assert score.interval[0] <= score.value <= score.interval[1]
    assert scores["all"].interval != scores["position 0"].interval
    assert sum(tokens[name] for name in scores if name.startswith("position")) == tokens["all"]
    few = POSITION.scores(settings, lines[:7])
    assert all(score.interval is None for score in few)
    assert POSITION.scores(settings, lines) == list(scores.values())


def test_position_evaluation_ignores_tokens_outside_loss_mask(tmp_path):
    words = ("data=synthetic", "data.task=mqar", "data.examples=60", "seq_len=64")
    more = (f"data.cache_dir={tmp_path / 'cache'}", "data.vocab_size=272")
    _, data = made(tmp_path / "run", *words, *more)
    stream = data.split("heldout")
    assert stream.masked
    lines = position_lines(subject_of(tmp_path / "run"))
    chosen = heldout_documents(stream, data.manifest.eos_id, most=200)
    for line, size in zip(lines, chosen.lengths.tolist(), strict=True):
        start = line["start"]
        predicted = stream.loss_mask(start, start + min(size, 64)).sum()
        for kind in ("all", "position", "distance"):
            assert sum(count for _, count in line[kind].values()) == predicted
    assert json.loads(json.dumps(lines)) == lines


@pytest.mark.parametrize(("documents", "least"), [(8, 0.9), (60, 0.92)])
def test_document_bootstrap_interval_covers_mean_of_simulated_documents(documents, least):
    """Simulate 400 samples of documents whose losses depend on length."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        tokens = rng.integers(5, 200, documents)
        loss = 3 + rng.normal(0, 0.5, documents) + (tokens < 50)
        interval = of_documents(loss * tokens, tokens, draws=400)
        assert interval is not None
        short, mean_of_short, mean_of_all = 45 / 195, 27, 102
        mean = 3 + short * mean_of_short / mean_of_all
        covered += interval[0] <= mean <= interval[1]
    assert least <= covered / 400 <= 0.98


def test_document_bootstrap_returns_none_if_fewer_than_8_documents_have_tokens():
    assert of_documents(np.ones(9), np.array([1] * 7 + [0] * 2)) is None
    assert of_documents(np.ones(8), np.ones(8)) == (1.0, 1.0)
