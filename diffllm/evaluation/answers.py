"""Score a model's answers to the examples of a task, by log-likelihood and by greedy decoding.

Shapes: B rows of a batch, T tokens, V vocabulary.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.core.errors import ConfigError
from diffllm.data.progress import track
from diffllm.data.tasks import VERSION
from diffllm.data.tasks.task import Example, Task
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.evaluation import (
    SHARE,
    Asked,
    Evaluation,
    Line,
    NamedScore,
    Settings,
    Subject,
)
from diffllm.model import Transformer
from diffllm.model.attention.base import KVCache
from diffllm.statistics.estimates import wilson

T = TypeVar("T")
TOKENS = 16_384
"""Maximum tokens of a forward pass over several rows, including padding."""
CACHED_FROM = 64
"""Contexts of at least this many tokens are read once for all continuations and similar contexts.
Shorter contexts are read again with each continuation, many rows at a time."""
LOGITS = 1024
"""Number of logits that needs as much memory as one token of TOKENS."""
CACHE = 2**18
"""Maximum positions of the caches that are copied at a time for continuations of a context."""
A_LEVEL = 50
"""Examples per level, unless the task or a limit sets another number."""
SCORES = 2
"""Part of the key of results: increase it when scores change."""

Row = tuple[list[int], list[list[int]]]
"""A context and its continuations: all with a single token, or one of any length."""


@dataclass(frozen=True)
class Question:
    """Token ids of an example: its context, and a continuation for each candidate answer."""

    context: list[int]
    continuations: list[list[int]]

    @property
    def positions(self) -> int:
        return len(self.context) + max(map(len, self.continuations)) - 1

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
    texts = [example.prompt, *(example.prompt + candidate for candidate in example.candidates)]
    spelt = [[tokenizer.start_id, *ids] for ids in tokenizer.encode_batch(texts, threads=1)]
    same = min(common(spelt), *(len(ids) - 1 for ids in spelt[1:]))
    return Question(spelt[0][:same], [ids[same:] for ids in spelt[1:]])


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
    long = [i for i, q in enumerate(questions) if not q.single and len(q.context) >= CACHED_FROM]
    short = sorted({*range(len(questions))} - {*long})
    scores = score_batches(model, [questions[i] for i in short], advance)
    found = dict(zip(short, scores, strict=True))

    def half_of_context_is_shared(group: list[int], i: int) -> bool:
        context = questions[i].context
        return 2 * common([questions[group[-1]].context, context]) >= len(context)

    for group in grouped(long, half_of_context_is_shared):
        similar = [questions[i] for i in group]
        for i, own in zip(group, score_with_cache(model, similar), strict=True):
            found[i] = own
            advance(len(own))
    return [found[i] for i in range(len(questions))]


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
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    rows = [row for question in questions for row in question.rows]
    width = model.cfg.vocab_size // LOGITS

    def size(place: int) -> int:
        context, continuations = rows[place]
        return max(len(context) + len(continuations[0]), width * len(continuations[0]))

    found: dict[int, list[Scored]] = {}
    for batch in by_length(range(len(rows)), size, TOKENS * world_size):
        own = batch[rank::world_size]
        scores = score_rows(model, [rows[place] for place in own or batch[:1]])
        found |= zip(own, scores, strict=False)
        advance(len(batch))
    if together:
        parts: list[dict[int, list[Scored]]] = [{} for _ in range(world_size)]
        dist.all_gather_object(parts, found)
        found = dict(ChainMap(*parts))
    scored = iter([found[place] for place in range(len(rows))])
    return [[one for _ in question.rows for one in next(scored)] for question in questions]


def by_length(items: Sequence[T], length: Callable[[T], int], most: int) -> list[list[T]]:
    """Sort items by `length` and split them into batches that need little padding.

    `length` returns the number of tokens of an item. A batch has at most `most` tokens, including
    padding, unless it is a single item.
    """
    return grouped(
        sorted(items, key=length), lambda batch, item: length(item) * (len(batch) + 1) <= most
    )


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
    filled = [[*row, *[filler] * (longest - len(row))] for row in rows]
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
    inputs = [[*context, *continuations[0][:-1]] for context, continuations in rows]
    longest = max(len(continuations[0]) for _, continuations in rows)
    first = torch.tensor([[len(context) - 1] for context, _ in rows], device=device)
    ids = padded(inputs, 0, device)
    places = (first + torch.arange(longest, device=device)).clamp_max(ids.shape[1] - 1)
    logs = model(ids, caches=caches, last=places).double().log_softmax(-1)
    found = []
    for own, (_, continuations) in zip(logs, rows, strict=True):
        likeliest = own.argmax(-1).tolist()
        sums = [own[range(len(ids)), ids].sum().item() for ids in continuations]
        greedy = [likeliest[: len(ids)] == ids for ids in continuations]
        found.append(list(map(Scored, sums, greedy)))
    return found


def score_with_cache(model: Transformer, questions: Sequence[Question]) -> Iterator[list[Scored]]:
    """Yield each question's scores; compute the KV cache of the contexts' common prefix once."""
    shared = common([question.context for question in questions])
    length = min(shared, *(len(question.context) - 1 for question in questions))
    device = model.tok_embeddings.weight.device
    text = torch.tensor([questions[0].context[:length]], device=device)
    caches = model.new_caches(1, length)
    if length:
        model(text, caches=caches, last=torch.tensor([length - 1], device=device))
    for question in questions:
        rest = question.context[length:]
        room = len(rest) + max(map(len, question.continuations)) - 1
        at_once = max(1, CACHE // (length + room))
        found: list[Scored] = []
        for start in range(0, len(question.continuations), at_once):
            some = [(rest, [ids]) for ids in question.continuations[start : start + at_once]]
            copies = [cache.copies(len(some), room) for cache in caches]
            found += [scores[0] for scores in score_rows(model, some, copies)]
        yield found


def common(texts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens in the longest common prefix of all texts."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({ids[i] for ids in texts}) > 1), shortest)


class Answers(Evaluation):
    """Measures the share of a task's examples that the model answers correctly.

    If an example has several candidates, the model's answer is the candidate with the highest
    log-likelihood. If an example has a single candidate, the model's answer is the greedy
    continuation of the prompt.
    """

    unit = SHARE

    def __init__(self, task: Task):
        self.task, self.name = task, task.name
        self.examples_file = task.examples_file

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        version = [VERSION, SCORES, self.task.version]
        return {"version": version, **self.examples(asked, subject.tokenizer, subject.cfg.seq_len)}

    def examples(self, asked: Asked, tokenizer: Tokenizer, seq_len: int) -> Settings:
        """Return the seed, the difficulty levels, and the number of examples of each level.

        If `asked` contains levels of this task, use these levels. Otherwise use all levels whose
        examples have at most `seq_len` tokens.

        Raises DoesNotFit if the examples of a level in `asked` have more than `seq_len` tokens, or
        if no level can be used.
        """
        levels = list(asked.levels.get(self.name, ()))
        count, length = tokenizer.count, seq_len - 1  # an EOS or a BOS precedes the text
        if levels:
            self.task.check(levels, length, count)
        else:
            levels = self.task.fitting(length, count)
        there = [self.task.number(level) for level in levels]
        numbers = [A_LEVEL if number is None else number for number in there]
        if asked.limit is not None:
            each, rest = divmod(asked.limit, len(levels))
            numbers = [min(n, each + (i < rest)) for i, n in enumerate(numbers)]
        return {"seed": asked.seed, "examples": numbers, "levels": list(map(dict, levels))}

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        asked = questions(self.task, settings, subject.tokenizer, subject.model.cfg.seq_len)
        own = [question for _, _, question in asked]
        with track(self.name, sum(len(question.rows) for question in own)) as advance:
            found = score(subject.model, own, advance)
        return lines_of(asked, found)

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        found = []
        for i, level in enumerate(settings["levels"]):
            own = [line for line in lines if line["level"] == i]
            if not own:
                continue
            right = share(own, "correct")
            independent = len(own)
            if cluster := self.task.cluster:
                # Count clusters: the mean of a cluster varies at most as much as a single answer.
                independent = len({line[cluster] for line in own})
            name = ", ".join(f"{key} {value}" for key, value in level.items())
            more: dict[str, Any] = {"level": level, "generated": share(own, "generated")}
            more["independent"] = independent
            more |= {f"by_{field}": shares(own, field) for field in self.task.by}
            interval = wilson(right, independent)
            found.append(NamedScore(name, right, interval, len(own), chance(own), more))
        return found


Questions = list[tuple[int, Example, Question]]
"""For each example: index of the level, the example, and the encoded example."""


def questions(task: Task, settings: Settings, tokenizer: Tokenizer, longest: int) -> Questions:
    """Generate and encode the examples of a task; omit examples of more than `longest` tokens.

    Returns tuples (index of the difficulty level, example, encoded example). Raises ConfigError if
    all examples are omitted, or if the tokenizer cannot encode a candidate of the first example of
    a level. Candidates of later examples are not checked.

    Args:
        settings: result of `Answers.examples`.
    """
    count, seed = tokenizer.count, settings["seed"]
    kept = []
    for i, level in enumerate(settings["levels"]):
        first = next(iter(task.examples(level, 1, seed, count)), None)
        for candidate in first.candidates if first else ():
            said = tokenizer.decode(tokenizer.encode(candidate))
            if said.strip() != candidate.strip():
                raise ConfigError(
                    f"the run's tokenizer cannot encode {candidate!r}, an answer of the task "
                    f"{task.name}: decoding returns {said!r}; choose another task"
                )
        for example in task.examples(level, settings["examples"][i], seed, count):
            question = spelt_question(example, tokenizer)
            if question.positions <= longest:
                kept.append((i, example, question))
    if not kept:
        raise ConfigError(
            f"every example of the task {task.name} exceeds {longest} tokens, the maximum length "
            "of the model; choose shorter examples"
        )
    return kept


def lines_of(asked: Questions, found: Sequence[Sequence[Scored]]) -> list[Line]:
    """Return one dict per example for the results file, with keys such as "correct" and "answer".

    If an example has several candidates, "correct" means that the right candidate has the highest
    log-likelihood. Otherwise "correct" means that greedy decoding yields the only candidate.

    Args:
        found: for each example, the score of each candidate.
    """
    lines = []
    for (level, example, _), scores in zip(asked, found, strict=True):
        # A diverged model has no finite likelihoods: no candidate is likely.
        logs = [x if math.isfinite(x := scored.log_likelihood) else -math.inf for scored in scores]
        likeliest = max(range(len(logs)), key=logs.__getitem__) == example.answer
        likeliest &= math.isfinite(logs[example.answer])
        generated = scores[example.answer].greedy
        line: Line = {
            "level": level,
            "correct": likeliest if len(logs) > 1 else generated,
            "generated": generated,
            "candidates": len(logs),
            "answer": example.answer,
            "log_likelihoods": [round(x, 5) if math.isfinite(x) else None for x in logs],
        }
        lines.append({**line, **example.facts})
    return lines


def chance(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the expected accuracy of a uniformly random choice between the candidates.

    An example with a single candidate counts as 0.
    """
    right = (1 / line["candidates"] for line in lines if line["candidates"] > 1)
    return sum(right) / len(lines)


def share(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the share of `lines` whose value of `key` is true."""
    return sum(bool(line[key]) for line in lines) / len(lines)


def shares(lines: Sequence[Mapping[str, Any]], field: str) -> dict[str, float]:
    """Group `lines` by their value of `field`; return the share of correct lines in each group.

    `field` is a key of the lines, such as "depth". The result maps each value to a share.
    """
    values = sorted({str(line[field]) for line in lines})
    return {v: share([line for line in lines if str(line[field]) == v], "correct") for v in values}
