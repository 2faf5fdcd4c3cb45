"""Measure how the last token of a prompt distributes its attention over kinds of tokens.

Shapes: B contexts of a batch, T tokens, n examples, L layers, h heads of an attention map.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.data.progress import track
from diffllm.data.tasks.task import Example, Task
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.answers import (
    PASS_TOKENS,
    Answers,
    Question,
    by_length,
    common,
    padded,
    questions,
)
from diffllm.evaluation.evaluation import (
    Evaluation,
    EvaluationOptions,
    Line,
    NamedScore,
    Settings,
    Subject,
)
from diffllm.evaluation.maps import ROUNDING, last_maps
from diffllm.model.attention.base import Maps
from diffllm.statistics.bootstrap import of_columns

PREFIX = "attention_mass_"
MASS_VERSION = 1
"""Part of the key of results: increase it when lines or scores change."""
KINDS = ("target", "filler", "sink")
TARGET, FILLER, SINK = range(3)
NO_KEY, EFFECTIVE, SIGNED = "no key", "", "signed"
DIGITS = 7


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
        self.task, self.name = task, PREFIX + task.name

    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        levels = {self.task.name: options.levels.get(self.name, ())}
        examples = Answers(self.task).settings(subject, replace(options, levels=levels))
        return {"measure": MASS_VERSION, **examples}

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        encoded = questions(self.task, settings, subject.tokenizer, subject.model.cfg.seq_len)
        examples = [entry for entry in encoded if entry[1].evidence is not None]
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
        measured: dict[int, Line] = {}
        with track(self.name, len(examples)) as advance:
            batches = by_length(range(len(examples)), lambda i: len(contexts[i]), PASS_TOKENS)
            for places in batches:
                batch_contexts = [contexts[i] for i in places]
                batch_kinds = [kinds[i] for i in places]
                batch_lines = measure_batch(subject, batch_contexts, batch_kinds)
                measured |= zip(places, batch_lines, strict=True)
                advance(len(places))
        lines = []
        for i, (level, example, _) in enumerate(examples):
            sizes = {"tokens": len(kinds[i]), "target_tokens": kinds[i].count(TARGET)}
            lines.append({**example.facts, "level": level, **sizes, **measured[i]})
        return lines

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        names = []
        for level in settings["levels"]:
            names.append(", ".join(f"{key} {value}" for key, value in level.items()))
        groupings: dict[str, np.ndarray] = {}
        for field in self.task.by:
            groupings[field] = np.array([str(line[field]) for line in lines])
        groupings["level"] = np.array([names[line["level"]] for line in lines])
        sample = Sample(clusters_of(lines, self.task.cluster), groupings)
        sizes = [[line["tokens"], line["target_tokens"]] for line in lines]
        tokens, targets = np.array(sizes).T
        # The sink is one token, the first of the context.
        counts = np.stack((targets, tokens - targets - 1, np.ones_like(tokens)), -1)
        uniform = counts / tokens[:, None]
        guesses = dict(zip(KINDS, uniform.mean(0).tolist(), strict=True))
        by_map: dict[str, np.ndarray] = {}
        for name in lines[0]["maps"]:
            by_map[name] = np.array([line["maps"][name] for line in lines])
        effective = by_map.pop(EFFECTIVE)
        target, seen = effective[..., TARGET], effective[..., [TARGET, FILLER]].sum(-1)
        best, heads = best_heads([line["heads"] for line in lines])
        guess = uniform[:, TARGET].sum() / uniform[:, [TARGET, FILLER]].sum()
        scores = []
        for i, kind in enumerate(KINDS):
            scores.append(sample.score(kind, effective[..., i], chance=guesses[kind]))
        scores.append(sample.score("target / (target + filler)", target, seen, float(guess)))
        best_chance = guesses["target"]
        scores.append(sample.score("target, best heads", best, chance=best_chance, heads=heads))
        no_key = np.array([line[NO_KEY] for line in lines])
        if (no_key > ROUNDING).any():
            scores.append(sample.score(f"sink, {NO_KEY}", no_key))
        for name, shares in by_map.items():
            for i, kind in enumerate(KINDS):
                label, kind_shares = f"{name} {kind}", shares[..., i]
                if name == SIGNED:
                    # Sums of signed weights may be negative or above 1, and have no chance level.
                    scores.append(sample.score(label, kind_shares, limits=None))
                else:
                    scores.append(sample.score(label, kind_shares, chance=guesses[kind]))
        return scores


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
    kinds = [SINK, *[FILLER] * (len(question.context) - 1)]
    if 0 <= start < end <= len(example.prompt):
        texts = (example.prompt, example.prompt[:start], example.prompt[end:])
        ids, before, after = tokenizer.encode_batch(texts, threads=1)
        # Tokens that are the same without the evidence do not overlap the evidence.
        first = 1 + common([ids, before])  # after the EOS or the BOS
        last = 1 + len(ids) - common([ids[::-1], after[::-1]])
        kinds[first:last] = [TARGET] * len(kinds[first:last])
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
    lengths = torch.tensor([len(context) for context in contexts], device=subject.device)
    by_kind = F.one_hot(padded(kinds, FILLER, subject.device), len(KINDS)).double()
    lines: list[Line] = [{NO_KEY: [], "heads": [], "maps": {}} for _ in contexts]
    for layer, maps in enumerate(last_maps(subject.model, ids, lengths)):
        if not all(bool(weights.isfinite().all()) for weights in maps.values()):
            raise CheckpointError(
                f"{subject.checkpoint}: the attention of layer {layer} is not finite; "
                "evaluate an earlier checkpoint"
            )
        no_key, shares = shares_of(maps, by_kind)
        heads = rounded(shares[EFFECTIVE][..., TARGET])
        means = {name: rounded(values.mean(1)) for name, values in shares.items()}
        missing = rounded(no_key.mean(1))
        for i, line in enumerate(lines):
            line[NO_KEY].append(missing[i])
            line["heads"].append(heads[i])
            for name, values in means.items():
                line["maps"].setdefault(name, []).append(values[i])
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
        no_key = (1 - weights.sum(-1)).clamp_min(0)
        if softmaxes and name == effective:
            # The weights of a difference map need not sum to 1, so no weight is missing.
            no_key = torch.zeros_like(no_key)
            shares[SIGNED] = weights @ by_kind
        sums = weights.abs() @ by_kind
        sums[..., SINK] += no_key
        total = sums.sum(-1, keepdim=True)
        shares[EFFECTIVE if name == effective else name] = sums / torch.where(total > 0, total, 1)
    # The effective map is the last one, so `no_key` belongs to it.
    return no_key, shares


def rounded(values: Tensor) -> list[Any]:
    return values.round(decimals=DIGITS).tolist()


def best_heads(shares: Sequence[Sequence[Sequence[float]]]) -> tuple[np.ndarray, list[int]]:
    """Select in each layer the head with the largest mean share over the examples.

    Return the shares of the selected heads (n, L), and the index of the selected head per layer.

    Args:
        shares: one share for each example, layer and head, nested in this order.
    """
    layers = [np.array(layer) for layer in zip(*shares, strict=True)]
    heads = [int(layer.mean(0).argmax()) for layer in layers]
    best = [layer[:, head] for layer, head in zip(layers, heads, strict=True)]
    return np.stack(best, -1), heads


@dataclass(frozen=True)
class Sample:
    """The examples of an evaluation, grouped to compute intervals and scores of subsets."""

    clusters: np.ndarray
    """Cluster number of each example, (n,); the examples of a cluster are dependent."""
    groupings: Mapping[str, np.ndarray]
    """For each field of the examples, such as "depth", the value in each example, (n,)."""

    def score(
        self,
        name: str,
        values: np.ndarray,
        totals: np.ndarray | None = None,
        chance: float | None = None,
        limits: tuple[float, float] | None = (0.0, 1.0),
        **details: Any,
    ) -> NamedScore:
        """Compute the score sum(values) / sum(totals) over all examples and layers.

        The result contains a 95% interval from a bootstrap over clusters of examples. It also
        contains the score and the interval of each layer. For each value of each field in
        `groupings`, it contains the score of the examples with this value, without an interval.

        Args:
            name: name of the score.
            values: numerator of each example and layer, (n, L).
            totals: denominator of each example and layer, (n, L); None means 1 everywhere.
            chance: expected score of a uniform attention map; None if not defined.
            limits: smallest and largest possible score, stored as "range"; None if unlimited.
            details: additional fields for the results file.
        """
        totals = np.ones_like(values) if totals is None else totals
        # Column 0 is the mean over layers; the other columns are the layers.
        top = np.column_stack((values.mean(1), values))
        bottom = np.column_stack((totals.mean(1), totals))
        intervals = of_columns(group_sums(top, self.clusters), group_sums(bottom, self.clusters))
        value, *layers = ratios(top, bottom)
        layer_names = [str(i) for i in range(len(layers))]
        content: dict[str, Any] = {
            "independent": len(set(self.clusters.tolist())),
            "range": limits,
            "layer_intervals": dict(zip(layer_names, intervals[1:], strict=True)),
            "by_layer": dict(zip(layer_names, layers, strict=True)),
        }
        for field, field_values in self.groupings.items():
            distinct_values = list(dict.fromkeys(field_values.tolist()))
            if len(distinct_values) < 2:
                continue
            by_value = {}
            for field_value in distinct_values:
                rows = field_values == field_value
                by_value[field_value] = ratios(top[rows], bottom[rows])[0]
            content[f"by_{field}"] = by_value
        content |= details
        value = math.nan if value is None else value
        return NamedScore(name, value, intervals[0], len(values), chance, content)


def group_sums(columns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Sum the rows of each group; return one row per group, with the K columns of `columns`.

    `columns` has shape (n, K). `groups` contains the group number of each row, (n,).
    """
    return np.stack([np.bincount(groups, column) for column in columns.T], -1)


def ratios(top: np.ndarray, bottom: np.ndarray) -> list[float | None]:
    """Divide the column sums of `top` (n, K) by the column sums of `bottom` (n, K).

    A ratio is None if its divisor is 0.
    """
    sums = zip(top.sum(0).tolist(), bottom.sum(0).tolist(), strict=True)
    return [a / b if b else None for a, b in sums]
