"""Standard error of a loss gap that comes from the choice of the held-out documents."""

import numpy as np


def document_error(
    arm_nats: np.ndarray, base_nats: np.ndarray, tokens: np.ndarray, log: bool = False
) -> float | None:
    """Return the standard error over documents of the mean loss gap, arm minus baseline.

    The loss of a run is a ratio: the sum over documents divided by the number of tokens. The error
    is that of the linearised ratio (Cochran, Sampling Techniques, 1977, section 6). Return None
    with a single document.

    Args:
        arm_nats, base_nats: (seeds, documents), sum of the token losses of each document in nats.
        tokens: (documents,), number of tokens of each document.
        log: whether the gap is the mean difference of the logarithms of the losses.
    """
    n = len(tokens)
    if n < 2:
        return None
    arm_influence = mean_influence(np.asarray(arm_nats, np.float64), tokens, log)
    base_influence = mean_influence(np.asarray(base_nats, np.float64), tokens, log)
    # Both models are measured on the same documents, so their influences are paired.
    squares = (arm_influence - base_influence) ** 2
    variance = n / (n - 1) * squares.sum()
    return float(np.sqrt(variance))


def mean_influence(nats: np.ndarray, tokens: np.ndarray, log: bool) -> np.ndarray:
    """Return the influence (documents,) of each document on the mean loss over seeds."""
    total_tokens = tokens.sum()
    losses = nats.sum(axis=1, keepdims=True) / total_tokens  # (seeds, 1)
    influences = (nats - losses * tokens) / total_tokens
    if log:
        # The derivative of log(loss) is 1 / loss.
        influences /= losses
    return influences.mean(axis=0)
