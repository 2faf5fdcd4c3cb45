"""The gap between two arms: seeds, documents, diverged runs, and keys of reports and studies."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from diffllm.compare.arms.arm import Arm
from diffllm.compare.arms.gap import arm_gap
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.statistics.divergence import Share
from diffllm.statistics.document_error import document_error

TOKENS = np.array([50, 120, 80, 200])


@dataclass(frozen=True, eq=False)
class DocumentedArm(Arm):
    """An arm with losses of documents."""

    losses: dict

    @property
    def documents(self):
        return self.losses


def gap_between(candidate, base, candidate_documents=None, base_documents=None, is_log=False):
    candidate_arm = DocumentedArm("candidate", candidate, candidate_documents or {})
    return arm_gap(candidate_arm, DocumentedArm("base", base, base_documents or {}), is_log)


def losses_of_documents(seeds, gap, seed=0):
    """Return the values of runs by seed, and the losses of documents with these means."""
    rng = np.random.default_rng(seed)
    documents = {}
    for place in range(seeds):
        nats = (4 + gap + rng.normal(0, 0.1, len(TOKENS))) * TOKENS
        documents[place] = DocumentLosses(nats, TOKENS, TOKENS, np.arange(4), np.zeros(4, int))
    return {place: losses.loss for place, losses in documents.items()}, documents


def test_p_value_is_1_if_better_arm_diverges_more_often():
    base = dict(enumerate([4.0, 4.1, 4.2, 4.15]))
    better = {0: 3.5, 1: 3.61, 2: 3.7, 3: None}
    gap = gap_between(better, base)
    assert gap.paired.seeds == 3
    assert gap.welch.base_seeds == 4
    assert (gap.candidate, gap.base) == (Share(1, 4), Share(0, 4))
    assert gap.paired.p < 0.01
    assert gap.p == 1
    assert gap.favours_diverging
    assert gap_between({**better, 3: math.nan}, base) == gap
    other_way = gap_between(base, better)
    assert other_way.favours_diverging
    assert other_way.p == 1
    worse = gap_between({seed: 5 + 0.1 * seed**2 for seed in range(3)} | {3: math.inf}, base)
    assert not worse.favours_diverging
    assert worse.p == worse.paired.p < 0.05
    both = gap_between(better, {**base, 3: None})
    assert both.p == both.paired.p


def test_only_divergence_is_tested_if_all_runs_of_one_arm_diverge():
    gap = gap_between({0: None, 1: None, 2: None}, dict(enumerate([4.0, 4.1, 4.2])))
    assert gap.paired is gap.welch is gap.correlation is gap.p is None
    assert gap.p_diverged == pytest.approx(0.1)
    assert gap_between(dict(enumerate([4.0] * 3)), dict(enumerate([4.1] * 5))).p_diverged == 1


@pytest.mark.parametrize("is_log", [False, True])
def test_gap_over_documents_adds_variances_of_seeds_and_documents(is_log):
    (candidate, candidate_documents), (base, base_documents) = (
        losses_of_documents(5, -0.1), losses_of_documents(5, 0.0, seed=1)
    )  # fmt: skip
    if is_log:
        candidate, base = ({s: math.log(x) for s, x in side.items()} for side in (candidate, base))
    gap = gap_between(candidate, base, candidate_documents, base_documents, is_log)
    candidate_nats, base_nats = (
        np.stack([side[s].nats for s in range(5)]) for side in (candidate_documents, base_documents)
    )
    of_documents = document_error(candidate_nats, base_nats, TOKENS, is_log)
    assert gap.over_documents.document_error == of_documents
    assert gap.over_documents.error == math.hypot(gap.paired.error, of_documents)
    assert gap.over_documents.mean == gap.paired.mean
    assert gap.full is gap.over_documents
    assert gap.differences == tuple(candidate[s] - base[s] for s in range(5))


def test_gap_does_not_depend_on_type_or_order_of_seeds():
    candidate, candidate_documents = losses_of_documents(4, -0.1)
    base, base_documents = losses_of_documents(4, 0.0, seed=1)
    base[3], base_documents[3] = None, None
    sides = candidate, base, candidate_documents, base_documents
    expected = gap_between(*sides)
    pairs = [{(s, s + 10): side[s] for s in (2, 0, 3, 1)} for side in sides]
    assert gap_between(*pairs) == expected
    assert (expected.paired.seeds, expected.base) == (3, Share(1, 4))
    assert expected.over_documents is not None, "a diverged run needs no losses of documents"


def test_gap_states_why_documents_are_not_included():
    candidate, candidate_documents = losses_of_documents(3, -0.1)
    base, base_documents = losses_of_documents(3, 0.0, seed=1)
    plain = gap_between(candidate, base)
    assert (plain.over_documents, plain.no_documents, plain.undocumented) == (None, "", ())
    assert plain.full is plain.paired
    missing = gap_between(candidate, base, candidate_documents, {0: base_documents[0]})
    assert missing.undocumented == (1, 2)
    assert missing.no_documents == "runs have no losses of documents"
    losses = base_documents[0]
    for nats, tokens, reason in (
        (losses.nats, losses.tokens + 1, "the runs were measured on different documents"),
        (losses.nats * math.inf, losses.tokens, "a document's loss is not finite"),
    ):
        other = DocumentLosses(nats, tokens, losses.bytes, losses.texts, losses.sources)
        gap = gap_between(candidate, base, candidate_documents, {**base_documents, 0: other})
        assert (gap.over_documents, gap.no_documents) == (None, reason)
    one = ({0: side[0]} for side in (candidate, base, candidate_documents, base_documents))
    assert gap_between(*one).no_documents == "there is a single seed"
