"""Scores of continuations in batches and with caches equal scores of single texts."""

from typing import Any

import pytest
import torch
from runs.models import random_questions, tiny_model

from diffllm.data.tasks.task import Example
from diffllm.evaluation import scoring
from diffllm.evaluation.scoring import Question, score, spelt_question
from diffllm.model import Transformer
from diffllm.model.generate import generate

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")


SIZES = [(3, (1, 1)), (40, (2, 5, 1)), (7, (3, 3)), (80, (4, 9, 4, 4)), (1, (2,)), (80, (1, 1))]
"""Length of each context, and lengths of its continuations."""


def scored_model(variant: str) -> Transformer:
    return tiny_model(f"attention={variant}", "seq_len=96", "model.init_std=0.1").eval()


@torch.no_grad()
def unbatched_scores(model: Transformer, question: Question) -> list[float]:
    """Score one text at a time, without a cache."""
    found = []
    for continuation in question.continuations:
        ids = question.context + continuation
        logs = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        own = logs[len(question.context) - 1 :]
        found.append(own.gather(1, torch.tensor(continuation)[:, None]).sum().item())
    return found


def generated(model: Transformer, context: list[int], count: int) -> list[int]:
    return generate(model, [context], count, temperature=0)[0][len(context) :]


def with_generated(model: Transformer, question: Question) -> Question:
    """Add the model's greedy continuation to the continuations of a question."""
    own = generated(model, question.context, 1 if question.single else 3)
    return Question(question.context, [*question.continuations, own])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("cached_from", "tokens", "cache"), [(0, 200, 100), (50, 1, 1), (999, 500, 1)]
)
def test_batched_answer_scores_match_scores_of_single_sequences(
    monkeypatch, variant, cached_from, tokens, cache
):
    monkeypatch.setattr(scoring, "CACHED_FROM", cached_from)
    monkeypatch.setattr(scoring, "PASS_TOKENS", tokens)
    monkeypatch.setattr(scoring, "CACHE_POSITIONS", cache)
    model = scored_model(variant)
    asked = [with_generated(model, question) for question in random_questions(SIZES)]
    told: list[int] = []
    found = score(model, asked, told.append)
    greedy = 0
    for question, scores in zip(asked, found, strict=True):
        values = [one.log_likelihood for one in scores]
        assert values == pytest.approx(unbatched_scores(model, question), abs=1e-5)
        for one, ids in zip(scores, question.continuations, strict=True):
            assert one.greedy == (generated(model, question.context, len(ids)) == ids)
            greedy += one.greedy
    assert sum(told) == sum(len(question.rows) for question in asked)
    assert greedy


def test_by_length_function_limits_padded_size_of_each_batch():
    batches = list(scoring.by_length([50, 10, 20, 200, 10, 50, 30], lambda size: size, 100))
    assert batches == [[10, 10, 20], [30, 50], [50], [200]]


class Letters:
    """A tokenizer of characters that merges a space with the next letter."""

    start_id = 0

    def encode_batch(self, texts: list[str], threads: int) -> list[list[int]]:
        return [[1 + ord(c) for c in text.replace(" a", "\x01")] for text in texts]


def test_spelt_question_separates_prompt_tokens_from_answer_tokens():
    example = Example("to be", (" ab", " ac", " b"), 1)
    question = spelt_question(example, Letters())  # type: ignore[arg-type]
    plain = [1 + ord(c) for c in "to be"]
    assert question.context == [0, *plain]
    assert question.continuations == [[2, 99], [2, 100], [33, 99]]
    alike = spelt_question(Example("to", (" 12", " 13"), 0), Letters())  # type: ignore[arg-type]
    # The context ends at the prompt, although both candidates begin with " 1".
    assert alike.continuations == [[33, 50, 51], [33, 50, 52]]
    only = spelt_question(Example("x", ("y",), 0), Letters())  # type: ignore[arg-type]
    assert (only.context, only.continuations) == ([0, 121], [[122]])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", [1, 2**18])
def test_scoring_computes_common_prefix_of_questions_only_once(monkeypatch, variant, cache):
    """One context is a prefix of the next context, and two texts are scored one after the other."""
    monkeypatch.setattr(scoring, "CACHED_FROM", 1)
    monkeypatch.setattr(scoring, "CACHE_POSITIONS", cache)
    model = scored_model(variant)
    other, *_ = [q for q in random_questions(SIZES) if len(q.context) == 80]
    first, second = other.context[:60], [*other.context[:20], *other.context[:50]]
    asked = [
        Question(text + rest, continuations)
        for text in (first, second)
        for rest, continuations in (
            ([1, 2, 3], [[4, 5], [6]]),
            ([], [[1], [2, 3, 4]]),
            ([1, 2, 3, 4, 5, 6], [[7, 8, 9]]),
        )
    ]
    read: list[int] = []
    plain = Transformer.forward

    def forward(self: Transformer, tokens: torch.Tensor, *others: Any, **named: Any) -> Any:
        read.append(tokens.shape[1])
        return plain(self, tokens, *others, **named)

    monkeypatch.setattr(Transformer, "forward", forward)
    found = score(model, asked)
    monkeypatch.undo()
    assert sum(length >= 50 for length in read) == 2
    for question, scores in zip(asked, found, strict=True):
        values = [one.log_likelihood for one in scores]
        assert values == pytest.approx(unbatched_scores(model, question), abs=1e-5)
