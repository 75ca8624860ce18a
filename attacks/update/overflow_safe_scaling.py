"""Updates in a unit of their own, in which squares of their numbers neither overflow nor run under."""

from __future__ import annotations

import math

from fl.tensors import LowRank, Tensors, Value, scale_tensors


def rescale_to_unit(values: Tensors) -> tuple[Tensors, float]:
    """Return `values` by their largest entry (of outer products, about that), and the power of two that was divided by.

    A power of two changes no digit of them; where all are zero, or one is not finite, it is 1.
    """
    largest = max(map(_largest_entry, values.values()), default=0.0)
    power = math.frexp(largest if 0 < largest < math.inf else 1.0)[1] - 1
    half = power // 2  # by two factors: the inverse of the smallest numbers is more than their type holds
    return scale_tensors(scale_tensors(values, 2.0**-half), 2.0 ** (half - power)), math.ldexp(1.0, power)


def _largest_entry(value: Value) -> float:
    if not isinstance(value, LowRank):
        return float(value.abs().max()) if value.numel() else 0.0
    terms = [float(term.coef) * _largest_entry(term.left) * _largest_entry(term.right) for term in value.terms]
    base = 0.0 if value.base is None or value.scale == 0 else value.scale * _largest_entry(value.base)
    return max(map(abs, (*terms, base)))
