"""Named tensors and their algebra: what clients hold and send, dense or structured.

A parameter set is a `dict` keyed by parameter name. A value is a plain tensor or a `LowRank` matrix: a multiple of a
known base plus outer products. The gradient of a generator's linear head is one outer product, and plain SGD keeps
it in that form, so a HyperFL step costs what its target network costs and not what its 14.9 million weights cost.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Term:
    """`coef * left^T right`, a sum of r outer products.

    Attributes:
        coef: a number or a tensor of no dimensions.
        left: (r, n).
        right: (r, m).
    """

    coef: float | Tensor
    left: Tensor
    right: Tensor


MIN_WIDE_RANK = 16
"""Number of outer products from which on a term is multiplied by itself: joining terms would copy more than it
saves."""


def _merge_terms(terms: Iterable[Term]) -> list[tuple[Tensor, Tensor]]:
    """Return the sums of `terms` as few products.

    Thin ones joined, wide ones by themselves, coefficients on the right.
    """
    scaled_terms = [(term.left, term.right * term.coef) for term in terms]
    thin = [pair for pair in scaled_terms if pair[0].shape[0] < MIN_WIDE_RANK]
    wide = [pair for pair in scaled_terms if pair[0].shape[0] >= MIN_WIDE_RANK]
    if len(thin) > 1:
        lefts, rights = zip(*thin, strict=True)
        thin = [(torch.cat(lefts), torch.cat(rights))]
    return thin + wide


@dataclass(frozen=True)
class LowRank:
    """An (n, m) matrix `scale * base + sum of terms`, never made dense unless asked.

    Attributes:
        base: (n, m) or None for zero.
        scale: multiple of the base; always a number, since only learning rates and decay enter it.
        terms: outer products.
        size: (n, m).
    """

    base: Tensor | None
    scale: float
    terms: tuple[Term, ...]
    size: tuple[int, int]

    @classmethod
    def of(cls, matrix: Tensor) -> LowRank:
        """Return the dense `matrix` as a base to which outer products can be added."""
        return cls(matrix, 1.0, (), (matrix.shape[0], matrix.shape[1]))

    @classmethod
    def outer(cls, left: Tensor, right: Tensor) -> LowRank:
        """Return the outer product of `left` (n,) and `right` (m,)."""
        return cls(None, 0.0, (Term(1.0, left[None], right[None]),), (left.shape[0], right.shape[0]))

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, as of a dense tensor."""
        return torch.Size(self.size)

    def numel(self) -> int:
        """Return the number of entries of the matrix."""
        return self.size[0] * self.size[1]

    def dense(self) -> Tensor:
        """Return the matrix itself (n, m)."""
        total, kept = self.base, self.scale
        for left, right in _merge_terms(self.terms):
            total = left.mT @ right if total is None else torch.addmm(total, left.mT, right, beta=kept)
            kept = 1.0
        if total is None:
            raise ValueError("expected a matrix with a base or a term, got an empty one")
        return total if kept == 1 and self.terms else total * kept

    def matvec(self, x: Tensor) -> Tensor:
        """Return `A x` (n,) for x (m,)."""
        base = self.base if self.scale != 0 else None
        total = x.new_zeros(self.size[0]) if base is None else matvec(base, x) * self.scale
        for term in self.terms:
            total = total + (term.right @ x * term.coef) @ term.left
        return total

    def rmatvec(self, y: Tensor) -> Tensor:
        """Return `A^T y` (m,) for y (n,)."""
        base = self.base if self.scale != 0 else None
        total = y.new_zeros(self.size[1]) if base is None else rmatvec(base, y) * self.scale
        for term in self.terms:
            total = total + (term.left @ y * term.coef) @ term.right
        return total

    def __mul__(self, factor: float | Tensor) -> LowRank:
        if isinstance(factor, Tensor):
            if self.base is not None and self.scale != 0:
                raise TypeError("expected a number: the base of a LowRank is only ever scaled by known constants")
            return replace(self, terms=tuple(replace(t, coef=factor * t.coef) for t in self.terms))
        terms = tuple(replace(t, coef=t.coef * factor) for t in self.terms)
        return replace(self, scale=self.scale * factor, terms=terms)

    def __add__(self, other: LowRank) -> LowRank:
        base = other.base if self.base is None or self.scale == 0 else self.base
        if base is not None and other.base is not None and other.scale != 0 and other.base is not base:
            raise ValueError("expected two matrices over the same base, got different ones")
        terms = list(self.terms)
        for term in other.terms:  # SGD adds the same outer products to weights and momentum: merge by identity
            for i, mine in enumerate(terms):
                if mine.left is term.left and mine.right is term.right:
                    terms[i] = replace(mine, coef=mine.coef + term.coef)
                    break
            else:
                terms.append(term)
        scale = self.scale + other.scale
        if abs(scale) < 1e-13:  # the base's own share is 1: what is left here is the rounding of that 1
            if base is not None and not terms:  # nothing is left: no outer products, but their type and device
                terms = [_no_term(base, self.size)]
            base, scale = None, 0.0
        return LowRank(base, scale, tuple(terms), self.size)

    def __sub__(self, other: LowRank) -> LowRank:
        return self + other * -1.0

    def __neg__(self) -> LowRank:
        return self * -1.0


