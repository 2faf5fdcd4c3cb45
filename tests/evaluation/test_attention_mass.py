"""Attention mass compared with the variants' equations in float64, and in `diffllm evaluate`.

Shapes: T tokens, D model width, h heads of an attention map.
"""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs.models import float64_model
from runs.written import small_tokenizer, write_weights

from diffllm.cli import main
from diffllm.core.errors import ConfigError
from diffllm.data.tasks.task import TASKS, Example, Task, task
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.attention_mass import (
    DECIMALS,
    AttentionMass,
    kinds_of,
    measure_batch,
    shares_of,
)
from diffllm.evaluation.maps import last_maps
from diffllm.evaluation.scoring import spelt_question
from diffllm.statistics.bootstrap import of_documents

VARIANTS = ("standard", "gated", "standard_sink", "standard_off_by_one", "diff_v1", "diff_v2")
CONTEXTS = [[5, 9, 2, 7, 7, 1, 3], [8, 4, 6, 1], [3, 3, 2, 9, 5]]
KINDS = [[2, 1, 0, 0, 1, 1, 1], [2, 0, 1, 1], [2, 1, 1, 1, 0]]


def three_layer_model(variant):
    model = float64_model(f"attention={variant}", "model.n_layers=3")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lambda_" in name and variant == "diff_v1":
                param.fill_(0.2 if name.endswith("1") else 0.1)  # lambda is 0.5 to 0.9
    return model


