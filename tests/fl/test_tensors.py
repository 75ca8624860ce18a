from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fl import tensors
from fl.seeds import stream
from fl.tensors import LowRank, Term, dense

N, M = 7, 5


def numbers(*shape: int, key: object = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(0, "numbers", *shape, key), dtype=torch.float64)


BASE = numbers(N, M)


def structured(key: object, *, scale: float = 1.0, ranks: tuple[int, ...] = (1, 2)) -> LowRank:
    coefs: list[float | Tensor] = [0.5, torch.tensor(-2.0, dtype=torch.float64)]
    terms = [
        Term(c, numbers(r, N, key=(key, c)), numbers(r, M, key=(key, c))) for r, c in zip(ranks, coefs, strict=True)
    ]
    return LowRank(BASE if scale else None, scale, tuple(terms), (N, M))


KINDS = {
    "over a base": structured("a", scale=0.75),
    "bare": structured("b", scale=0.0),
    "dense": numbers(N, M, key="d"),
}
EACH = pytest.mark.parametrize("x", KINDS.values(), ids=KINDS.keys())
OTHER = pytest.mark.parametrize("y", KINDS.values(), ids=KINDS.keys())


def near(x: Tensor, y: Tensor, tolerance: float = 1e-13) -> bool:
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)  # says where they differ
    return True


def by_hand(x: tensors.Value) -> Tensor:
    if isinstance(x, Tensor):
        return x
    total = torch.zeros(N, M, dtype=torch.float64) if x.base is None else x.scale * x.base
    for term in x.terms:
        for left, right in zip(term.left, term.right, strict=True):
            total = total + term.coef * torch.outer(left, right)
    return total


@EACH
def test_dense_shape_and_count(x: tensors.Value) -> None:
    assert near(dense(x), by_hand(x))
    assert x.shape == (N, M)
    assert x.numel() == N * M


@EACH
def test_products_with_vectors(x: tensors.Value) -> None:
    assert near(tensors.matvec(x, numbers(M)), by_hand(x) @ numbers(M))
    assert near(tensors.rmatvec(x, numbers(N)), by_hand(x).mT @ numbers(N))


@EACH
@OTHER
@pytest.mark.parametrize("alpha", [-1.0, 0.3])
def test_sums_of_structured_values_equal_dense_ones(x: tensors.Value, y: tensors.Value, alpha: float) -> None:
    assert near(dense(tensors.add(x, y, alpha)), by_hand(x) + alpha * by_hand(y))
    assert near(tensors.sub(x, y), by_hand(x) - by_hand(y))


@EACH
@OTHER
def test_inner_products_and_distances(x: tensors.Value, y: tensors.Value) -> None:
    assert near(tensors.inner(x, y), (by_hand(x) * by_hand(y)).sum())
    assert near(tensors.squared_distance(x, y), (by_hand(x) - by_hand(y)).square().sum(), 1e-12)
    sets = {"x": x, "y": y}
    assert near(tensors.norm(sets).square(), by_hand(x).square().sum() + by_hand(y).square().sum())
    assert near(tensors.dot(sets, {"y": x, "x": y}), 2 * (by_hand(x) * by_hand(y)).sum())


@EACH
def test_multiples_of_structured_values_equal_dense_ones(x: tensors.Value) -> None:
    assert near(dense(tensors.scale_tensors({"x": x}, -3.0)["x"]), -3 * by_hand(x))
    if isinstance(x, LowRank):
        assert near(dense(-x), -by_hand(x))
        assert near(dense(x - x), 0 * by_hand(x))


def test_a_known_base_takes_no_learned_factor() -> None:
    factor = torch.tensor(0.5, dtype=torch.float64)
    assert near(dense(KINDS["bare"] * factor), by_hand(KINDS["bare"]) * 0.5)
    with pytest.raises(TypeError, match="expected a number"):
        KINDS["over a base"] * factor


def test_different_bases_do_not_add_structurally() -> None:
    one, other = LowRank.of(BASE), LowRank.of(BASE.clone())
    with pytest.raises(ValueError, match="same base"):
        one + other
    assert near(dense(tensors.add(one, other)), 2 * BASE)


def test_equal_outer_products_merge() -> None:
    g = LowRank.outer(numbers(N), numbers(M))
    start = LowRank.of(BASE)
    momentum = g
    weights = start + momentum * -0.1
    for _ in range(5):
        momentum = g + momentum * 0.5
        weights = weights + momentum * -0.1
    assert len(weights.terms) == 1
    update = start - weights
    assert update.base is None
    assert len(update.terms) == 1
    assert near(dense(update), by_hand(g) * float(update.terms[0].coef))