def _no_term(like: Tensor, size: tuple[int, int]) -> Term:
    return Term(1.0, like.new_zeros(0, size[0]), like.new_zeros(0, size[1]))


Value = Tensor | LowRank
Tensors = dict[str, Value]
Payloads = dict[str, Tensors]


def _flatten(x: LowRank) -> tuple[list[object], tuple[object, ...]]:
    leaves: list[object] = [] if x.base is None else [x.base]
    for t in x.terms:  # numbers are structure: vmap takes and gives nothing but tensors
        leaves += [t.left, t.right] if isinstance(t.coef, float) else [t.left, t.right, t.coef]
    numbers = tuple(t.coef if isinstance(t.coef, float) else None for t in x.terms)
    return leaves, (x.base is None, x.scale, numbers, x.size)


def _unflatten(leaves: Iterable[Any], context: tuple[Any, ...]) -> LowRank:
    bare, scale, numbers, size = context
    rest = iter(leaves)
    base = None if bare else next(rest)
    terms = []
    for number in numbers:
        left, right = next(rest), next(rest)
        terms.append(Term(next(rest) if number is None else number, left, right))
    return LowRank(base, scale, tuple(terms), size)


pytree.register_pytree_node(LowRank, _flatten, _unflatten, serialized_type_name="hyperleak.LowRank")


# ---- one value -------------------------------------------------------------------------------------------------------
def dense(x: Value) -> Tensor:
    """Return a plain tensor."""
    return x.dense() if isinstance(x, LowRank) else x


def matvec(a: Value, x: Tensor) -> Tensor:
    """Return `A x` for a matrix of either kind."""
    if isinstance(a, LowRank):
        return a.matvec(x)
    return (x[None] @ a.mT)[0]  # a row times the matrix: stacked by vmap this is one product, not the slow transpose


def rmatvec(a: Value, y: Tensor) -> Tensor:
    """Return `A^T y` for a matrix of either kind."""
    return a.rmatvec(y) if isinstance(a, LowRank) else (y[None] @ a)[0]


def add(x: Value, y: Value, alpha: float | Tensor = 1.0) -> Value:
    """Return `x + alpha * y`; a sum of a dense and a structured matrix is dense."""
    if isinstance(x, LowRank) and isinstance(y, LowRank):
        same = x.base is None or y.base is None or x.base is y.base or 0 in (x.scale, y.scale)
        if same and not (isinstance(alpha, Tensor) and y.base is not None and y.scale != 0):
            return x + y * alpha
    x, y = dense(x), dense(y)
    return x + y * alpha if isinstance(alpha, Tensor) else torch.add(x, y, alpha=alpha)


def mul(x: Value, factor: float | Tensor) -> Value:
    """Return `factor * x`; dense where a tensor multiplies a base, whose own factor is always a number."""
    if isinstance(x, LowRank) and isinstance(factor, Tensor) and x.base is not None and x.scale != 0:
        return x.dense() * factor
    return x * factor


def weighted_sum(values: Sequence[Value], weights: Sequence[float]) -> Value:
    """Return the sum of `values`, each times its weight.

    Structured ones are summed as such before any is made dense.
    """
    kinds: dict[bool, Value] = {}
    for value, weight in zip(values, weights, strict=True):
        kind = isinstance(value, LowRank)
        kinds[kind] = add(kinds[kind], value, weight) if kind in kinds else mul(value, weight)
    plain, structured = kinds.get(False), kinds.get(True)
    return add(plain, structured) if plain is not None and structured is not None else next(iter(kinds.values()))


