"""How likely a decoder finds continuations of contexts.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.data import Tokenizer
from diffllm.data.tasks.task import Example
from diffllm.model import Transformer
from diffllm.model.attention.base import KVCache

T = TypeVar("T")
TOKENS = 16_384
"""Tokens of a forward pass, padding included, where more than one row is in it."""
CACHED_FROM = 64
"""Tokens of a context from which on it is read once, and its cache continued; shorter ones are read
with each continuation, many rows at a time."""
LOGITS = 1024
"""Logits that take as much room as a token of TOKENS."""
CACHE = 2**18
"""Positions of caches that are copied for a context's continuations at a time."""


@dataclass(frozen=True)
class Question:
    """Token ids that begin alike, and go on in different ways."""

    context: list[int]
    continuations: list[list[int]]

    @property
    def positions(self) -> int:
        """Positions that the longest of its texts takes."""
        return len(self.context) + max(map(len, self.continuations)) - 1

    @property
    def single(self) -> bool:
        return all(len(ids) == 1 for ids in self.continuations)


class Scored(NamedTuple):
    """The scores of one continuation."""

    log_likelihood: float
    """The sum over its tokens, in nats."""
    greedy: bool
    """Whether each of its tokens is the likeliest: generation without chance would make them."""


def question_of(example: Example, tokenizer: Tokenizer) -> Question:
    """Spell an example with a tokenizer, behind the end of a document.

    Each candidate is encoded together with the prompt, as it would come in a text; the context is
    what all of them begin with, the prompt at most.
    """
    texts = [example.prompt, *(example.prompt + candidate for candidate in example.candidates)]
    spelt = [[tokenizer.eos_id, *ids] for ids in tokenizer.encode_batch(texts, threads=1)]
    same = min(common(spelt), *(len(ids) - 1 for ids in spelt[1:]))
    return Question(spelt[0][:same], [ids[same:] for ids in spelt[1:]])


Place = tuple[int, int]
"""A question, and one of its continuations."""


@torch.no_grad()
def score(
    model: Transformer,
    questions: Sequence[Question],
    advance: Callable[[int], None] = lambda done: None,
    cached_from: int = CACHED_FROM,
) -> list[list[Scored]]:
    """Score each continuation of each question.

    Args:
        model: in eval mode; a ValueError of its says that a question is too long.
        advance: called with the number of questions that have been answered since its last call.
        cached_from: contexts of so many tokens are read once for all their continuations, and with
            those of neighbours that begin alike.
    """
    long = [i for i, q in enumerate(questions) if not q.single and len(q.context) >= cached_from]
    short = [i for i in range(len(questions)) if i not in set(long)]
    found = score_batches(model, [questions[i] for i in short], advance)
    of_question = dict(zip(short, found, strict=True))
    for group in by_text(questions, long):
        scores = of_one_text(model, [questions[i] for i in group])
        for i, of_one in zip(group, scores, strict=True):
            of_question[i] = of_one
            advance(1)
    return [of_question[i] for i in range(len(questions))]


@torch.no_grad()
def score_batches(
    model: Transformer,
    questions: Sequence[Question],
    advance: Callable[[int], None] = lambda done: None,
    together: bool = False,
) -> list[list[Scored]]:
    """Score each continuation, each with its context, many rows at a time.

    Args:
        together: all ranks share every batch, as those of a sharded model must; each returns all.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    found: dict[Place, Scored] = {}
    for batch in batches(model, questions, world_size):
        own = batch[rank::world_size]
        scores = of_rows(model, [row(questions, each) for each in own or batch[:1]])
        for (i, j), of_row in zip(own, scores, strict=False):
            found |= {(i, j + k): value for k, value in enumerate(of_row)}
        advance(sum(j == 0 for _, j in batch))
    if together:
        parts: list[dict[Place, Scored]] = [{} for _ in range(world_size)]
        dist.all_gather_object(parts, found)
        found = {place: value for part in parts for place, value in part.items()}
    return [[found[i, j] for j in range(len(q.continuations))] for i, q in enumerate(questions)]


def batches(
    model: Transformer, questions: Sequence[Question], world_size: int
) -> Iterator[list[Place]]:
    """Group rows of about one size: a row is a question whose continuations are single tokens, or
    one continuation of another."""
    width = model.cfg.vocab_size // LOGITS

    def size(place: Place) -> int:
        context, continuations = row(questions, place)
        return max(len(context) + len(continuations[0]), width * len(continuations[0]))

    places = [
        (i, j)
        for i, q in enumerate(questions)
        for j in range(1 if q.single else len(q.continuations))
    ]
    return by_length(places, size, TOKENS * world_size)


def row(questions: Sequence[Question], place: Place) -> tuple[list[int], list[list[int]]]:
    """Return a row's context, and the continuations that it is scored with."""
    question, j = questions[place[0]], place[1]
    return question.context, question.continuations if question.single else [
        question.continuations[j]
    ]


