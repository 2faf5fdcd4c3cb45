"""A mixture of experts written from the equations, token by token; does not import diffllm.

Shapes: x (N, D) tokens, router (E, D), w1 and w3 (E, F, D), w2 (E, D, F).
"""

import torch


def swiglu(x, w1, w2, w3):
    """Return w2 (silu(w1 x) * w3 x) of x (D,): (D,)."""
    gate = w1 @ x
    return w2 @ (gate / (1 + torch.exp(-gate)) * (w3 @ x))


def scores_of(logits, score):
    """Return the scores (E,) of router logits (E,)."""
    if score == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    exponentials = torch.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def best(scores, top_k):
    """Return the indices of the top_k largest values."""
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda e: -values[e])[:top_k]


def mixture(
    x, router, bias, w1, w2, w3, top_k, score, renormalise, scaling, shared=None, chosen=None
):
    """Return out (N, D), experts per token (N lists), shares (N, E) and logits (N, E).

    `chosen` gives the experts of tokens with tied scores.
    """
    outs, experts, shares, logits = [], [], [], []
    for n, token in enumerate(x):
        token_logits = torch.stack([row @ token for row in router])
        scores = scores_of(token_logits, score)
        taken = chosen[n] if chosen else best(scores + bias, top_k)
        total = sum(scores[e] for e in taken) if renormalise else 1
        out = sum(scaling * scores[e] / total * swiglu(token, w1[e], w2[e], w3[e]) for e in taken)
        if shared is not None:
            out = out + swiglu(token, *shared)
        outs.append(out)
        experts.append(taken)
        shares.append(scores / scores.sum())
        logits.append(token_logits)
    return torch.stack(outs), experts, torch.stack(shares), torch.stack(logits)


def counts_of(experts, n_experts):
    """Count the tokens per expert: a list of E numbers."""
    return [sum(taken.count(e) for taken in experts) for e in range(n_experts)]


def sequence_balance(shares, experts, length, top_k):
    """Return the mean over sequences of sum_e f_e P_e (DeepSeek-V3, equations 17 to 20)."""
    n_experts, losses = shares.shape[1], []
    for start in range(0, len(shares), length):
        counts = counts_of(experts[start : start + length], n_experts)
        f = [n_experts / (top_k * length) * count for count in counts]
        p = sum(shares[start : start + length]) / length
        losses.append(sum(f[e] * p[e] for e in range(n_experts)))
    return sum(losses) / len(losses)


def global_balance(shares, counts):
    """Return sum_e f_e P_e over tokens, with f_e from the `counts` of a global batch."""
    p, total = sum(shares) / len(shares), sum(counts)
    return sum(len(counts) * counts[e] / total * p[e] for e in range(len(counts)))


def z_loss(logits):
    """Return the mean over tokens of log(sum(exp(logits)))^2 (ST-MoE, equation 5)."""
    return sum(torch.log(torch.exp(row).sum()) ** 2 for row in logits) / len(logits)


def moved_bias(bias, counts, rate):
    """Return the bias after an optimizer step (Wang et al., algorithm 1), a list of E numbers."""
    mean = sum(counts) / len(counts)
    return [b + rate * ((c < mean) - (c > mean)) for b, c in zip(bias, counts, strict=True)]