def sub(value: Value, change: Value) -> Value:
    """Return `value - change` as a plain tensor, in one product where the change is structured."""
    if isinstance(change, LowRank) and isinstance(value, Tensor):
        value = LowRank.of(value)
    return dense(add(value, change, -1.0))


def inner(x: Value, y: Value) -> Tensor:
    """Return the sum of products of entries, without a dense matrix where either side is structured."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return (x * y).sum()
    if isinstance(x, Tensor):
        x, y = y, x
    assert isinstance(x, LowRank)
    parts = []
    if x.base is not None and x.scale != 0:
        parts.append(_with_matrix(y, x.base) * x.scale)
    parts.extend(_with_term(y, term) for term in x.terms)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _with_matrix(x: Value, matrix: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return (x * matrix).sum()
    total = matrix.new_zeros(())
    if x.base is not None and x.scale != 0:
        total = total + (x.base * matrix).sum() * x.scale
    for term in x.terms:
        total = total + _with_term(matrix, term)
    return total


def _with_term(x: Value, term: Term) -> Tensor:
    if isinstance(x, Tensor):
        return ((term.left @ x) * term.right).sum() * term.coef
    total = term.left.new_zeros(())
    if x.base is not None and x.scale != 0:
        total = total + ((term.left @ x.base) * term.right).sum() * x.scale
    for other in x.terms:
        gram = (other.left @ term.left.mT) * (other.right @ term.right.mT)
        total = total + gram.sum() * other.coef
    return total * term.coef


def squared_distance(x: Value, y: Value, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """Return `|a x - b y|^2`, accurate also where the two nearly agree."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return (x * a - y * b).square().sum()
    if isinstance(x, LowRank) and isinstance(y, LowRank) and _one_outer_product(x) and _one_outer_product(y):
        # with a x = g p^T and b y = h q^T the difference is (g - h) p^T + h (p - q)^T: no large numbers cancel in it
        (term_x,), (term_y,) = x.terms, y.terms
        g, h = term_x.left[0] * (term_x.coef * a), term_y.left[0] * (term_y.coef * b)
        p, left_difference, right_difference = term_x.right[0], g - h, term_x.right[0] - term_y.right[0]
        return (
            _dot(left_difference, left_difference) * _dot(p, p)
            + _dot(h, h) * _dot(right_difference, right_difference)
            + 2 * _dot(left_difference, h) * _dot(p, right_difference)
        )
    return inner(x, x) * a**2 - 2 * inner(x, y) * (a * b) + inner(y, y) * b**2


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return `x @ y`, whose derivative is a slow product of matrices where `vmap` stacks it."""
    return (x * y).sum()


def _one_outer_product(x: LowRank) -> bool:
    return (x.base is None or x.scale == 0) and len(x.terms) == 1 and x.terms[0].left.shape[0] == 1


# ---- sets of values --------------------------------------------------------------------------------------------------
def dot(x: Mapping[str, Value], y: Mapping[str, Value]) -> Tensor:
    """Return the inner product of two sets over the names of the first."""
    parts = [inner(v, y[k]) for k, v in x.items()]
    return torch.stack(parts).sum()


def vector_norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of a vector, above 0 by a hair at least; its derivative at zero is zero."""
    return torch.linalg.vector_norm(x).clamp_min(torch.finfo(x.dtype).tiny ** 0.5)


def norm(x: Mapping[str, Value]) -> Tensor:
    """Return the Euclidean norm of all entries together, above 0 by a hair at least; its derivative at zero is zero."""
    flat, structured = split_dense(x)
    if not structured:
        return vector_norm(flat)
    squares = dot(structured, structured)
    if flat.numel():
        squares = squares + flat.square().sum()
    return (squares + torch.finfo(squares.dtype).tiny).sqrt()


def rms(x: Value) -> float:
    """Return the root mean square of the entries; 0 where there are none."""
    return math.sqrt(max(float(inner(x, x)), 0.0) / max(x.numel(), 1))


