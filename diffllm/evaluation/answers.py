"""Answers of a checkpoint to the examples of a task, by likelihood and by generation.

Shapes: B rows, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.core.errors import ConfigError
from diffllm.data import Tokenizer
from diffllm.data.progress import track
from diffllm.data.tasks import VERSION
from diffllm.data.tasks.task import Example, Level, Task
from diffllm.evaluation.evaluation import (
    SHARE,
    Asked,
    Evaluation,
    Line,
    Score,
    Settings,
    Subject,
)
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
A_LEVEL = 50
"""Examples of a level, where no limit says less."""
SCORES = 2
"""Changed whenever scores change, so that older results are made anew."""


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


def spelt_question(example: Example, tokenizer: Tokenizer) -> Question:
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
    short = sorted({*range(len(questions))} - {*long})
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
    for batch in row_batches(model, questions, world_size):
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


def row_batches(
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
    continuations = question.continuations
    return question.context, continuations if question.single else [continuations[j]]


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
    """Yield the scores of questions whose contexts begin alike; that beginning is read once, and
    continued by copies of its cache."""
    shared = common([question.context for question in questions])
    length = min(shared, *(len(question.context) - 1 for question in questions))
    device = model.tok_embeddings.weight.device
    text = torch.tensor([questions[0].context[:length]], device=device)
    caches = model.new_caches(1, length)
    if length:
        model(text, caches=caches, last=torch.tensor([length - 1], device=device))
    for question in questions:
        rest = question.context[caches[0].length :]
        room = len(rest) + max(map(len, question.continuations)) - 1
        at_once = max(1, CACHE // (caches[0].length + room))
        found: list[Scored] = []
        for start in range(0, len(question.continuations), at_once):
            some = [(rest, [ids]) for ids in question.continuations[start : start + at_once]]
            copies = [cache.copies(len(some), room) for cache in caches]
            found += [scores[0] for scores in of_rows(model, some, copies)]
        yield found


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


class Answers(Evaluation):
    """Asks a checkpoint the examples of a task.

    The answer by likelihood is the candidate that the model finds likeliest; that by generation is
    right where the likeliest tokens, one after the other, are those of the right one.
    """

    unit = SHARE

    def __init__(self, task: Task):
        self.task, self.name = task, task.name

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        version = [VERSION, SCORES, self.task.version]
        return {"version": version, **self.examples(asked, subject.tokenizer, subject.cfg.seq_len)}

    def examples(self, asked: Asked, tokenizer: Tokenizer, seq_len: int) -> Settings:
        """Return the settings that decide the examples for a model of `seq_len` tokens; raises
        ConfigError for what does not fit."""
        levels = self.levels(asked.levels.get(self.name, ()), tokenizer, seq_len)
        return {
            "seed": asked.seed,
            "examples": numbers_of(self.task, levels, asked.limit),
            "levels": [dict(level) for level in levels],
        }

    def levels(self, wanted: Sequence[Level], tokenizer: Tokenizer, seq_len: int) -> list[Level]:
        """Return the levels that are wanted, or without any those that fit a model of `seq_len`
        tokens; raises ConfigError for what does not fit."""
        count, length = counter(tokenizer), seq_len - 1  # the end of a document comes first
        if not wanted:
            return self.task.fitting(length, count)
        self.task.check(wanted, length, count)
        return list(wanted)

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        asked = questions(self.task, settings, subject.tokenizer, subject.model.cfg.seq_len)
        with track(self.name, len(asked)) as advance:
            found = score(subject.model, [question for _, _, question in asked], advance)
        return [
            line(level, example, scores)
            for (level, example, _), scores in zip(asked, found, strict=True)
        ]

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[Score]:
        from scipy.stats import binomtest  # a second and a half that training does not need

        found = []
        for i, level in enumerate(settings["levels"]):
            own = [line for line in lines if line["level"] == i]
            if not own:
                continue
            right = sum(bool(line["correct"]) for line in own)
            interval = binomtest(right, len(own)).proportion_ci(method="wilson")
            facts = {f"by_{fact}": shares(own, fact) for fact in self.task.by}
            found.append(
                Score(
                    ", ".join(f"{key} {value}" for key, value in level.items()),
                    right / len(own),
                    (interval.low, interval.high),
                    len(own),
                    chance(own),
                    {"level": level, "generated": share(own, "generated"), **facts},
                )
            )
        return found


def numbers_of(task: Task, levels: Sequence[Level], limit: int | None) -> list[int]:
    """Return how many examples of each level are asked, `limit` at most of all together."""
    there = [task.number(level) for level in levels]
    usual = [A_LEVEL if number is None else number for number in there]
    if limit is None:
        return usual
    each, rest = divmod(limit, len(levels))
    return [min(n, each + (i < rest)) for i, n in enumerate(usual)]


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode(text))


def questions(
    task: Task, settings: Settings, tokenizer: Tokenizer, longest: int
) -> list[tuple[int, Example, Question]]:
    """Make the examples of each level, and spell them.

    Args:
        longest: positions of a context; the few examples that are longer than those by which their
            level was chosen are left out.
    """
    count = counter(tokenizer)
    check_spelling(task, settings, tokenizer)
    made = [
        (i, example, spelt_question(example, tokenizer))
        for i, (level, number) in enumerate(
            zip(settings["levels"], settings["examples"], strict=True)
        )
        for example in task.examples(level, number, settings["seed"], count)
    ]
    if kept := [each for each in made if each[2].positions <= longest]:
        return kept
    raise ConfigError(f"the task {task.name} has no example of at most {longest} tokens")


def check_spelling(task: Task, settings: Settings, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where the tokenizer cannot spell the candidates of a task, judged by those
    of one example of each level."""
    for level in settings["levels"]:
        for example in task.examples(level, 1, settings["seed"], counter(tokenizer)):
            for candidate in example.candidates:
                said = tokenizer.decode(tokenizer.encode(candidate))
                if said.strip() != candidate.strip():
                    raise ConfigError(
                        f"the run's tokenizer cannot spell {candidate!r}, an answer of the task "
                        f"{task.name}: it makes {said!r} of it"
                    )


def line(level: int, example: Example, scores: Sequence[Scored]) -> Line:
    """Say what a model made of an example of a level; where there is one candidate alone, only
    generation can be wrong."""
    # Of a model that has diverged nothing is likely.
    logs = [x if math.isfinite(x := scored.log_likelihood) else -math.inf for scored in scores]
    likeliest = max(range(len(logs)), key=logs.__getitem__) == example.answer
    likeliest &= math.isfinite(logs[example.answer])
    generated = scores[example.answer].greedy
    return {
        "level": level,
        "correct": likeliest if len(logs) > 1 else generated,
        "generated": generated,
        "candidates": len(logs),
        "answer": example.answer,
        "log_likelihoods": [round(x, 5) if math.isfinite(x) else None for x in logs],
        **example.facts,
    }


def chance(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of right answers of a guess among candidates; 0 where there is one alone."""
    return sum(1 / n for n in (line["candidates"] for line in lines) if n > 1) / len(lines)


def share(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(bool(line[key]) for line in lines) / len(lines)


def shares(lines: Sequence[Mapping[str, Any]], fact: str) -> dict[str, float]:
    """Return the share of right answers for each value of a fact."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(str(line[fact]), []).append(line)
    return {value: share(own, "correct") for value, own in sorted(groups.items())}
