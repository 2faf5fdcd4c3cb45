"""Sensitivity to the learning rate: what a rate that is not the best one costs.

As in Wortsman et al., "Small-scale proxies for large-scale Transformer training instabilities"
(arXiv:2309.14322): the mean over learning rates of min(loss, initial loss) - best loss. A run that
diverged counts as one that learned nothing, so that divergence is in the number.
"""

import math
from collections.abc import Sequence

LR_SENSITIVITY = "lr_sensitivity"


def lr_sensitivity(losses: Sequence[float | None], vocab_size: int) -> float | None:
    """Sensitivity of one seed, in nats a token; None where it diverged at every rate.

    Args:
        losses: final held-out loss at each learning rate; None where the run diverged.
        vocab_size: its logarithm is the loss of a model that has learned nothing.
    """
    initial = math.log(vocab_size)
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return None
    capped = [initial if loss is None else min(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(*finite, initial)