def weights_by_equations(variant, layer, attention, x, rope):
    """Return the weights (h, T) of the last query of x (1, T, D), by name of the attention map."""
    q, k, _ = attention.project(x, rope)
    heads = q.shape[2]
    scores = [k[0, :, h * k.shape[2] // heads] @ q[0, -1, h] / math.sqrt(8) for h in range(heads)]
    exp = torch.stack(scores).exp()
    term = {"standard_sink": lambda: attention.sink.exp(), "standard_off_by_one": lambda: 1.0}
    total = exp.sum(-1) + (term[variant]() if variant in term else 0.0)
    weights = exp / total[:, None]
    if variant == "diff_v1":  # `project` puts the first members of all pairs before the second
        first, second = weights[: heads // 2], weights[heads // 2 :]
        lam = (attention.lambda_q1 @ attention.lambda_k1).exp()
        lam = lam - (attention.lambda_q2 @ attention.lambda_k2).exp()
        lam = lam + 0.8 - 0.6 * math.exp(-0.3 * layer)
    elif variant == "diff_v2":
        first, second = weights[0::2], weights[1::2]
        lam = torch.sigmoid(attention.w_lambda.weight @ x[0, -1])[:, None]
    else:
        return {"map": weights}
    return {"map 1": first, "map 2": second, "difference": first - lam * second}


def read_by(model, context, rope):
    """Yield the input (1, T, D) of each layer's attention for one context."""
    x = model.tok_embeddings(torch.tensor([context]))
    for block in model.layers:
        yield block.attention_norm(x)
        x, *_ = block(x, rope)


def summed(weights, kinds):
    """Sum weights (h, T) by kind of token; return (h, 3)."""
    sums = [[sum(w for w, k in zip(row, kinds, strict=True) if k == i) for i in range(3)]
            for row in weights.tolist()]  # fmt: skip
    return torch.tensor(sums, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_mass_matches_reference_if_batch_is_padded(variant):
    model = three_layer_model(variant)
    ids = torch.tensor([context + [0] * (7 - len(context)) for context in CONTEXTS])
    kinds = torch.tensor([own + [1] * (7 - len(own)) for own in KINDS])
    by_kind = torch.nn.functional.one_hot(kinds, 3).double()
    lengths = torch.tensor([len(context) for context in CONTEXTS])
    layers = [shares_of(maps, by_kind) for maps in last_maps(model, ids, lengths)]
    subject = SimpleNamespace(model=model, device="cpu", checkpoint="")
    lines = measure_batch(subject, CONTEXTS, KINDS)
    assert len(layers) == 3
    negative = 0
    for row, (context, own, line) in enumerate(zip(CONTEXTS, KINDS, lines, strict=True)):
        rope = model.rope(0, len(context))
        for layer, x in enumerate(read_by(model, context, rope)):
            no_key, shares = layers[layer][0][row], layers[layer][1]
            maps = weights_by_equations(variant, layer, model.layers[layer].attention, x, rope)
            *others, last = maps
            assert set(shares) == {"", *others, *(["signed"] if others else [])}
            for name, weights in maps.items():
                expected = summed(weights.abs(), own)
                if not others or name != last:
                    expected[:, 2] += 1 - weights.sum(-1)
                expected /= expected.sum(-1, keepdim=True)
                found = shares["" if name == last else name][row]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
                torch.testing.assert_close(found.sum(-1), torch.ones_like(found[:, 0]))
            if others:
                expected = summed(maps[last], own)
                torch.testing.assert_close(shares["signed"][row], expected, rtol=0, atol=1e-12)
                negative += int((maps[last] < 0).sum())
            assert bool((no_key > 1e-6).any()) == (variant in VARIANTS[2:4])
            for name, values in shares.items():
                assert line["maps"][name][layer] == approx(values[row].mean(0).tolist())
            assert line["heads"][layer] == approx(shares[""][row, :, 0].tolist())
            assert line["no key"][layer] == approx(no_key.mean().item())
    assert (negative > 0) == variant.startswith("diff")


def approx(values):
    return pytest.approx(values, abs=10**-DECIMALS)


def test_attention_mass_matches_hand_calculation():
    first = torch.tensor([[[0.1, 0.6, 0.2, 0.1]]]).double()
    maps = {"map 1": first, "map 2": first.flip(-1), "difference": first - first.flip(-1)}
    _, shares = shares_of(maps, torch.eye(3)[[2, 0, 1, 0]].double()[None])
    assert shares["map 2"].flatten().tolist() == pytest.approx([0.3, 0.6, 0.1])
    assert shares["signed"].flatten().tolist() == pytest.approx([0.4, -0.4, 0.0])
    assert shares[""].flatten().tolist() == pytest.approx([0.5, 0.5, 0.0])
    maps["difference"] = torch.zeros_like(first)  # like a clamped map without positive weights
    assert not shares_of(maps, torch.eye(3)[[2, 0, 1, 0]].double()[None])[1][""].any()


@pytest.fixture(scope="module")
def loaded_tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(small_tokenizer())
    return Tokenizer.from_file(path)


def test_tokens_at_evidence_borders_are_classified_as_evidence(loaded_tokenizer):
    prompt = "def abcd(x):\n    return 12, 日本 def return\n# return abcd +"
    pieces = [
        loaded_tokenizer.piece(token).replace("\u2581", " ")
        for token in loaded_tokenizer.encode(prompt)
    ]
    sizes = [1 if re.match("<0x..>", piece) else len(piece.encode()) for piece in pieces]
    ends = np.cumsum(sizes)
    assert ends[-1] == len(prompt.encode())
    for text in ("abcd", "bc", " 12", "12", "日", "本 def", "return\n", "# return", "def"):
        start = prompt.index(text)
        example = Example(prompt, (" 1", " 2"), 0, evidence=(start, start + len(text)))
        question = spelt_question(example, loaded_tokenizer)
        first, last = (len(prompt[:i].encode()) for i in example.evidence)
        overlaps = (ends > first) & (ends - sizes < last)
        expected = [2, *(1 - overlaps)][: len(question.context)]
        assert kinds_of(example, question, loaded_tokenizer) == expected, text
    for evidence in ((3, 3), (-1, 4), (0, len(prompt) + 1)):
        example = Example(prompt, (" 1", " 2"), 0, evidence=evidence)
        with pytest.raises(ConfigError, match=r"an example has evidence=\("):
            kinds_of(example, spelt_question(example, loaded_tokenizer), loaded_tokenizer)


def line(heads, **facts):
    """Return a result line of two layers with two heads; filler and sink have equal shares."""
    shares = [[sum(own) / 2, *[(1 - sum(own) / 2) / 2] * 2] for own in heads]
    counts = {"level": 0, "tokens": 20, "target_tokens": 4, "depth": 0.5}
    return counts | {"no key": [0.0, 0.0], "heads": heads, "maps": {"": shares}} | facts


def test_attention_mass_scores_match_reference_values(monkeypatch):
    drawn = np.random.default_rng(0).uniform(0, 0.5, (16, 2, 2))
    drawn[:, [0, 1], [1, 0]] += 0.3
    facts = [{"text": i % 8 // 2, "level": i // 8, "depth": i % 2} for i in range(16)]
    lines = [line(own.tolist(), **each) for own, each in zip(drawn, facts, strict=True)]
    settings = {"levels": [{"length": 100}, {"length": 200}]}
    measure = AttentionMass(TASKS["needle"])
    monkeypatch.setattr(type(measure.task), "cluster", "text")
    scores = {score.of: score for score in measure.scores(settings, lines)}
    ratio = "target / (target + filler)"
    assert list(scores) == ["target", "filler", "sink", ratio, "target, best heads"]
    target, best = scores["target"], scores["target, best heads"]
    by_text = drawn.mean((1, 2)).reshape(8, 2).sum(1)
    assert target.value == pytest.approx(drawn.mean())
    assert target.interval == pytest.approx(of_documents(by_text, np.full(8, 2)))
    assert (target.examples, target.more["independent"]) == (16, 8)
    assert target.chance == pytest.approx(0.2)
    means = [drawn[:, 0].mean(), drawn[:, 1].mean(), drawn[:8].mean(), drawn[8:].mean()]
    means += [drawn[::2].mean(), drawn[1::2].mean()]
    groups = {"by_layer": "01", "by_level": ("length 100", "length 200"), "by_depth": "01"}
    for i, (key, names) in enumerate(groups.items()):
        assert target.more[key] == pytest.approx(dict(zip(names, means[2 * i :], strict=False)))
    layer = of_documents(drawn[:, 1].mean(1).reshape(8, 2).sum(1), np.full(8, 2))
    assert target.more["layer_intervals"]["1"] == pytest.approx(layer)
    assert best.more["heads"] == [1, 0]
    assert best.value == pytest.approx((drawn[:, 0, 1].mean() + drawn[:, 1, 0].mean()) / 2)
    filler = (1 - drawn.mean()) / 2
    assert scores[ratio].value == pytest.approx(drawn.mean() / (drawn.mean() + filler))
    assert scores[ratio].chance == pytest.approx(4 / 19)
    few = measure.scores(settings, lines[:14])
    assert all(score.interval is None for score in few)
    only_sink = {"": [[0.0, 0.0, 1.0]] * 2}
    sinks = [line([[0.0] * 2] * 2, maps=only_sink, text=i) for i in range(9)]
    undefined = measure.scores(settings, sinks)[3]
    assert math.isnan(undefined.value)
    assert undefined.interval is None
    assert undefined.more["by_layer"] == undefined.more["layer_intervals"] == {"0": None, "1": None}


@pytest.fixture
def recall(monkeypatch):
    """Register a task that asks for the second letter of a pair, with two examples per text."""
    monkeypatch.setitem(TASKS, "recall", TASKS["mqar"])  # monkeypatch removes the task at the end.
    monkeypatch.delitem(TASKS, "recall")

    @task("recall", pairs=(4, 6))
    class Recall(Task):
        cluster = "text"

        def examples(self, level, number, seed, count):
            for i in range(number):
                rng, place = self.generator(level, seed, i // 2), i % 2
                letters = rng.sample("abcdefghijklmnop", 2 * level["pairs"])
                told = [f" {a} {b}" for a, b in zip(letters[::2], letters[1::2], strict=True)]
                prompt = ",".join([*told, f" {letters[2 * place]}"])
                values = tuple(f" {value}" for value in letters[1::2])
                evidence = (5 * place, 5 * place + 4)
                yield Example(prompt, values, place, {"text": i // 2}, evidence)

        def example(self, rng, level, count):
            return next(self.examples(level, 1, str(rng.random()), count))


def test_attention_mass_appears_in_evaluate_output_and_report(recall, tmp_path, output_of):
    for variant in ("standard_off_by_one", "diff_v2"):
        for seed in (0, 1):
            words = (f"attention={variant}", "seq_len=64", f"seed={seed}")
            run = write_weights(tmp_path / f"{variant}{seed}", small_tokenizer(), *words)
    words = ["evaluate", f"run={run}", "tasks=[attention_mass_recall]"]
    told = json.loads(output_of(*words, "--json"))["attention_mass_recall"]
    file = run / "evaluation/step-00000000/attention_mass_recall.jsonl"
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    assert texts == [i // 2 for i in range(50)] * 2
    scores = {score["of"]: score for score in told["scores"]}
    assert sum(scores[kind]["value"] for kind in ("target", "filler", "sink")) == approx(1)
    signed = sum(scores[f"signed {kind}"]["value"] for kind in ("target", "filler", "sink"))
    assert 0 < signed < 1  # 1 - lambda
    assert scores["signed target"]["range"] is None
    for score in scores.values():
        assert score["interval"][0] <= score["value"] <= score["interval"][1]
        assert (score["examples"], score["independent"], len(score["by_layer"])) == (100, 50, 2)
    assert set(scores["target"]["by_level"]) == {"pairs 4", "pairs 6"}
    table = output_of(*words, "level={pairs: 5}", "limit=16")
    assert "attention of the last token, mean over heads and layers" in table
    assert re.search(r"attention_mass_recall +target +0\.\d+ +0\.\d+ +0\.\d+ to 0\.\d+ +16", table)
    compared = output_of("evaluate", f"run={tmp_path}", *words[2:], "limit=16")
    for of in ("target", "sink, no key", "map 2 filler"):
        assert re.search(rf"attention_mass_recall +{of} ", compared)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "attention_mass_recall, attention of the last token" in page
    assert "target, layer 1" in page


def test_attention_mass_is_refused_if_task_is_unknown_or_has_no_evidence(tmp_path, error_of):
    run = write_weights(tmp_path / "run", small_tokenizer(), "seq_len=128")
    for name, said in (
        ("attention_mass_icl", "attention_mass_icl: the examples of the task icl have no evidence"),
        ("attention_mass_neddle", "did you mean attention_mass_needle?"),
    ):
        error = error_of("evaluate", f"run={run}", f"tasks=[{name}]", "limit=2")
        assert said in error
