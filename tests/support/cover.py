"""Which cases of a product run by default, by rule: a cover of it. The rest is marked slow (`make nightly`)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow


def pairwise(**factors: Iterable[Any]) -> Any:
    """Parametrize by a product of which any two values of two factors meet in a case that is not marked slow."""
    values = [tuple(factor) for factor in factors.values()]
    default = cover([len(factor) for factor in values])
    cases = [
        pytest.param(*(factor[i] for factor, i in zip(values, at, strict=True)), marks=() if at in default else SLOW)
        for at in itertools.product(*(range(len(factor)) for factor in values))
    ]
    return pytest.mark.parametrize(tuple(factors), cases)


def one_at_a_time(**factors: Iterable[Any]) -> Any:
    """Parametrize by a product of which only cases that differ from the first in one value are not marked slow."""
    values = [tuple(factor) for factor in factors.values()]
    cases = []
    for at in itertools.product(*(range(len(factor)) for factor in values)):
        case = (factor[i] for factor, i in zip(values, at, strict=True))
        cases.append(pytest.param(*case, marks=SLOW if sum(map(bool, at)) > 1 else ()))
    return pytest.mark.parametrize(tuple(factors), cases)


def cover(sizes: list[int]) -> set[tuple[int, ...]]:
    """Cases of a product in which any two values of two factors meet (Lei and Tai, HASE 1998: in-parameter-order).

    Args:
        sizes: how many values each factor has.
    """
    order = sorted(range(len(sizes)), key=lambda factor: -sizes[factor])
    cases: list[tuple[int, ...]] = [()]
    for k, size in enumerate(sizes[factor] for factor in order):
        if k < 2:
            cases = [(*case, value) for case in cases for value in range(size)]
            continue
        earlier = [sizes[factor] for factor in order[:k]]
        open_ = {(f, i, value) for f, count in enumerate(earlier) for i in range(count) for value in range(size)}
        used, grown = Counter[int](), list[tuple[int, ...]]()
        for case in cases:
            gains = [sum((f, i, value) in open_ for f, i in enumerate(case)) for value in range(size)]
            best = min(range(size), key=lambda value: (-gains[value], used[value], value))
            used[best] += 1
            open_ -= {(f, i, best) for f, i in enumerate(case)}
            grown.append((*case, best))
        for factor, i, value in sorted(open_):
            grown.append((*(i if f == factor else 0 for f in range(k)), value))
        cases = grown
    places = [order.index(factor) for factor in range(len(sizes))]
    return {tuple(case[place] for place in places) for case in cases}
