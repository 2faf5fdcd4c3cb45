"""A shuffle that is never stored: the i-th element of a keyed permutation of [0, n).

A Feistel network permutes the smallest 4**k >= n; values that fall outside [0, n) are sent
through again until they land inside (cycle walking), which keeps it a bijection (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

import hashlib

import numpy as np

ROUNDS = 8


def permute(indices: np.ndarray, n: int, seed: int | str, epoch: int) -> np.ndarray:
    """Map `indices` (any shape, integers in [0, n)) to their places in the order of (seed, epoch).

    Returns int64 of the same shape. Integer arithmetic only: equal on every platform.
    """
    keys = _round_keys(seed, epoch)
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    out = _feistel(np.asarray(indices, dtype=np.uint64), keys, half)
    while (outside := out >= n).any():
        out[outside] = _feistel(out[outside], keys, half)
    return out.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    """Run one pass over values (uint64, below 2**(2 * half)); keys (ROUNDS,) uint64."""
    mask, bits = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64; uint64 arrays wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int | str, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
