"""Losses of training in bits a byte of text."""

from collections.abc import Mapping

from diffllm.data.mixture.prepared import Prepared


def bits_a_nat(data: Prepared, read: Mapping[str, float]) -> float | None:
    """Return how many bits a byte of training text a loss of 1 nat a token is; None where the
    text is not known.

    In a mixture the mean bytes of a token are those of what has been read so far.

    Args:
        read: metrics of what has been read, `data/tokens/<source>` among them.
    """
    if not data.sources:
        return data.manifest.splits["train"].bits_per_byte(1.0)
    splits = {name: source.manifest.splits["train"] for name, source in data.sources.items()}
    each = [
        (read[f"data/tokens/{name}"] * split.share_predicted, split.bits_per_byte(1.0))
        for name, split in splits.items()
    ]
    known = [(tokens, bits) for tokens, bits in each if tokens and bits is not None]
    if len(known) < sum(tokens > 0 for tokens, _ in each) or not known:
        return None
    return sum(tokens for tokens, _ in known) / sum(tokens / bits for tokens, bits in known)
