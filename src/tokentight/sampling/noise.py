"""Sampling noise that depends on nothing but (seed, choice, position).

Philox4x32-10 of J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC'11), the counter-based generator of the Random123 library. There is no state: the
noise of a token is the same however often it is drawn, in which order, and beside which rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokentight.pipeline.plan import I32, U64

U32 = NDArray[np.uint32]

NUM_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


def philox4x32(counter: U32, key: U32) -> U32:
    """Philox4x32-10 of every row: counter uint32 `[S, 4]` and key uint32 `[S, 2]` to `[S, 4]`."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(NUM_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0  # of two 32-bit words: fits in 64 bits
        product1 = _MULTIPLIERS[1] * c2
        c0 = (product1 >> _SHIFT_32) ^ c1 ^ k0
        c2 = (product0 >> _SHIFT_32) ^ c3 ^ k1
        c1 = product1 & _LOW_32
        c3 = product0 & _LOW_32
        k0 += _WEYL[0]  # arrays of uint32 wrap, as the key schedule wants
        k1 += _WEYL[1]
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(seeds: U64, choices: I32, positions: I32) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row: float64 `[S]`.

    The key is the seed (low word first), the counter `(position, choice, 0, 0)`. `positions` are
    those of the tokens to be sampled.
    """
    num_rows = seeds.shape[0]
    counter = np.zeros((num_rows, 4), dtype=np.uint32)
    counter[:, 0] = positions.astype(np.uint32)
    counter[:, 1] = choices.astype(np.uint32)
    key = np.empty((num_rows, 2), dtype=np.uint32)
    key[:, 0] = seeds & _LOW_32
    key[:, 1] = seeds >> _SHIFT_32
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 1] << _SHIFT_32) | words[:, 0]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
