"""Sums of many outer products as sums of few, exactly: once most hidden units are silent, few are enough."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Merged(NamedTuple):
    """What stands for the outer products from the one numbered `first` on; those before stay as they are.

    Attributes:
        first: how many stay.
        left: (M, P).
        right: (M, H), each with a single 1.
        weights: (K, M), each with a single 1 in a column.
    """

    first: int
    left: Tensor
    right: Tensor
    weights: Tensor


def merge_outer_products(left: Tensor, right: Tensor, weights: Tensor) -> Merged | None:
    """Return the sums over i of `weights[k, i] * left[i]^T right[i]`, for every k, in at most half as many products.

    A column of a sum is one outer product, with a unit vector, and only units that speak in some of `right` have one.
    The last products are replaced whose units are fewest: a unit that fell silent speaks in the first ones only.

    Args:
        left: (J, P).
        right: (J, H), activations of hidden units.
        weights: (K, J), those of K sums over the same outer products.

    Returns:
        The replacement, or None where more than half as many would be left.
    """
    speaks, sums = right != 0, len(weights)
    units = speaks.flip(0).cumsum(0).flip(0).count_nonzero(1)  # that speak in this product or in one after it
    left_over = torch.arange(len(right), device=right.device) + sums * units
    if not len(right) or 2 * int(left_over.min()) > len(right):
        return None
    first = int(left_over.argmin())
    own = speaks[first:].any(0).nonzero().squeeze(1)
    mix = (weights[:, first:, None] * right[first:, own]).mT.flatten(0, 1)
    one = torch.eye(right.shape[1], dtype=right.dtype, device=right.device)[own]
    each = torch.eye(sums, dtype=weights.dtype, device=weights.device).repeat_interleave(len(own), 1)
    return Merged(first, mix.to(left.dtype) @ left[first:], one.repeat(sums, 1), each)
