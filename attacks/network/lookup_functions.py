"""Which rows of a network's parameters functions look up: by ids, or by one-hot vectors that are made of ids.

A one-hot vector times a matrix W (V, d) is the row of its id, and `linear` of it with weights (d, V) is a column. So
the gradient of these is zero in all rows, or columns, but those of ids, as that of an embedding is. A sum or a mean of
one-hot vectors gives a mixture of such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WHOLE = {torch.int64, torch.int32}
PLACES: dict[Callable[..., Any], tuple[int, int]] = {
    nn.functional.embedding: (1, 0),
    nn.functional.embedding_bag: (1, 0),
    torch.embedding: (0, 1),
    Tensor.__getitem__: (0, 1),
    torch.index_select: (0, 2),
    Tensor.index_select: (0, 2),
}
"""At which of their arguments functions that look up rows take weights and ids; `index_select` has its dimension 1."""
MAKES_ONE_HOT = {
    nn.functional.one_hot,
    *PLACES,  # of a unit matrix
    *(torch.scatter, Tensor.scatter, Tensor.scatter_),
    *(torch.eq, Tensor.eq, Tensor.__eq__),
}
"""Functions whose results are looked at: where each row (..., V) has one 1 and else 0, it is one-hot."""
SUMS = {Tensor.sum, torch.sum, Tensor.mean, torch.mean}
KEEPS_ONE_HOT = {
    *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.long, Tensor.int),
    *(Tensor.to, Tensor.type, Tensor.type_as, Tensor.clone, Tensor.contiguous),
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze, Tensor.__getitem__),
    *SUMS,
    *(Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, torch.div, Tensor.__truediv__),
}
"""Functions that leave one-hot vectors, or mixtures of them, in the last dimension."""
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
LINEAR = nn.functional.linear


class LookupFunctions(TorchFunctionMode):
    """Notes which rows of parameters (V, d) functions look up, or columns of those (d, V) that one-hot vectors meet.

    Attributes:
        names: of the parameters, by their identity.
        found: ids that were looked up, as often as they were, by the name of a parameter.
        columns: the parameters whose columns are looked up.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.found, self.columns = names, dict[str, list[Tensor]](), set[str]()
        self._rows = set[str]()
        self._one_hot: dict[int, Tensor] = {}  # kept, so that no other tensor takes their identity
        self._turned: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and note what it looks up."""
        given = kwargs or {}
        self._note_ids(func, args)
        self._note_one_hot(func, args, given)
        result = func(*args, **given)
        if isinstance(result, Tensor):
            self._follow(func, args, given, result)
        return result

    def _note_ids(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Note rows that ids look up, which are columns of a parameter that was turned."""
        weight, ids = PLACES.get(func, (0, 0))
        if weight != ids and max(weight, ids) < len(args) and (known := self._parameter(args[weight])) is not None:
            rows, whole = args[ids], args[1] == 0 if ids == 2 else True
            if whole and args[weight].ndim == 2 and isinstance(rows, Tensor) and rows.dtype in WHOLE:
                self._note(known[0], rows.flatten() % len(args[weight]), turned=known[1])

    def _note_one_hot(self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        """Note rows that one-hot vectors look up: of x @ W, or columns, of `linear`, where W may be turned as well."""
        if func in PRODUCTS:
            vectors, weight = (*args, given.get("other"))[:2]
        elif func is LINEAR:
            vectors, weight = (*args, *(given[key] for key in ("input", "weight") if key in given))[:2]
        else:
            return
        known = self._parameter(weight)
        if known is not None and weight.ndim == 2 and id(vectors) in self._one_hot:
            self._note(known[0], vectors.nonzero()[:, -1], turned=known[1] != (func is LINEAR))

    def _parameter(self, value: object) -> tuple[str, bool] | None:
        """Return the name of the parameter that a tensor is, and whether it is that turned; None for any other."""
        if id(value) in self.names:
            return self.names[id(value)], False
        return (self._turned[id(value)][1], True) if id(value) in self._turned else None

    def _note(self, name: str, ids: Tensor, *, turned: bool) -> None:
        self.found.setdefault(name, []).append(ids)
        (self.columns if turned else self._rows).add(name)

    def _follow(
        self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any], result: Tensor
    ) -> None:
        """Remember a result that is a parameter turned, or one-hot."""
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return
        if id(first) in self.names and _is_turned(first, result):
            self._turned[id(result)] = result, self.names[id(first)]
        kept = func in KEEPS_ONE_HOT and any(id(value) in self._one_hot for value in args[:2])
        summed = func in SUMS and not _keeps_last(args, given)
        if (kept and not summed) or (func in MAKES_ONE_HOT and _is_one_hot(result)):
            self._one_hot[id(result)] = result

    def looked_up(self) -> dict[str, list[Tensor]]:
        """Return what was looked up, without parameters whose rows and columns both were."""
        return {name: ids for name, ids in self.found.items() if not {name} <= self.columns & self._rows}


def _is_turned(value: Tensor, result: Tensor) -> bool:
    """Return whether a result is the transpose of a matrix, in its memory."""
    shared = value.ndim == 2 and result.data_ptr() == value.data_ptr()
    return shared and result.shape == value.shape[::-1] and result.stride() == value.stride()[::-1]


def _keeps_last(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Return whether a sum is taken along other dimensions than the last."""
    along = given.get("dim", args[1] if len(args) > 1 else None)
    dimensions = [along] if isinstance(along, int) else along or range(args[0].ndim)
    return args[0].ndim - 1 not in [dimension % args[0].ndim for dimension in dimensions]


def _is_one_hot(value: Tensor) -> bool:
    """Return whether each row of a tensor (..., V) has one 1 and else 0."""
    if value.ndim < 2 or value.shape[-1] < 2 or not value.numel() or value.is_complex():
        return False
    return bool(((value == 0) | (value == 1)).all() and (value.sum(-1) == 1).all())
