"""A gap with the error of the held-out documents and of the seeds together."""

import numpy as np

from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run
from diffllm.core.errors import CheckpointError
from diffllm.core.files.records import LARGEST
from diffllm.evaluation.heldout import DocumentLosses, document_losses
from diffllm.statistics.bootstrap import LEAST_DOCUMENTS, bootstrap, withheld
from diffllm.statistics.estimates import Estimate


def over_documents(row: Row, base: Row) -> tuple[Estimate | None, str]:
    """The gap of the rows over the documents and the seeds that both have, or why there is none.

    Runs are read only where there are seeds enough.
    """
    own, others = finite_runs(row), finite_runs(base)
    seeds = sorted(own.keys() & others.keys())
    if why := withheld(len(seeds), LEAST_DOCUMENTS):
        return None, why
    try:
        found = [document_losses(side[seed].path) for side in (others, own) for seed in seeds]
    except CheckpointError as error:
        return None, f"withheld: {error}"
    first = found[0]
    if not all(same_documents(first, each) for each in found):
        return None, "withheld: the runs were measured on different documents"
    nats = np.stack([each.nats for each in found])
    if not (np.abs(nats) <= LARGEST).all():
        return None, "withheld: a document's loss is not finite"
    if why := withheld(len(seeds), nats.shape[1]):
        return None, why
    return bootstrap(nats[len(seeds) :], nats[: len(seeds)], first.tokens), ""


def finite_runs(row: Row) -> dict[tuple[int, int], Run]:
    return {run.seeds: run for run in row.finished if run.final_loss is not None}


def same_documents(one: DocumentLosses, other: DocumentLosses) -> bool:
    return np.array_equal(one.texts, other.texts) and np.array_equal(one.tokens, other.tokens)
