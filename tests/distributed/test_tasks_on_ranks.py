"""Answers to tasks from the sharded model of a run: those of the whole model in one process."""

import pytest
import torch
from runs.ranks import run_ranks
from test_training_ranks import BASE
from tiers import slow_but

from diffllm import build_model
from diffllm.config import load_config
from diffllm.evaluation import answers
from diffllm.evaluation.answers import Question, score, score_batches
from diffllm.model import Transformer
from diffllm.training.build import build

SIZES = [(3, (1, 1)), (9, (2, 3, 1)), (5, (3, 3)), (1, (2,)), (7, (1, 1, 1)), (9, (2, 2))]
"""Lengths of contexts, and of their continuations."""
MOE = ("model=moe_tiny", "model.moe.expert_dim=32")


def config(*overrides):
    return load_config([*BASE, "model.init_std=0.2", *overrides])


def questions(vocab_size):
    rng = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(0, vocab_size, (length,), generator=rng).tolist()

    return [Question(ids(length), [ids(n) for n in lengths]) for length, lengths in SIZES]


def answered(overrides):
    """The scores of a training model, whose ranks share every batch."""
    answers.TOKENS = 40  # several batches a rank
    cfg = config(*overrides)
    t = build(cfg, torch.device("cpu"))
    t.model.eval()
    found = score_batches(t.model, questions(cfg.model.vocab_size), together=True)
    t.weights.reshard()
    return [[tuple(one) for one in scores] for scores in found]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    slow_but(
        [(2, ("attention=diff_v2",)), (2, MOE)],
        [(ranks, words) for ranks in (1, 2, 3) for words in (("attention=diff_v2",), MOE)],
    ),
)
def test_ranks_share_batches_and_all_know_all(ranks, overrides, tmp_path):
    if ranks == 3:
        overrides = (*overrides, "global_batch_size=3", "micro_batch_size=1")
    cfg = config(*overrides)
    model: Transformer = build_model(cfg.model).eval()
    expected = score(model, questions(cfg.model.vocab_size))
    for found in run_ranks(answered, ranks, tmp_path, overrides):
        for own, plain in zip(found, expected, strict=True):
            assert [x for x, _ in own] == pytest.approx([x for x, _ in plain], abs=1e-5)
            assert [greedy for _, greedy in own] == [greedy for _, greedy in plain]
