"""Losses of held-out documents and scores of tasks are equal for every world size."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs.models import random_questions
from runs.ranks import run_ranks, run_single
from test_training_ranks import BASE, END, Stream
from tiers import slow_but

from diffllm import build_model
from diffllm.config import load_config
from diffllm.data.heldout import heldout_documents
from diffllm.evaluation import scoring
from diffllm.evaluation.heldout import DocumentSums
from diffllm.evaluation.scoring import score, score_batches
from diffllm.model import Transformer
from diffllm.training.build import build

LENGTHS = (70, 1, 3, 24, 5, 2, 49, 1, 1, 8, 17)
"""Lengths of documents: longer than a sequence (24), equal, and shorter."""
V2 = ("attention=diff_v2",)
MOE = ("model=moe_tiny", "model.moe.expert_dim=32")


def heldout_text():
    """Return random documents of these lengths."""
    tokens = torch.randint(0, END, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    tokens[torch.tensor(LENGTHS).cumsum(0) - 1] = END
    return tokens


class Masked(Stream):
    """A stream in which every third token is context, not a target."""

    masked = True

    def loss_mask(self, start, stop):
        return np.arange(start, stop) % 3 > 0


def measured_losses(overrides, stream=Stream):
    """Return the loss sums of each document, with masked documents and without masks."""
    cfg = load_config([*BASE, "model.init_std=0.3", *overrides])
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for end in (END, None):
        t = build(cfg, torch.device("cpu"), end)
        chosen = heldout_documents(stream(heldout_text()), END)
        batches = chosen.batches(cfg.seq_len, cfg.micro_batches(size)[0], rank, size)
        sums = DocumentSums(t.model, len(chosen), t.device, t.documents)
        for batch in batches:
            sums.add(batch)
        nats = sums.total()
        assert nats.dtype == torch.float64
        t.weights.reshard()
        found.append(nats.tolist())
    return found


def reference_losses(overrides, masked, predicted=lambda i: True):
    """Compute the result of `measured_losses` in float64, with one pass per document piece."""
    cfg = load_config([*BASE, "model.init_std=0.3", *overrides])
    model = build_model(cfg.model).double()
    tokens = heldout_text().tolist()
    stream = [END, *tokens]
    sums = [0.0] * len(LENGTHS)
    for first in range(0, len(tokens), cfg.seq_len):
        inputs = stream[first : first + cfg.seq_len][: len(tokens) - first]
        ends = [i + 1 for i, token in enumerate(inputs) if token == END] if masked else []
        cuts = sorted({0, *ends, len(inputs)})
        for start, stop in pairwise(cuts):
            with torch.no_grad():
                log_probs = model(torch.tensor([inputs[start:stop]])).log_softmax(-1)[0]
            for i in range(start, stop):
                document = tokens[: first + i].count(END)
                if predicted(first + i):
                    sums[document] -= log_probs[i - start, tokens[first + i]].item()
    return sums


@pytest.mark.parametrize("ranks", [1, 2])
def test_heldout_document_losses_match_float64_reference(ranks, tmp_path):
    """On 2 ranks FSDP shards the model, and the last batches are padded."""
    overrides = ["attention=diff_v2", "micro_batch_size=2"]
    reference = [reference_losses(overrides, masked) for masked in (True, False)]
    for found in run_ranks(measured_losses, ranks, tmp_path, overrides):
        for mine, true in zip(found, reference, strict=True):
            assert mine == pytest.approx(true, rel=1e-5)
    assert reference[0] != pytest.approx(reference[1], rel=1e-2), "nothing was masked"


def test_document_losses_ignore_tokens_excluded_by_loss_mask():
    overrides = ("micro_batch_size=2",)
    found = run_single(measured_losses, overrides, Masked)
    for mine, masked in zip(found, (True, False), strict=True):
        expected = reference_losses(overrides, masked, lambda i: i % 3 > 0)
        assert mine == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, [*MOE, "parallel.expert=2", "micro_batch_size=4"]),
        (2, ["parallel.replicate=2", "attention=diff_v1"]),
        (4, ["attention=gated", "micro_batch_size=1", "activation_checkpointing=full"]),
    ],
)
def test_document_losses_do_not_depend_on_the_mesh(ranks, overrides, tmp_path):
    alone = tuple(word for word in overrides if not word.startswith("parallel."))
    one = run_single(measured_losses, alone)
    for found in run_ranks(measured_losses, ranks, tmp_path, overrides):
        for mine, true in zip(found, one, strict=True):
            assert mine == pytest.approx(true, rel=1e-4)


SIZES = [(3, (1, 1)), (9, (2, 3, 1)), (5, (3, 3)), (1, (2,)), (7, (1, 1, 1)), (9, (2, 2))]
"""Length of each context, and lengths of its continuations."""


def scoring_config(*overrides):
    return load_config([*BASE, "model.init_std=0.2", *overrides])


def answered(overrides):
    """Return the scores of a training model; all ranks take part in every batch."""
    scoring.PASS_TOKENS = 40  # Gives several batches per rank.
    cfg = scoring_config(*overrides)
    t = build(cfg, torch.device("cpu"))
    t.model.eval()
    found = score_batches(t.model, random_questions(SIZES, cfg.model.vocab_size), together=True)
    t.weights.reshard()
    return [[tuple(one) for one in scores] for scores in found]


@pytest.mark.parametrize(
    ("ranks", "overrides"), slow_but([(2, V2), (2, MOE)], [(1, V2), (2, V2), (2, MOE), (3, MOE)])
)
def test_task_scores_on_every_rank_equal_scores_of_single_process(ranks, overrides, tmp_path):
    if ranks == 3:
        overrides = (*overrides, "global_batch_size=3", "micro_batch_size=1")
    cfg = scoring_config(*overrides)
    model: Transformer = build_model(cfg.model).eval()
    expected = score(model, random_questions(SIZES, cfg.model.vocab_size))
    for found in run_ranks(answered, ranks, tmp_path, overrides):
        for own, plain in zip(found, expected, strict=True):
            assert [x for x, _ in own] == pytest.approx([x for x, _ in plain], abs=1e-5)
            assert [greedy for _, greedy in own] == [greedy for _, greedy in plain]
