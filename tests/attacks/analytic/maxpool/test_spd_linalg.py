"""Positive definite matrices: factors, inverses and products are those of torch, in its precision and threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.elsewhere import ELSEWHERE, elsewhere
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from attacks.analytic.maxpool import spd_linalg
from attacks.analytic.maxpool.spd_linalg import BLOCK, Factor, gram, spd_inverse
from fl.seeds import stream

SIZES = (1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 3)


def rows(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2 * size + 1, size, generator=stream(0, "positive", size), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_computed_is_what_torch_computes(size: int, dtype: torch.dtype) -> None:
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    made = rows(size, dtype)
    matrix = gram(made)
    assert torch.equal(matrix, matrix.mT)
    assert torch.allclose(matrix, made.mT @ made, **close)
    kept = matrix.clone()
    factor = Factor.of(matrix)
    assert factor is not None
    expected = torch.linalg.inv(matrix.double()).to(dtype)
    inverse = factor.inverse()
    assert inverse.is_contiguous()
    assert torch.equal(inverse, inverse.mT)
    assert torch.allclose(inverse, expected, **close)
    assert torch.allclose(factor.variances(), expected.diagonal(), **close)
    assert torch.allclose(factor.solve(made[0]), expected @ made[0], **close)
    assert torch.allclose(factor.solve(made[:3].mT), expected @ made[:3].mT, **close)
    assert {x.dtype for x in (matrix, inverse, factor.variances(), factor.solve(made[0]))} == {dtype}
    assert torch.equal(matrix, kept)  # nothing is written over it
    assert torch.equal(factor.inverse(), inverse)  # nor over the factor


def test_a_view_is_what_it_shows() -> None:
    made = rows(6, torch.float64)
    assert torch.allclose(gram(made.mT), made @ made.mT)
    assert torch.allclose(spd_inverse(gram(made)[:4, :4]), torch.linalg.inv(gram(made)[:4, :4]))


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 3])
def test_what_is_not_positive_definite_has_no_factor(value: float, at: int) -> None:
    matrix = gram(rows(4, torch.float64))
    matrix[at, at] = value
    assert Factor.of(matrix) is None
    with pytest.raises(ValueError, match="not positive definite"):
        spd_inverse(matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_device_gives_the_same_and_keeps_it(dtype: torch.dtype) -> None:
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    here = rows(7, dtype)
    ours = Factor.of(gram(here))
    assert ours is not None
    with elsewhere():
        made = here.to(ELSEWHERE)
        factor = Factor.of(gram(made))
        assert factor is not None
        pairs = [
            (factor.inverse(), ours.inverse()),
            (factor.variances(), ours.variances()),
            (factor.solve(made[0]), ours.solve(here[0])),
            (factor.solve(made[:3].mT), ours.solve(here[:3].mT)),
            (spd_inverse(gram(made)), spd_inverse(gram(here))),
        ]
        assert all(far.is_meta and torch.allclose(far.cpu(), near, **close) for far, near in pairs)
        assert Factor.of(-gram(made)) is None
        assert Factor.of(gram(made) * torch.nan) is None


def threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("call", ["of", "solve", "inverse", "variances", "gram"])
def test_as_many_threads_are_taken_as_torch_has(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows(3, torch.float64)
    factor = Factor.of(gram(made))
    assert factor is not None
    seen: list[set[int]] = []

    def watched(find: Callable[..., tuple[Callable[..., object]]]) -> Callable[..., object]:
        def found(*what: object) -> tuple[Callable[..., object]]:
            (function,) = find(*what)

            def called(*args: object, **kwargs: object) -> object:
                seen.append(threads())
                return function(*args, **kwargs)

            return (called,)

        return found

    for name in ("get_lapack_funcs", "get_blas_funcs"):
        monkeypatch.setattr(spd_linalg, name, watched(getattr(spd_linalg, name)))
    calls = {
        "of": lambda: Factor.of(torch.eye(3)),
        "solve": lambda: factor.solve(made[0]),
        "inverse": factor.inverse,
        "variances": factor.variances,
        "gram": lambda: gram(made),
    }
    assert torch.get_num_threads() == 1  # of all tests
    with threadpool_limits(2, user_api="blas"):
        assert threads() == {2}
        calls[call]()
        assert threads() == {2}
    assert seen == [{1}]


def test_python_s_threads_leave_the_limit_as_it_was() -> None:
    made = rows(40, torch.float64)
    with threadpool_limits(2, user_api="blas"):
        with ThreadPoolExecutor(4) as pool:
            for product in pool.map(gram, [made] * 200):
                assert torch.equal(product, gram(made))
        assert threads() == {2}
