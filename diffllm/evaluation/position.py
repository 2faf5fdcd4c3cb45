"""Loss on whole held-out documents by position, distance and span, as defined in `Position`.

Shapes: n tokens of a document.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from diffllm.core.console import track
from diffllm.core.errors import CheckpointError
from diffllm.core.targets import PADDING_TARGET
from diffllm.data.heldout import heldout_documents
from diffllm.evaluation.evaluation import (
    Evaluation,
    EvaluationOptions,
    Line,
    NamedScore,
    Settings,
    Subject,
)
from diffllm.evaluation.load import own_corpus, own_data
from diffllm.evaluation.scoring import PASS_TOKENS, by_length, padded
from diffllm.model import Transformer
from diffllm.model.attention.masks import Documents
from diffllm.model.rope import RotaryEmbedding
from diffllm.statistics.bootstrap import of_documents

POSITION_VERSION = 1
"""Part of the key of results: increase it when lines or scores change."""
DOCUMENTS = 200
"""Default number of documents."""

Sums = dict[str, list[float]]
"""By bin: the sum of losses in nats, and the number of targets."""


class Position(Evaluation):
    """Evaluation of whole held-out documents: loss by position, distance and span of a token.

    The model reads each document from its start, after an EOS, up to the model's maximum length, or
    up to `EvaluationOptions.seq_len` tokens. RoPE tables are computed for that length.
    The EOS at the end of a document is also predicted. The properties of a predicted token are:

    - position: the index of the token in its document, from 0.
    - distance: the number of tokens since the previous occurrence of the same token in the
      document, or "none" for the first occurrence.
    - span: "repeated" if the trigram that ends with this token occurs earlier in the document.
      "first" if the bigram directly before this token does not occur earlier in the document.
      Other tokens have no span.

    With data.mask_documents, tokens do not attend to the EOS before the document, as in training.
    """

    name = "position"
    unit = "nats per token"

    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        settings: Settings = {
            "version": POSITION_VERSION,
            "documents": options.limit or DOCUMENTS,
            "corpus": own_corpus(subject.run, subject.cfg),
        }
        # Without the option, the key is the same as before the option existed.
        if options.seq_len:
            settings["seq_len"] = options.seq_len
        return settings

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        data = own_data(subject.run, subject.cfg)
        longest = settings.get("seq_len", subject.model.cfg.seq_len)
        stream = data.split("heldout")
        eos_id = data.manifest.eos_id
        chosen = heldout_documents(stream, eos_id, most=settings["documents"])
        starts = chosen.starts.tolist()
        lengths = np.minimum(chosen.lengths, longest).tolist()
        texts = []
        for start, length in zip(starts, lengths, strict=True):
            tokens = stream.tokens(start, start + length)
            texts.append(tokens.tolist())
        batches = by_length(range(len(texts)), lambda i: len(texts[i]), PASS_TOKENS)
        nats: dict[int, list[float]] = {}
        with track(self.name, len(texts)) as advance, positions_up_to(longest, subject.model):
            for places in batches:
                losses = token_nats(subject, [texts[i] for i in places], eos_id)
                nats |= zip(places, losses, strict=True)
                advance(len(places))
        # Batches are sorted by length; the lines have the order of the documents.
        lines = []
        for i, (start, text) in enumerate(zip(starts, texts, strict=True)):
            if not all(map(math.isfinite, nats[i])):
                raise CheckpointError(
                    f"{subject.checkpoint}: the loss of held-out tokens is not finite; "
                    "evaluate an earlier checkpoint"
                )
            # Tokens that serve only as context in training are not counted.
            predicted = stream.loss_mask(start, start + len(text)).tolist()
            lines.append({"start": start, **sums(text, nats[i], predicted)})
        return lines

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        scores = []
        for kind in ("all", "position", "distance", "span"):
            names: set[str] = set()
            for line in lines:
                names.update(line[kind])
            for name in sorted(names, key=bin_sort_key):
                # Not all documents have a token in each bin, for example short documents.
                bin_sums = [line[kind][name] for line in lines if name in line[kind]]
                nats, tokens = np.array(bin_sums).T
                n_tokens = tokens.sum()
                details: dict[str, Any] = {"tokens": int(n_tokens)}
                has_no_number, start = bin_sort_key(name)
                if not has_no_number:
                    details["level"] = {kind: start}
                scores.append(
                    NamedScore(
                        f"{kind} {name}".strip(),
                        float(nats.sum() / n_tokens),
                        of_documents(nats, tokens),
                        len(bin_sums),
                        more=details,
                    )
                )
        return scores


@contextmanager
def positions_up_to(seq_len: int, model: Transformer) -> Iterator[None]:
    """In this context, `model` has RoPE tables for `seq_len` positions."""
    cfg = model.cfg
    tables = model.rope
    longer = RotaryEmbedding(cfg.head_dim, seq_len, cfg.rope).to(tables.cos.device)
    longer.reset_parameters()
    model.cfg = replace(cfg, seq_len=seq_len)
    model.rope = longer
    try:
        yield
    finally:
        # Later evaluations run the same model.
        model.cfg = cfg
        model.rope = tables


@torch.no_grad()
def token_nats(subject: Subject, texts: Sequence[Sequence[int]], eos_id: int) -> list[list[float]]:
    """Run the model on a batch of texts; return the loss of each token of each text in nats.

    A text is a sequence of token ids. The model reads an EOS before each text; an imported model
    reads its BOS instead.
    """
    cpu = torch.device("cpu")
    device = subject.device
    targets = padded(texts, PADDING_TARGET, cpu)
    first = subject.tokenizer.start_id
    # Each token is predicted from the tokens before it, so the last token is not read.
    input_texts = [[first, *text[:-1]] for text in texts]
    inputs = padded(input_texts, eos_id, cpu)
    documents = None
    if subject.cfg.data.mask_documents:
        documents = Documents.of(inputs, eos_id).to(device)
    losses = subject.model.token_losses(inputs.to(device), targets.to(device), documents)
    rows = losses.double().tolist()
    return [row[: len(text)] for text, row in zip(texts, rows, strict=True)]


def sums(
    text: Sequence[int], losses: Sequence[float], predicted: Sequence[bool]
) -> dict[str, Sums]:
    """Sum the losses of one document by bins of the token properties that `Position` defines.

    The keys of the result are "all", "position", "distance" and "span". Each value maps the
    name of a bin to the summed loss in nats and the number of tokens of this bin, for example
    `{"position": {"2-3": [7.1, 2]}}`.

    Args:
        text: token ids (n,).
        losses: loss of each token in nats, (n,).
        predicted: (n,); False for tokens that serve only as context and are not counted.
    """
    kinds = ("all", "position", "distance", "span")
    sums_by_kind: dict[str, Sums] = {kind: {} for kind in kinds}
    last_place: dict[int, int] = {}
    successors_by_bigram: dict[tuple[int, int], set[int]] = {}
    for i, (token, loss) in enumerate(zip(text, losses, strict=True)):
        bins = {"all": "", "position": octave(i), "distance": "none"}
        if token in last_place:
            bins["distance"] = octave(i - last_place[token])
        last_place[token] = i
        if i >= 2:
            bigram = text[i - 2], text[i - 1]
            successors = successors_by_bigram.setdefault(bigram, set())
            if not successors:
                bins["span"] = "first"
            elif token in successors:
                bins["span"] = "repeated"
            successors.add(token)
        # Tokens that are not counted still serve as previous occurrences.
        if predicted[i]:
            for kind, name in bins.items():
                bin_sums = sums_by_kind[kind].setdefault(name, [0.0, 0])
                bin_sums[0] += loss
                bin_sums[1] += 1
    return sums_by_kind


def octave(number: int) -> str:
    """Return the name of a number's bin: "0", "1", "2-3", "4-7", "8-15", "16-31" and so on."""
    if number < 2:
        return str(number)
    low = 1 << (number.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def bin_sort_key(name: str) -> tuple[int, float]:
    """Return a key that sorts the names of bins.

    Names of number ranges, such as "8-15", are sorted by number. Names without numbers come
    after them, and the name "first" is the last one.
    """
    start = name.partition("-")[0]
    if start.isdigit():
        return 0, int(start)
    return 1, name == "first"