def by_length(items: Sequence[T], length: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Group items of about one length so that a group has at most so much, padding included.

    Within a length their order stays.
    """
    batch: list[T] = []
    for item in sorted(items, key=length):
        if batch and length(item) * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], filler: int, device: torch.device) -> Tensor:
    """Return rows of ids as (B, T) int64, padded behind their ends, where none of them looks."""
    longest = max(map(len, rows))
    filled = [[*row, *[filler] * (longest - len(row))] for row in rows]
    return torch.tensor(filled, device=device)


def of_rows(
    model: Transformer,
    rows: Sequence[tuple[list[int], list[list[int]]]],
    caches: list[KVCache] | None = None,
) -> list[list[Scored]]:
    """Score the continuations of each row, all of one token, or one of any number.

    Args:
        caches: one a layer, of what stands before each row.
    """
    device = model.tok_embeddings.weight.device
    inputs = [[*context, *continuations[0][:-1]] for context, continuations in rows]
    longest = max(len(continuations[0]) for _, continuations in rows)
    first = torch.tensor([[len(context) - 1] for context, _ in rows], device=device)
    ids = padded(inputs, 0, device)
    places = (first + torch.arange(longest, device=device)).clamp_max(ids.shape[1] - 1)
    logs = model(ids, caches=caches, last=places).double().log_softmax(-1)
    return [
        [scored(own, ids) for ids in continuations]
        for own, (_, continuations) in zip(logs, rows, strict=True)
    ]


def scored(logs: Tensor, ids: Sequence[int]) -> Scored:
    """Score one continuation by log-probabilities (K, V) at its places, K its length or more."""
    chosen = logs[range(len(ids)), list(ids)]
    likeliest = logs[: len(ids)].argmax(-1).tolist()
    return Scored(chosen.sum().item(), likeliest == list(ids))


def of_one_text(model: Transformer, questions: Sequence[Question]) -> Iterator[list[Scored]]:
    """Yield the scores of questions whose contexts begin alike; that beginning is read once."""
    shared = common([question.context for question in questions])
    length = min(shared, *(len(question.context) - 1 for question in questions))
    device = model.tok_embeddings.weight.device
    text = torch.tensor([questions[0].context[:length]], device=device)
    caches = model.new_caches(1, length)
    if length:
        model(text, caches=caches, last=torch.tensor([length - 1], device=device))
    for question in questions:
        yield of_rest(model, caches, question)


def of_rest(model: Transformer, caches: list[KVCache], question: Question) -> list[Scored]:
    """Score one question's continuations, each behind what caches lack of the context."""
    rest = question.context[caches[0].length :]
    room = len(rest) + max(map(len, question.continuations)) - 1
    at_once = max(1, CACHE // (caches[0].length + room))
    found: list[Scored] = []
    for start in range(0, len(question.continuations), at_once):
        some = [(rest, [ids]) for ids in question.continuations[start : start + at_once]]
        copies = [cache.copies(len(some), room) for cache in caches]
        found += [scores[0] for scores in of_rows(model, some, copies)]
    return found


def common(texts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all texts begin with alike."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({ids[i] for ids in texts}) > 1), shortest)


def by_text(questions: Sequence[Question], places: Sequence[int]) -> Iterator[list[int]]:
    """Group neighbours most of whose contexts is alike."""
    group: list[int] = []
    for place in places:
        context = questions[place].context
        if group and 2 * common([questions[group[-1]].context, context]) < len(context):
            yield group
            group = []
        group.append(place)
    if group:
        yield group
