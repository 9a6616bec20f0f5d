"""Digests of all windows of a token sequence, by which equal runs of tokens are found wherever they stand.

Karp and Rabin, "Efficient randomized pattern-matching algorithms", 1987: polynomials over the ids, here modulo 2**64
and with each id scrambled first. They only propose: whoever uses them compares the tokens themselves.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Digests = NDArray[np.uint64]

WIDTH = 16
"""Tokens in a window; a power of two."""

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no power of it vanishes
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def seed_of(salt: str) -> int:
    """A salt's own digests: what is equal for one tenant is not for another."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8, person=b"promptsluice-fd").digest(), "little")


def window_digests(ids: Ids, *, seed: int) -> Digests:
    """The digest of each window `ids[i : i + WIDTH]`: uint64 [max(0, len(ids) - WIDTH + 1)]."""
    if len(ids) < WIDTH:
        return np.empty(0, dtype=np.uint64)
    digests, factor, width = _scrambled(ids, seed), _FACTOR, 1
    while width < WIDTH:  # the digest of twice the width from two that lie side by side
        digests = digests[:-width] * np.uint64(factor) + digests[width:]
        factor = factor * factor % 2**64
        width *= 2
    return digests


def _scrambled(ids: Ids, seed: int) -> Digests:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014) over id and seed."""
    first, second = _MIX
    mixed = ids.astype(np.uint64) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * first
    mixed = (mixed ^ (mixed >> np.uint64(27))) * second
    return mixed ^ (mixed >> np.uint64(31))
