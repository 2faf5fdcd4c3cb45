"""Measure how the last token of a prompt distributes its attention over kinds of tokens.

Shapes: B contexts of a batch, T tokens, n examples, L layers, h heads of an attention map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diffllm.core.console import track
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.data.tasks.task import Example, Task
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.answers import Answers, questions
from diffllm.evaluation.evaluation import (
    Evaluation,
    EvaluationOptions,
    Line,
    NamedScore,
    Settings,
    Subject,
)
from diffllm.evaluation.grouped_scores import Sample
from diffllm.evaluation.maps import SUM_TOLERANCE, last_maps
from diffllm.evaluation.scoring import PASS_TOKENS, Question, by_length, common, padded
from diffllm.model.attention.base import Maps

PREFIX = "attention_mass_"
MASS_VERSION = 1
"""Part of the key of results: increase it when lines or scores change."""
KEY_KINDS = ("target", "filler", "sink")
TARGET, FILLER, SINK = range(3)
NO_KEY, EFFECTIVE, SIGNED = "no key", "", "signed"
DECIMALS = 7


class AttentionMass(Evaluation):
    """Evaluation that measures the attention of the last prompt token on the examples of a task.

    The model predicts the answer at the last token of the prompt. Each token that the last token
    can attend to has one of three kinds:
    - target: a token that overlaps the evidence, which is the part of the prompt that contains the
      answer.
    - sink: the first token, an EOS. If the softmax has an extra term in its denominator, the
      missing weight (1 minus the sum of the weights) also belongs to the sink.
    - filler: any other token.

    The share of a kind is its sum of |weight|, divided by the sum of |weight| over all kinds.
    Differential attention has several softmax maps and a difference map, which multiplies the value
    vectors. Scores of a softmax map contain the name of the map. Scores without such a name belong
    to the difference map. Scores named "signed" are sums of the weights of the difference map;
    these sums can be negative.
    """

    unit = "attention of the last token, mean over heads and layers"

    def __init__(self, task: Task):
        self.task = task
        self.name = PREFIX + task.name

    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        # The options name this evaluation, but `Answers` looks for the name of the task.
        levels = {self.task.name: options.levels.get(self.name, ())}
        task_options = replace(options, levels=levels)
        examples = Answers(self.task).settings(subject, task_options)
        return {"measure": MASS_VERSION, **examples}

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        encoded = questions(self.task, settings, subject.tokenizer, subject.model.cfg.seq_len)
        examples = []
        for level, example, question in encoded:
            if example.evidence is not None:
                examples.append((level, example, question))
        if not examples:
            raise ConfigError(
                f"{self.name}: the examples of the task {self.task.name} have no evidence, the "
                "text that contains the answer; choose another task (docs/attention_mass.md)"
            )
        contexts: list[list[int]] = []
        kinds: list[list[int]] = []
        for _, example, question in examples:
            contexts.append(question.context)
            kinds.append(kinds_of(example, question, subject.tokenizer))
        places_of_examples = range(len(examples))
        batches = by_length(places_of_examples, lambda i: len(contexts[i]), PASS_TOKENS)
        measured: dict[int, Line] = {}
        with track(self.name, len(examples)) as advance:
            for places in batches:
                batch_contexts = [contexts[i] for i in places]
                batch_kinds = [kinds[i] for i in places]
                batch_lines = measure_batch(subject, batch_contexts, batch_kinds)
                measured |= zip(places, batch_lines, strict=True)
                advance(len(places))
        # Batches are sorted by length; the lines have the order of the examples.
        lines = []
        for i, (level, example, _) in enumerate(examples):
            line = {
                **example.facts,
                "level": level,
                "tokens": len(kinds[i]),
                "target_tokens": kinds[i].count(TARGET),
            }
            lines.append(line | measured[i])
        return lines

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        groupings = self.groupings(settings["levels"], lines)
        sample = Sample(clusters_of(lines, self.task.cluster), groupings)
        uniform = uniform_shares(lines)
        mean_uniform = uniform.mean(0).tolist()
        guesses = dict(zip(KEY_KINDS, mean_uniform, strict=True))
        shares_by_map: dict[str, np.ndarray] = {}
        for map_name in lines[0]["maps"]:
            shares = [line["maps"][map_name] for line in lines]
            shares_by_map[map_name] = np.array(shares)  # (n, L, 3)
        effective = shares_by_map.pop(EFFECTIVE)
        scores = []
        for i, kind in enumerate(KEY_KINDS):
            kind_shares = effective[..., i]
            scores.append(sample.score(kind, kind_shares, chance=guesses[kind]))
        targets = effective[..., TARGET]
        without_sink = effective[..., [TARGET, FILLER]].sum(-1)
        label = "target / (target + filler)"
        uniform_without_sink = uniform[:, [TARGET, FILLER]].sum()
        guess = float(uniform[:, TARGET].sum() / uniform_without_sink)
        scores.append(sample.score(label, targets, without_sink, guess))
        # The scored examples also select the heads, which biases this score upwards.
        shares_by_head = [line["heads"] for line in lines]
        best, heads = best_heads(shares_by_head)
        guess_of_target = guesses["target"]
        score = sample.score("target, best heads", best, chance=guess_of_target, heads=heads)
        scores.append(score)
        no_key = np.array([line[NO_KEY] for line in lines])
        if (no_key > SUM_TOLERANCE).any():
            scores.append(sample.score(f"sink, {NO_KEY}", no_key))
        for map_name, map_shares in shares_by_map.items():
            for i, kind in enumerate(KEY_KINDS):
                label = f"{map_name} {kind}"
                kind_shares = map_shares[..., i]
                if map_name == SIGNED:
                    # Sums of signed weights may be negative or above 1, and have no chance level.
                    scores.append(sample.score(label, kind_shares, limits=None))
                else:
                    scores.append(sample.score(label, kind_shares, chance=guesses[kind]))
        return scores

    def groupings(
        self, levels: Sequence[Mapping[str, Any]], lines: Sequence[Line]
    ) -> dict[str, np.ndarray]:
        """Return the value of each example for each fact of the task, and the name of its level.

        Each array has shape (n,). The key of the levels is "level".
        """
        level_names = []
        for level in levels:
            settings = [f"{key} {value}" for key, value in level.items()]
            level_names.append(", ".join(settings))
        groupings: dict[str, np.ndarray] = {}
        for field in self.task.by:
            values = [str(line[field]) for line in lines]
            groupings[field] = np.array(values)
        levels_of_lines = [level_names[line["level"]] for line in lines]
        groupings["level"] = np.array(levels_of_lines)
        return groupings


def uniform_shares(lines: Sequence[Line]) -> np.ndarray:
    """Return the shares of target, filler and sink in a uniform map, for each example: (n, 3)."""
    tokens = np.array([line["tokens"] for line in lines])
    targets = np.array([line["target_tokens"] for line in lines])
    # The sink is one token, the first of the context.
    sinks = np.ones_like(tokens)
    fillers = tokens - targets - 1
    counts = np.stack((targets, fillers, sinks), -1)
    return counts / tokens[:, None]


def clusters_of(lines: Sequence[Line], field: str) -> np.ndarray:
    """Group dependent examples into clusters; return each example's cluster number, (n,) int64.

    Each line describes one example. Examples with the same level of difficulty and the same value
    of `field` form a cluster. If `field` is empty, each example is its own cluster.
    """
    numbers: dict[tuple[Any, Any], int] = {}
    clusters = []
    for i, line in enumerate(lines):
        key = line["level"], line[field] if field else i
        clusters.append(numbers.setdefault(key, len(numbers)))
    return np.array(clusters)


def kinds_of(example: Example, question: Question, tokenizer: Tokenizer) -> list[int]:
    """Return the kind (TARGET, FILLER or SINK) of each token of `question.context`.

    The first token, an EOS or a BOS, is SINK. Tokens that overlap the example's evidence are
    TARGET, and all other tokens are FILLER. Raises ConfigError if no token overlaps the evidence.
    """
    start, end = example.evidence or (0, 0)
    fillers = [FILLER] * (len(question.context) - 1)
    kinds = [SINK, *fillers]
    if 0 <= start < end <= len(example.prompt):
        text_before = example.prompt[:start]
        text_after = example.prompt[end:]
        texts = (example.prompt, text_before, text_after)
        ids, ids_before, ids_after = tokenizer.encode_batch(texts, threads=1)
        # Tokens that are the same without the evidence do not overlap the evidence.
        n_before = common([ids, ids_before])
        reversed_ids = ids[::-1]
        n_after = common([reversed_ids, ids_after[::-1]])
        # The EOS or the BOS precedes the tokens of the prompt.
        first = 1 + n_before
        end_of_target = 1 + len(ids) - n_after
        # The context may end before the prompt: then there are fewer targets.
        n_targets = len(kinds[first:end_of_target])
        kinds[first:end_of_target] = [TARGET] * n_targets
    if TARGET not in kinds:
        raise ConfigError(
            f"tasks: an example has evidence=({start}, {end}), but needs 0 <= start < end <= "
            f"{len(example.prompt)}; set evidence to the range of characters of the prompt that "
            "contains the answer"
        )
    return kinds


def measure_batch(
    subject: Subject, contexts: Sequence[Sequence[int]], kinds: Sequence[Sequence[int]]
) -> list[Line]:
    """Measure the attention of the last token of each context; return one dict per context.

    The keys of a dict are:
    - "maps": for each attention map by name, the shares of target, filler and sink in each layer,
      as means over heads.
    - "heads": the share of the target in each layer and head, for the map that multiplies the value
      vectors.
    - "no key": the missing weight of this map in each layer, as a mean over heads.

    `shares_of` defines shares and missing weight.

    Args:
        contexts: the token ids of each context.
        kinds: the kind of each token of each context, as returned by `kinds_of`.
    """
    ids = padded(contexts, 0, subject.device)
    context_lengths = [len(context) for context in contexts]
    lengths = torch.tensor(context_lengths, device=subject.device)
    # The kind of padding has no effect, because padding has no weight.
    kind_ids = padded(kinds, FILLER, subject.device)
    by_kind = F.one_hot(kind_ids, len(KEY_KINDS)).double()  # (B, T, 3)
    lines: list[Line] = []
    for _ in contexts:
        lines.append({NO_KEY: [], "heads": [], "maps": {}})
    for layer, maps in enumerate(last_maps(subject.model, ids, lengths)):
        is_finite = all(bool(weights.isfinite().all()) for weights in maps.values())
        if not is_finite:
            raise CheckpointError(
                f"{subject.checkpoint}: the attention of layer {layer} is not finite; "
                "evaluate an earlier checkpoint"
            )
        no_key, shares = shares_of(maps, by_kind)
        target_by_head = shares[EFFECTIVE][..., TARGET]  # (B, h)
        heads = rounded(target_by_head)
        means = {}
        for name, values in shares.items():
            means[name] = rounded(values.mean(1))  # (B, 3)
        missing = rounded(no_key.mean(1))
        for i, line in enumerate(lines):
            line[NO_KEY].append(missing[i])
            line["heads"].append(heads[i])
            for name, mean_shares in means.items():
                by_layer = line["maps"].setdefault(name, [])
                by_layer.append(mean_shares[i])
    return lines


def shares_of(maps: Maps, by_kind: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the missing weight (B, h) of the last map, and the shares (B, h, 3) of each map.

    The missing weight of a softmax map is 1 minus the sum of its weights. A difference map has a
    missing weight of 0. Missing weight counts as weight of the sink. The shares are the parts of
    target, filler and sink in the sum of |weight|. If this sum is 0, all shares are 0.

    The shares are a dict by name of the map; the key of the last map is EFFECTIVE. For differential
    attention, the dict also contains the key SIGNED: the sum of the signed weights of the
    difference map for each kind.

    Args:
        maps: attention weights of one query (B, h, T), by name of the map. The last map multiplies
            the value vectors.
        by_kind: one-hot kind of each token, (B, T, 3) float64.
    """
    *softmaxes, effective = maps
    shares: dict[str, Tensor] = {}
    for name, map_weights in maps.items():
        weights = map_weights.double()
        # Rounding can make the sum of a softmax slightly larger than 1.
        no_key = (1 - weights.sum(-1)).clamp_min(0)  # (B, h)
        if softmaxes and name == effective:
            # The weights of a difference map need not sum to 1, so no weight is missing.
            no_key = torch.zeros_like(no_key)
            shares[SIGNED] = weights @ by_kind
        sums = weights.abs() @ by_kind  # (B, h, 3)
        sums[..., SINK] += no_key
        total = sums.sum(-1, keepdim=True)
        # If the total is 0, all sums are 0: a division by 1 gives shares of 0, not NaN.
        divisor = torch.where(total > 0, total, 1)
        key = EFFECTIVE if name == effective else name
        shares[key] = sums / divisor
    # The effective map is the last one, so `no_key` belongs to it.
    return no_key, shares


def rounded(values: Tensor) -> list[Any]:
    return values.round(decimals=DECIMALS).tolist()


def best_heads(shares: Sequence[Sequence[Sequence[float]]]) -> tuple[np.ndarray, list[int]]:
    """Select in each layer the head with the largest mean share over the examples.

    Return the shares of the selected heads (n, L), and the index of the selected head per layer.

    Args:
        shares: one share for each example, layer and head, nested in this order.
    """
    heads = []
    best = []
    for layer in zip(*shares, strict=True):
        by_head = np.array(layer)  # (n, h)
        means = by_head.mean(0)
        head = int(means.argmax())
        heads.append(head)
        best.append(by_head[:, head])
    return np.stack(best, -1), heads