def test_what_cancels_is_zero_with_a_type() -> None:
    nothing = LowRank.of(BASE) - LowRank.of(BASE)
    assert torch.equal(dense(nothing), torch.zeros(N, M, dtype=torch.float64))
    assert float(tensors.inner(nothing, nothing)) == 0
    assert float(tensors.inner(nothing, KINDS["dense"])) == 0
    zeros = tensors.zeros(KINDS, KINDS)
    assert {type(v) for k, v in zeros.items() if k != "dense"} == {LowRank}
    assert all(not dense(v).any() and v.shape == (N, M) for v in zeros.values())


@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_small_distances_of_outer_products_keep_their_digits(distance: float, side: str) -> None:
    a, b = numbers(N), numbers(M)
    c = a + distance * numbers(N, key="c") if side != "right" else a
    d = b + distance * numbers(M, key="d") if side != "left" else b
    found = tensors.squared_distance(LowRank.outer(a, b), LowRank.outer(c, d))
    exact = torch.outer(c - a, b) + torch.outer(c, d - b)  # no cancellation of large numbers
    torch.testing.assert_close(found, exact.square().sum(), rtol=1e-5 if distance == 1e-9 else 1e-8, atol=0)
    assert float(tensors.squared_distance(LowRank.outer(a, b), LowRank.outer(a, b))) == 0


def test_the_norm_of_zeros_has_a_finite_derivative() -> None:
    x = torch.zeros(3, requires_grad=True)
    (g,) = torch.autograd.grad(tensors.norm({"x": x}), x)
    assert torch.equal(g, torch.zeros(3))
    assert float(tensors.norm({"x": torch.tensor([3.0, 4.0])})) == 5


def test_each_reaches_all_factors_and_keeps_the_structure() -> None:
    x = KINDS["over a base"]
    halves = tensors.map_values({"x": x}, lambda t: t.float())["x"]
    assert isinstance(halves, LowRank)
    parts = [halves.base, *(p for t in halves.terms for p in (t.left, t.right))]
    assert {p.dtype for p in parts if p is not None} == {torch.float32}
    torch.testing.assert_close(dense(halves).double(), by_hand(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(tensors.map_values({"d": BASE}, torch.neg)["d"], -BASE)  # type: ignore[arg-type]


def test_compress_finds_the_best_outer_products() -> None:
    low = by_hand(structured("c", scale=0.0))
    assert near(dense(tensors.low_rank_approximation(low, 3)), low, 1e-10)
    full = numbers(N, M, key="full")
    values = torch.linalg.svdvals(full)
    error = (dense(tensors.low_rank_approximation(full, 2)) - full).square().sum()
    assert near(error, values[2:].square().sum(), 1e-10)
    for rank in (0, M + 1):
        with pytest.raises(ValueError, match="expected rank"):
            tensors.low_rank_approximation(full, rank)


@pytest.mark.parametrize("x", [v for v in KINDS.values() if isinstance(v, LowRank)])
def test_trees_keep_structure_and_hold_nothing_but_tensors(x: LowRank) -> None:
    leaves, tree = torch.utils._pytree.tree_flatten({"x": x})
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = torch.utils._pytree.tree_unflatten(leaves, tree)["x"]
    assert again == x


def test_stacks_of_structured_values() -> None:
    left, right = numbers(4, N), numbers(M)
    stack = vmap(lambda row: {"x": LowRank.outer(row, right)})(left)
    assert stack["x"].terms[0].left.shape == (4, 1, N)
    assert near(vmap(tensors.norm)(stack), torch.stack([torch.outer(row, right).norm() for row in left]))
    assert near(vmap(lambda s: dense(s["x"]))(stack), torch.einsum("tn,m->tnm", left, right))


def test_structured_values_are_differentiable() -> None:
    left, right = numbers(N).requires_grad_(), numbers(M).requires_grad_()
    target = numbers(N, M, key="t")
    found = torch.autograd.grad(tensors.squared_distance(LowRank.outer(left, right), target), [left, right])
    expected = torch.autograd.grad((torch.outer(left, right) - target).square().sum(), [left, right])
    for f, e in zip(found, expected, strict=True):
        assert near(f, e, 1e-12)


def test_a_tensor_times_a_base_is_dense() -> None:
    draw = stream(0, "times")
    base = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    x = LowRank.of(base) + LowRank.outer(torch.ones(4).double(), torch.ones(3).double())
    factor = torch.tensor(0.3, dtype=torch.float64)
    for found in (tensors.mul(x, factor), tensors.scale_tensors({"x": x}, factor)["x"]):
        assert torch.allclose(tensors.dense(found), x.dense() * 0.3)
    assert torch.allclose(tensors.dense(tensors.add(x, x, factor)), x.dense() * 1.3)
    assert isinstance(tensors.mul(x, 2.0), LowRank)


def test_former_names_of_functions_are_read_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"fl\.tensors\.times is now fl\.tensors\.mul"):
        assert tensors.times is tensors.mul  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        tensors.nothing  # type: ignore[attr-defined]  # noqa: B018
