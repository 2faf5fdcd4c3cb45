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
    Evaluation,
    EvaluationOptions,
    Line,
    NamedScore,
    Settings,
    Subject,
)
from diffllm.model import Transformer
from diffllm.model.attention.base import KVCache
from diffllm.statistics.estimates import wilson

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
EXAMPLES_PER_LEVEL = 50
"""Examples per level, unless the task or a limit sets another number."""
SCORES_VERSION = 2
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
    encodings = [[tokenizer.start_id, *ids] for ids in tokenizer.encode_batch(texts, threads=1)]
    prompt_ids, *candidate_ids = encodings
    # The first token of a candidate may also contain the last characters of the prompt.
    length = min(common(encodings), *(len(ids) - 1 for ids in candidate_ids))
    return Question(prompt_ids[:length], [ids[length:] for ids in candidate_ids])


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
        return 2 * common([questions[group[-1]].context, context]) >= len(context)

    for group in grouped(long, half_of_context_is_shared):
        similar = [questions[i] for i in group]
        for i, scores in zip(group, score_with_cache(model, similar), strict=True):
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
    width = model.cfg.vocab_size // LOGITS

    def size(place: int) -> int:
        context, continuations = rows[place]
        return max(len(context) + len(continuations[0]), width * len(continuations[0]))

    scores_by_row: dict[int, list[Scored]] = {}
    for batch in by_length(range(len(rows)), size, PASS_TOKENS * world_size):
        places = batch[rank::world_size]
        # A sharded model (FSDP) needs the same number of forward passes on all ranks. A rank
        # without a row of this batch scores the first row, and `zip` ignores these scores.
        scores = score_rows(model, [rows[place] for place in places or batch[:1]])
        scores_by_row |= zip(places, scores, strict=False)
        advance(len(batch))
    if together:
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
    # A short continuation has fewer positions than the longest; its additional logits are unused.
    places = (first + torch.arange(longest, device=device)).clamp_max(ids.shape[1] - 1)
    logs = model(ids, caches=caches, last=places).double().log_softmax(-1)
    scores = []
    for row_logs, (_, continuations) in zip(logs, rows, strict=True):
        likeliest = row_logs.argmax(-1).tolist()
        sums = [row_logs[range(len(ids)), ids].sum().item() for ids in continuations]
        greedy = [likeliest[: len(ids)] == ids for ids in continuations]
        scores.append(list(map(Scored, sums, greedy)))
    return scores


