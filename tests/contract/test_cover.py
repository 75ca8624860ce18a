"""What runs by default of a product is a pairwise cover of it."""

from __future__ import annotations

import itertools

import pytest
from support.cover import cover, one_at_a_time, pairwise


@pytest.mark.parametrize("sizes", [[3], [4, 2], [2, 2, 2], [14, 27, 2], [2, 5, 3, 4], [3, 3, 3, 3]])
def test_any_two_values_of_two_factors_meet(sizes: list[int]) -> None:
    cases = cover(sizes)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        met = {(case[first], case[second]) for case in cases}
        assert met == set(itertools.product(range(sizes[first]), range(sizes[second])))
    assert all(0 <= value < size for case in cases for value, size in zip(case, sizes, strict=True))


def test_it_is_as_small_as_can_be_where_that_is_easy_and_far_from_the_product_elsewhere() -> None:
    assert len(cover([27, 14, 2])) == 27 * 14
    assert len(cover([2, 2, 2])) == 4
    assert len(cover([2, 5, 3, 4])) < 2 * 5 * 3 * 4 / 4


def test_the_rest_is_marked_slow() -> None:
    (mark,) = [pairwise(a="xy", b="xy", c="xy").mark]
    names, cases = mark.args
    assert names == ("a", "b", "c")
    assert len(cases) == 8
    assert sum(not case.marks for case in cases) == 4
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}
    default = [case.values for case in one_at_a_time(a="xyz", b="xy").mark.args[1] if not case.marks]
    assert default == [("x", "x"), ("x", "y"), ("y", "x"), ("z", "x")]
