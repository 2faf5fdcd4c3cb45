"""Score continuations of contexts, by log-likelihood and by greedy decoding.

Shapes: B rows of a batch, T tokens, V vocabulary.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.data.tasks.task import Example
from diffllm.data.tokenizer import Tokenizer
from diffllm.model import Transformer
from diffllm.model.attention.base import KVCache

T = TypeVar("T")
PASS_TOKENS = 16_384
"""Maximum tokens of a forward pass over several rows, including padding."""
CACHED_FROM = 64
"""Contexts of at least this many tokens are read once for all continuations and similar contexts.
Shorter contexts are read again with each continuation, many rows at a time."""
LOGITS = 1024
"""Number of logits that needs as much memory as one token of PASS_TOKENS."""
CACHE_POSITIONS = 2**18
"""Maximum positions of the caches that are copied at a time for continuations of a context."""

Row = tuple[list[int], list[list[int]]]
"""A context and its continuations: all with a single token, or one of any length."""


@dataclass(frozen=True)
class Question:
    """Token ids of an example: its context, and a continuation for each candidate answer."""

    context: list[int]
    continuations: list[list[int]]

    @property
    def positions(self) -> int:
        # The last token of a continuation is predicted, but not read.
        longest = max(map(len, self.continuations))
        return len(self.context) + longest - 1

    @property
    def single(self) -> bool:
        return all(len(ids) == 1 for ids in self.continuations)

    @property
    def rows(self) -> list[Row]:
        if self.single:
            return [(self.context, self.continuations)]
        return [(self.context, [ids]) for ids in self.continuations]


class Scored(NamedTuple):
    log_likelihood: float
    """Sum over the tokens of the continuation, in nats."""
    greedy: bool
    """Whether greedy decoding yields the tokens of the continuation."""


def spelt_question(example: Example, tokenizer: Tokenizer) -> Question:
    """Encode an example as a Question whose context begins with the BOS, or else the EOS.

    Encode the prompt alone and the prompt with each candidate. The context is the longest common
    prefix of these encodings. It is shortened if a continuation would otherwise have no token.
    """
    texts = [example.prompt]
    for candidate in example.candidates:
        texts.append(example.prompt + candidate)
    encodings = []
    for ids in tokenizer.encode_batch(texts, threads=1):
        encodings.append([tokenizer.start_id, *ids])
    prompt_ids, *candidate_ids = encodings
    # The first token of a candidate may also contain the last characters of the prompt.
    n_shared = common(encodings)
    shortest = min(map(len, candidate_ids))
    length = min(n_shared, shortest - 1)
    continuations = [ids[length:] for ids in candidate_ids]
    return Question(prompt_ids[:length], continuations)


@torch.no_grad()
def score(
    model: Transformer,
    questions: Sequence[Question],
    advance: Callable[[int], None] = lambda done: None,
) -> list[list[Scored]]:
    """Compute the log-likelihood of each continuation, and whether greedy decoding yields it.

    Returns one list per question, in the order of `questions`. Raises ValueError if a question
    exceeds the model's maximum length.

    Args:
        model: a model in eval mode.
        advance: progress callback; its argument is the number of rows of `Question.rows` that were
            scored since the last call.
    """
    short: list[int] = []
    long: list[int] = []
    for i, question in enumerate(questions):
        # Continuations of one token need no cache: one row gives the scores of all.
        needs_cache = not question.single and len(question.context) >= CACHED_FROM
        if needs_cache:
            long.append(i)
        else:
            short.append(i)
    short_scores = score_batches(model, [questions[i] for i in short], advance)
    scores_by_place = dict(zip(short, short_scores, strict=True))

    def half_of_context_is_shared(group: list[int], i: int) -> bool:
        context = questions[i].context
        context_before = questions[group[-1]].context
        n_shared = common([context_before, context])
        return 2 * n_shared >= len(context)

    for group in grouped(long, half_of_context_is_shared):
        similar = [questions[i] for i in group]
        similar_scores = score_with_cache(model, similar)
        for i, scores in zip(group, similar_scores, strict=True):
            scores_by_place[i] = scores
            advance(len(scores))
    return [scores_by_place[i] for i in range(len(questions))]


@torch.no_grad()
def score_batches(
    model: Transformer,
    questions: Sequence[Question],
    advance: Callable[[int], None] = lambda done: None,
    together: bool = False,
) -> list[list[Scored]]:
    """Return the same scores as `score`, computed in batches without a KV cache.

    Args:
        advance: progress callback, as in `score`.
        together: whether to divide each batch between all ranks. If True, every rank must call this
            function with the same questions, and every rank receives all scores.
    """
    rank, world_size = 0, 1
    if together:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    rows: list[Row] = []
    for question in questions:
        rows += question.rows
    # Number of tokens that need as much memory as the logits of one position.
    width = model.cfg.vocab_size // LOGITS

    def size(place: int) -> int:
        context, continuations = rows[place]
        # Several continuations of a row have one token each, so their lengths are equal.
        n_scored = len(continuations[0])
        return max(len(context) + n_scored, width * n_scored)

    scores_by_row: dict[int, list[Scored]] = {}
    most = PASS_TOKENS * world_size
    for batch in by_length(range(len(rows)), size, most):
        places = batch[rank::world_size]
        # A sharded model (FSDP) needs the same number of forward passes on all ranks. A rank
        # without a row of this batch scores the first row, and `zip` ignores these scores.
        scored_places = places if places else batch[:1]
        scores = score_rows(model, [rows[place] for place in scored_places])
        scores_by_row |= zip(places, scores, strict=False)
        advance(len(batch))
    if together:
        # Every rank reaches this collective, because all ranks have the same questions.
        parts: list[dict[int, list[Scored]]] = [{} for _ in range(world_size)]
        dist.all_gather_object(parts, scores_by_row)
        scores_by_row = dict(ChainMap(*parts))
    scores_by_question = []
    place = 0
    for question in questions:
        question_scores: list[Scored] = []
        for _ in question.rows:
            question_scores += scores_by_row[place]
            place += 1
        scores_by_question.append(question_scores)
    return scores_by_question


def by_length(items: Sequence[T], length: Callable[[T], int], most: int) -> list[list[T]]:
    """Sort items by `length` and split them into batches that need little padding.

    `length` returns the number of tokens of an item. A batch has at most `most` tokens, including
    padding, unless it is a single item.
    """

    def fits(batch: list[T], item: T) -> bool:
        # Items come by length, so the batch would be padded to the length of this item.
        padded_size = length(item) * (len(batch) + 1)
        return padded_size <= most

    return grouped(sorted(items, key=length), fits)


def grouped(items: Sequence[T], joins: Callable[[list[T], T], bool]) -> list[list[T]]:
    """Split items into groups of consecutive items.

    An item is added to the current group if `joins(group, item)` is True, else it starts a group.
    """
    groups: list[list[T]] = []
    for item in items:
        if groups and joins(groups[-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def padded(rows: Sequence[Sequence[int]], filler: int, device: torch.device) -> Tensor:
    """Return rows of token ids as an int64 tensor (B, T); append `filler` to shorter rows."""
    longest = max(map(len, rows))
    filled = []
    for row in rows:
        padding = [filler] * (longest - len(row))
        filled.append([*row, *padding])
    return torch.tensor(filled, device=device)


def score_rows(
    model: Transformer, rows: Sequence[Row], caches: list[KVCache] | None = None
) -> list[list[Scored]]:
    """Score the continuations of all rows in one forward pass.

    Args:
        caches: one KV cache per layer, with a prefix that all contexts share and that `rows` does
            not contain; None if `rows` contains the complete contexts.
    """
    device = model.tok_embeddings.weight.device
    inputs = []
    first_places = []
    longest = 0
    for context, continuations in rows:
        # Several continuations have one token each, which no input contains: the logits of the last
        # context token score all of them.
        inputs.append([*context, *continuations[0][:-1]])
        first_places.append([len(context) - 1])
        longest = max(longest, len(continuations[0]))
    ids = padded(inputs, 0, device)
    first = torch.tensor(first_places, device=device)  # (B, 1)
    offsets = torch.arange(longest, device=device)
    # A short continuation has fewer positions than the longest; its additional logits are unused.
    places = (first + offsets).clamp_max(ids.shape[1] - 1)
    # The logits have no name, so that they are freed before the softmax.
    logs = model(ids, caches=caches, last=places).double().log_softmax(-1)  # (B, longest, V)
    scores = []
    for row_logs, (_, continuations) in zip(logs, rows, strict=True):
        likeliest = row_logs.argmax(-1).tolist()
        row_scores = []
        for continuation in continuations:
            n_tokens = len(continuation)
            token_logs = row_logs[range(n_tokens), continuation]
            is_greedy = likeliest[:n_tokens] == continuation
            row_scores.append(Scored(token_logs.sum().item(), is_greedy))
        scores.append(row_scores)
    return scores


def score_with_cache(model: Transformer, questions: Sequence[Question]) -> Iterator[list[Scored]]:
    """Yield each question's scores; compute the KV cache of the contexts' common prefix once."""
    contexts = [question.context for question in questions]
    shortest = min(map(len, contexts))
    # The logits of the last context token score the first token of a continuation, so at least
    # one token of each context stays outside the cache.
    length = min(common(contexts), shortest - 1)
    device = model.tok_embeddings.weight.device
    caches = model.new_caches(1, length)
    if length:
        prefix = torch.tensor([contexts[0][:length]], device=device)
        # Only the caches are used, so compute the logits of a single position.
        last = torch.tensor([length - 1], device=device)
        model(prefix, caches=caches, last=last)
    for question in questions:
        rest = question.context[length:]
        # The last token of a continuation is predicted, but not read.
        longest = max(map(len, question.continuations))
        room = len(rest) + longest - 1
        at_once = max(1, CACHE_POSITIONS // (length + room))
        scores: list[Scored] = []
        for start in range(0, len(question.continuations), at_once):
            continuations = question.continuations[start : start + at_once]
            rows = [(rest, [ids]) for ids in continuations]
            # The forward pass writes into the copies, so that the prefix stays as it is.
            copies = [cache.copies(len(rows), room) for cache in caches]
            for row_scores in score_rows(model, rows, copies):
                scores += row_scores
        yield scores


def common(texts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens in the longest common prefix of all texts."""
    shortest = min(map(len, texts))
    for i in range(shortest):
        tokens = {ids[i] for ids in texts}
        if len(tokens) > 1:
            return i
    return shortest
