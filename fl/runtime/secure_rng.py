"""Random numbers for a real release: nobody tells them from chance who does not know their key.

They come from SHAKE256 (FIPS 202) of a key and a counter, so that who has recorded the key can replay them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

BLOCK_SIZE = 2**15
"""Normal numbers made at once: what they are made of stays in a processor's caches."""
TERMS = 4
"""Gaussians in one number, which hide the gaps that floating-point numbers leave in each (Holohan and Braghin, ESORICS
2021; Opacus' secure mode)."""
Words = NDArray[np.uint64]


def secure_uniform(count: int) -> NDArray[np.float64]:
    """Return numbers in [0, 1) (count,) from the operating system, each of 53 bits; nobody can draw them again."""
    words: Words = np.frombuffer(os.urandom(8 * count), dtype="<u8")
    return (words >> np.uint64(11)) * np.float64(2.0**-53)


def keyed_normals(key: Sequence[int], count: int) -> NDArray[np.float64]:
    """Return standard normal numbers (count,) that follow from a key of non-negative numbers below 2**64.

    Every number is the sum of `TERMS`, divided by the root of their count.
    """
    made = np.empty(count)
    for block, start in enumerate(range(0, count, BLOCK_SIZE)):
        part = made[start : start + BLOCK_SIZE]
        terms = words_to_normals(_words(key, block, TERMS * len(part)))
        part[:] = terms.reshape(TERMS, -1).sum(0) / TERMS**0.5
    return made


def words_to_normals(words: Words) -> NDArray[np.float64]:
    """Return standard normal numbers by their distribution's inverse.

    52 bits of each word say how far out, one the side.
    """
    below = special.ndtri(((words >> np.uint64(12)) + 0.5) * 2.0**-53)
    return np.where(words & np.uint64(1), -below, below)


def _words(key: Sequence[int], block: int, count: int) -> Words:
    told = b"".join(part.to_bytes(8, "little") for part in (*key, block))
    return np.frombuffer(hashlib.shake_256(told).digest(8 * count), dtype="<u8")