def split_dense(x: Mapping[str, Value]) -> tuple[Tensor, dict[str, LowRank]]:
    """Return all dense values in one vector, and the structured ones.

    One long operation costs less than many short ones.
    """
    parts = [value.reshape(-1) for value in x.values() if isinstance(value, Tensor)]
    structured = {name: value for name, value in x.items() if isinstance(value, LowRank)}
    return torch.cat(parts) if parts else torch.empty(0), structured


def add_scaled(x: Mapping[str, Value], y: Mapping[str, Value], alpha: float | Tensor = 1.0) -> Tensors:
    """Return `x + alpha * y`, name by name over the names of `x`."""
    return {k: add(v, y[k], alpha) for k, v in x.items()}


def zeros(x: Mapping[str, Value], names: Iterable[str]) -> Tensors:
    """Return zeros in the form of the values at `names`: no outer products where those are structured."""
    result: Tensors = {}
    for name in names:
        v = x[name]
        if isinstance(v, LowRank):
            some = v.terms[0].left if v.base is None else v.base
            result[name] = LowRank(None, 0.0, (_no_term(some, v.size),), v.size)
        else:
            result[name] = torch.zeros_like(v)
    return result


def scale_tensors(x: Mapping[str, Value], factor: float | Tensor) -> Tensors:
    """Return every value times `factor`."""
    return {k: mul(v, factor) for k, v in x.items()}


def map_values(x: Mapping[str, Value], function: Callable[[Tensor], Tensor]) -> Tensors:
    """Apply `function` to every tensor; on the factors and the base of a structured one (casts, clones, moves)."""
    result: Tensors = {}
    for name, v in x.items():
        if isinstance(v, LowRank):
            terms = tuple(
                Term(function(t.coef) if isinstance(t.coef, Tensor) else t.coef, function(t.left), function(t.right))
                for t in v.terms
            )
            result[name] = replace(v, base=None if v.base is None else function(v.base), terms=terms)
        else:
            result[name] = function(v)
    return result


def leaf_tensors(values: Mapping[str, Value]) -> Iterator[Tensor]:
    """Yield every dense tensor and, of each outer product, the left factor times its coefficient."""
    for value in values.values():
        if isinstance(value, LowRank):
            yield from (term.left * term.coef for term in value.terms)
        else:
            yield value


def low_rank_approximation(matrix: Tensor, rank: int) -> LowRank:
    """Return the best approximation of a dense (n, m) matrix by `rank` outer products (m small)."""
    if not 1 <= rank <= min(matrix.shape):
        raise ValueError(f"expected rank in [1, {min(matrix.shape)}], got {rank}")
    _, vectors = torch.linalg.eigh((matrix.mT @ matrix).double())
    right = vectors[:, -rank:].mT.to(matrix.dtype).contiguous()
    return LowRank(None, 0.0, (Term(1.0, right @ matrix.mT, right),), (matrix.shape[0], matrix.shape[1]))


def detached_copies(values: Tensors) -> Tensors:
    """Return copies that share no memory and no graph with `values`, but for the bases of structured ones."""
    result: Tensors = {}
    for name, value in values.items():
        if isinstance(value, LowRank):
            copied = map_values({name: replace(value, base=None)}, lambda t: t.detach().clone())[name]
            assert isinstance(copied, LowRank)
            result[name] = replace(copied, base=value.base)
        else:
            result[name] = value.detach().clone()
    return result


def flatten(payloads: Payloads, prefix: str = "") -> Tensors:
    """Return the payloads as one set with names `prefix payload/name`."""
    return {f"{prefix}{payload}/{name}": value for payload, part in payloads.items() for name, value in part.items()}


_FORMER = {
    "blend": "weighted_sum",
    "combine": "add_scaled",
    "each": "map_values",
    "length": "vector_norm",
    "minus": "sub",
    "scaled": "scale_tensors",
    "times": "mul",
    "total": "dot",
}


def __getattr__(name: str) -> Any:
    """Return a function by its former name; warns of the name of today."""
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = _FORMER[name]
    warnings.warn(f"{__name__}.{name} is now {__name__}.{now}", DeprecationWarning, stacklevel=2)
    return globals()[now]


def per_image(numbers: Tensor, like: Tensor) -> Tensor:
    """Return one number for each image (B,) in a shape that goes with the images' (B, ...)."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))
