"""Scales updates by a power of two, so that squares of their numbers neither overflow nor underflow."""

from __future__ import annotations

import math

from fl.tensors import LowRank, Tensors, Value, scale_tensors

MAX_SINGLE_POWER = 100
"""Power of two, of either sign, up to which float32 holds the factor itself; half types are multiplied in float32."""


def rescale_to_unit(values: Tensors) -> tuple[Tensors, float]:
    """Divide `values` by a power of two near their largest entry; return the result and the power of two.

    A power of two changes no digit. It is 1 where all values are zero, or one is not finite. The largest entry of outer
    products is estimated.
    """
    largest = max(map(_largest_entry, values.values()), default=0.0)
    power = math.frexp(largest if 0 < largest < math.inf else 1.0)[1] - 1
    unit = math.ldexp(1.0, power)
    if abs(power) <= MAX_SINGLE_POWER:
        return scale_tensors(values, 1 / unit), unit
    half = power // 2  # by two factors: the inverse of the smallest numbers is more than their type holds
    return scale_tensors(scale_tensors(values, 2.0**-half), 2.0 ** (half - power)), unit


def _largest_entry(value: Value) -> float:
    if not isinstance(value, LowRank):
        return float(value.abs().max()) if value.numel() else 0.0
    terms = [float(term.coef) * _largest_entry(term.left) * _largest_entry(term.right) for term in value.terms]
    base = 0.0 if value.base is None or value.scale == 0 else value.scale * _largest_entry(value.base)
    return max(map(abs, (*terms, base)))