def score_with_cache(model: Transformer, questions: Sequence[Question]) -> Iterator[list[Scored]]:
    """Yield each question's scores; compute the KV cache of the contexts' common prefix once."""
    shared = common([question.context for question in questions])
    # The logits of the last context token score the first token of a continuation, so at least
    # one token of each context stays outside the cache.
    length = min(shared, *(len(question.context) - 1 for question in questions))
    device = model.tok_embeddings.weight.device
    text = torch.tensor([questions[0].context[:length]], device=device)
    caches = model.new_caches(1, length)
    if length:
        model(text, caches=caches, last=torch.tensor([length - 1], device=device))
    for question in questions:
        rest = question.context[length:]
        room = len(rest) + max(map(len, question.continuations)) - 1
        at_once = max(1, CACHE_POSITIONS // (length + room))
        scores: list[Scored] = []
        for start in range(0, len(question.continuations), at_once):
            continuations = question.continuations[start : start + at_once]
            rows = [(rest, [ids]) for ids in continuations]
            copies = [cache.copies(len(rows), room) for cache in caches]
            scores += [row_scores[0] for row_scores in score_rows(model, rows, copies)]
        yield scores


def common(texts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens in the longest common prefix of all texts."""
    shortest = min(map(len, texts))
    for i in range(shortest):
        tokens = {ids[i] for ids in texts}
        if len(tokens) > 1:
            return i
    return shortest


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

    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        version = [VERSION, SCORES_VERSION, self.task.version]
        examples = self.examples(options, subject.tokenizer, subject.cfg.seq_len)
        return {"version": version, **examples}

    def examples(self, options: EvaluationOptions, tokenizer: Tokenizer, seq_len: int) -> Settings:
        """Return the seed, the difficulty levels, and the number of examples of each level.

        If `options` contains levels of this task, use these levels. Otherwise use all levels whose
        examples have at most `seq_len` tokens.

        Raises DoesNotFit if the examples of a level in `options` have more than `seq_len` tokens,
        or if no level can be used.
        """
        levels = list(options.levels.get(self.name, ()))
        count, length = tokenizer.count, seq_len - 1  # an EOS or a BOS precedes the text
        if levels:
            self.task.check(levels, length, count)
        else:
            levels = self.task.fitting(length, count)
        numbers = []
        for level in levels:
            number = self.task.number(level)
            numbers.append(EXAMPLES_PER_LEVEL if number is None else number)
        if options.limit is not None:
            quotient, remainder = divmod(options.limit, len(levels))
            for i, number in enumerate(numbers):
                most = quotient + 1 if i < remainder else quotient
                numbers[i] = min(number, most)
        return {"seed": options.seed, "examples": numbers, "levels": list(map(dict, levels))}

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        examples = questions(self.task, settings, subject.tokenizer, subject.model.cfg.seq_len)
        encoded = [question for _, _, question in examples]
        n_rows = sum(len(question.rows) for question in encoded)
        with track(self.name, n_rows) as advance:
            scores = score(subject.model, encoded, advance)
        return lines_of(examples, scores)

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        scores = []
        for i, level in enumerate(settings["levels"]):
            level_lines = [line for line in lines if line["level"] == i]
            if not level_lines:
                continue
            accuracy = share(level_lines, "correct")
            independent = len(level_lines)
            cluster = self.task.cluster
            if cluster:
                # Count clusters: the mean of a cluster varies at most as much as a single answer.
                independent = len({line[cluster] for line in level_lines})
            name = ", ".join(f"{key} {value}" for key, value in level.items())
            details: dict[str, Any] = {
                "level": level,
                "generated": share(level_lines, "generated"),
                "independent": independent,
            }
            for field in self.task.by:
                details[f"by_{field}"] = shares(level_lines, field)
            interval = wilson(accuracy, independent)
            guess = chance(level_lines)
            scores.append(NamedScore(name, accuracy, interval, len(level_lines), guess, details))
        return scores


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
    encoded: Questions = []
    for i, level in enumerate(settings["levels"]):
        first = next(iter(task.examples(level, 1, seed, count)), None)
        if first is not None:
            check_candidates(first, task, tokenizer)
        for example in task.examples(level, settings["examples"][i], seed, count):
            question = spelt_question(example, tokenizer)
            if question.positions <= longest:
                encoded.append((i, example, question))
    if not encoded:
        raise ConfigError(
            f"every example of the task {task.name} exceeds {longest} tokens, the maximum length "
            "of the model; choose shorter examples"
        )
    return encoded


def check_candidates(example: Example, task: Task, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the tokenizer cannot encode a candidate of an example of `task`."""
    for candidate in example.candidates:
        decoded = tokenizer.decode(tokenizer.encode(candidate))
        if decoded.strip() != candidate.strip():
            raise ConfigError(
                f"the run's tokenizer cannot encode {candidate!r}, an answer of the task "
                f"{task.name}: decoding returns {decoded!r}; choose another task"
            )


def lines_of(examples: Questions, example_scores: Sequence[Sequence[Scored]]) -> list[Line]:
    """Return one dict per example for the results file, with keys such as "correct" and "answer".

    If an example has several candidates, "correct" means that the right candidate has the highest
    log-likelihood. Otherwise "correct" means that greedy decoding yields the only candidate.

    Args:
        example_scores: for each example, the score of each candidate.
    """
    lines = []
    for (level, example, _), scores in zip(examples, example_scores, strict=True):
        logs = []
        for scored in scores:
            # A diverged model has no finite likelihoods: no candidate is likely.
            is_finite = math.isfinite(scored.log_likelihood)
            logs.append(scored.log_likelihood if is_finite else -math.inf)
        likeliest = max(range(len(logs)), key=logs.__getitem__)
        is_likeliest = likeliest == example.answer and math.isfinite(logs[example.answer])
        generated = scores[example.answer].greedy
        line: Line = {
            "level": level,
            "correct": is_likeliest if len(logs) > 1 else generated,
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
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(str(line[field]), []).append(line)
    return {value: share(groups[value], "correct") for value in sorted(groups)}
