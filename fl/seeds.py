"""Explicit, counter-based randomness: every stream is named by a seed and keys, so none depends on call order."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *keys: object) -> int:
    """Return a 63-bit seed for the stream named by `keys`; equal keys give equal seeds on every machine."""
    text = "\x1f".join([str(seed), *map(str, keys)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *keys: object) -> torch.Generator:
    """Return a CPU generator for the stream named by `keys` (the same numbers whatever device the result moves to).

    torch takes the low 32 bits of the seed: of n streams two are the same with a probability of about n^2 / 2^33. More
    bits would change every number there is, partitions included, which are promised to stay.
    """
    return torch.Generator().manual_seed(derive_seed(seed, *keys))
