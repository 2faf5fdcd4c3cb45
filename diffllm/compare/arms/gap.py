"""The gap between two arms, with errors over seeds and documents, and its trend during training.

Reports and studies compute every gap here, from one value per seed and arm. The arms must have had
equal budgets, which `arms/comparability.py` and the callers check.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from diffllm.compare.arms.arm import Arm, have_equal_tokens
from diffllm.core.run_files import LARGEST
from diffllm.evaluation.heldout import DocumentLosses, same_documents
from diffllm.statistics.divergence import Share, diverged_more
from diffllm.statistics.document_error import document_error
from diffllm.statistics.gap_tests import Gap, Seed, paired, seed_correlation, welch
from diffllm.statistics.trend import Trend, gap_trend

UNDOCUMENTED = "runs have no losses of documents"


@dataclass(frozen=True)
class ArmGap:
    """Gap between two arms, candidate minus base: its errors, its tests and the diverged runs.

    A t test ignores diverged runs, so it favours the arm that diverges more often. Therefore `p` is
    1 if the arm with the lower mean value diverged more often.
    """

    paired: Gap | None
    """Gap over the common seeds, which have a finite value in both arms; None without such a seed.

    The error is that over seeds.
    """
    over_documents: Gap | None
    """`paired` with an error over seeds and documents; None if the latter is unknown."""
    no_documents: str
    """Why `over_documents` is None; "" if no run has losses of documents."""
    undocumented: tuple[Hashable, ...]
    """Common seeds without losses of documents, if other runs have them."""
    differences: tuple[float, ...]
    """Value of the arm minus value of the base, by increasing common seed."""
    welch: Gap | None
    """Gap between the means of all finite values; None if an arm has no finite value."""
    correlation: float | None
    """Pearson's correlation of the values over common seeds; None for few seeds or equal values."""
    candidate: Share
    base: Share

    @property
    def full(self) -> Gap | None:
        """The gap with all known errors: `over_documents`, or else `paired`."""
        return self.over_documents or self.paired

    @property
    def favours_diverging(self) -> bool:
        """Whether the arm with the lower mean over common seeds has more diverged runs.

        Without common seeds the result is False.
        """
        if self.paired is None:
            return False
        if self.paired.mean < 0:
            return diverged_more(self.candidate, self.base)
        return diverged_more(self.base, self.candidate)

    @property
    def p(self) -> float | None:
        """Two-sided p-value of the paired t test over seeds; None with fewer than two seeds.

        1 instead of the result of the test if `favours_diverging` is True.
        """
        p = self.paired.p if self.paired else None
        if p is not None and self.favours_diverging:
            return 1.0
        return p

    @property
    def p_diverged(self) -> float:
        """Two-sided p-value of Fisher's exact test; null hypothesis: equal divergence rates."""
        if not self.candidate.diverged and not self.base.diverged:
            return 1.0
        from scipy.stats import fisher_exact  # A slow import, which most comparisons do not need.

        table = []
        for share in (self.candidate, self.base):
            table.append([share.diverged, share.runs - share.diverged])
        return float(fisher_exact(table).pvalue)


def arm_gap(candidate: Arm[Seed], base: Arm[Seed], is_log: bool = False) -> ArmGap:
    """Return the gap between two arms.

    Args:
        is_log: whether the values are logarithms of the mean losses of documents.
    """
    candidate_values = candidate.finite_values
    base_values = base.finite_values
    gap = paired(candidate_values, base_values)
    seeds = sorted(candidate_values.keys() & base_values.keys())  # type: ignore[type-var]
    candidate_documents = candidate.documents
    base_documents = base.documents
    pairs = []
    for seed in seeds:
        pairs.append((candidate_documents.get(seed), base_documents.get(seed)))
    over_documents, reason = gap_over_documents(gap, pairs, is_log)
    differences = []
    undocumented: list[Seed] = []
    for seed, pair in zip(seeds, pairs, strict=True):
        differences.append(float(candidate_values[seed] - base_values[seed]))
        if reason == UNDOCUMENTED and None in pair:
            undocumented.append(seed)
    return ArmGap(
        paired=gap,
        over_documents=over_documents,
        no_documents=reason,
        undocumented=tuple(undocumented),
        differences=tuple(differences),
        welch=welch(candidate_values, base_values),
        correlation=seed_correlation(candidate_values, base_values),
        candidate=candidate.diverged_share,
        base=base.diverged_share,
    )


def gap_over_documents(
    gap: Gap | None,
    pairs: list[tuple[DocumentLosses | None, DocumentLosses | None]],
    is_log: bool,
) -> tuple[Gap | None, str]:
    """Return a gap with the error over documents included, or None and the reason.

    The reason is "" if there is no gap, or if no run has losses of documents.

    Args:
        pairs: losses of documents of both arms for each common seed.
    """
    documents: list[DocumentLosses] = []
    for candidate_losses, base_losses in pairs:
        if candidate_losses is not None:
            documents.append(candidate_losses)
        if base_losses is not None:
            documents.append(base_losses)
    if gap is None or not documents:
        return None, ""
    if gap.error is None:
        return None, "there is a single seed"
    if len(documents) < 2 * len(pairs):
        return None, UNDOCUMENTED
    first = documents[0]
    if not all(same_documents(first, losses) for losses in documents):
        return None, "the runs were measured on different documents"
    nats = np.stack([losses.nats for losses in documents])
    # This form of the comparison is also False for NaN.
    if not (np.abs(nats) <= LARGEST).all():
        return None, "a document's loss is not finite"
    # Every pair is complete here, so the rows alternate between both arms.
    error = document_error(nats[::2], nats[1::2], first.tokens, is_log)
    if error is None:
        return None, "there is a single document"
    return gap.with_document_error(error), ""


def loss_trend(candidate: Arm[Seed], base: Arm[Seed]) -> Trend | None:
    """Return the trend of the gap `candidate` minus `base` over training tokens.

    Seeds that diverged in an arm are omitted. An evaluation is common if it took place at the same
    number of tokens in all runs. Return None if the runs have fewer than FEWEST_POINTS common
    evaluations after the first 10% of training, or if the arms train on different numbers of
    tokens.
    """
    if not have_equal_tokens(candidate, base):
        return None
    return gap_trend(candidate.curves, base.curves)
