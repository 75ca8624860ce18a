"""What hooks of a method or defense of one's own return, held against what they have to return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
from torch import Tensor, nn

from fl.tensors import Tensors
from fl.types import Batch, Scope

Kind = TypeVar("Kind")


def expect_direction(method: str, found: object, params: Tensors | None) -> Tensors:
    """Return what a method's or a defense's `gradient` made of some parameters.

    Args:
        method: who made it, in words.
        found: tensors by name, in the shapes of the parameters; the others stay where they are.
        params: those that move; None where what is found is recorded alone, and may be anything by name.

    Raises:
        TypeError: it is no mapping.
        ValueError: a name is none of a parameter, or a shape or a type is another.
    """
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{method}: expected gradient() to return tensors by name of a parameter, got {type(found).__name__}"
        )
    if params is None:
        return {**found}
    for name, value in found.items():
        if name not in params:
            raise ValueError(f"{method}: gradient() returned {name!r}, which is no parameter of this step")
        if not hasattr(value, "shape"):
            raise TypeError(f"{method}: expected gradient() to return tensors, got {type(value).__name__} for {name!r}")
        if tuple(value.shape) != tuple(params[name].shape):
            raise ValueError(
                f"{method}: expected gradient() to return {name!r} of shape {tuple(params[name].shape)}, got "
                f"{tuple(value.shape)}"
            )
        if isinstance(value, Tensor) and isinstance(own := params[name], Tensor) and value.dtype != own.dtype:
            raise ValueError(f"{method}: expected gradient() to return {name!r} in {own.dtype}, got {value.dtype}")
    return {**found}


def expect_batch(defense: str, found: object, given: Batch) -> Batch:
    """Return what a defense's `transform_batch` made of a batch.

    Args:
        defense: its name.
        found: a batch, with images where it was given some.
        given: the batch.

    Raises:
        TypeError: it is none.
        ValueError: it has no images, or labels for others.
    """
    if not isinstance(found, Batch):
        raise TypeError(
            f"{defense}: expected transform_batch() to return a Batch(inputs, labels), got {type(found).__name__}"
        )
    if len(found) < min(len(given), 1) or len(found.labels) != len(found.inputs):
        raise ValueError(
            f"{defense}: expected transform_batch() to return images with a label each, got {len(found.inputs)} images "
            f"and {len(found.labels)} labels"
        )
    return found


def expect_network(defense: str, found: object) -> nn.Module:
    """Return the network that a defense's `wrap_model` made.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(found, nn.Module):
        raise TypeError(f"{defense}: expected wrap_model() to return a network, got {type(found).__name__}")
    return found


def expect_scope(method: str, name: str, found: object) -> Scope:
    """Return who holds a tensor, as a method's `scope` says.

    Raises:
        TypeError: it says something else: a word, which is never the same object as a `Scope`, or nothing.
    """
    if not isinstance(found, Scope):
        words = ", ".join(f"Scope.{scope.name}" for scope in Scope)
        got = repr(found) if isinstance(found, str) else type(found).__name__
        raise TypeError(
            f"{method}: expected scope() to return {words} (fl.types), got {got} for {name!r}; "
            "super().scope(name, task) returns what holds for others"
        )
    return found


def expect_tensors(defense: str, hook: str, found: object, given: Tensors) -> Tensors:
    """Return what a hook of a defense made of some tensors, each in the shape in which it was given.

    Args:
        defense: its name.
        hook: that made them.
        found: tensors by name.
        given: that the hook was given, or more.

    Raises:
        TypeError: they are no tensors by name.
        ValueError: a name was not given, or a shape is another.
    """
    if not isinstance(found, Mapping):
        raise TypeError(f"{defense}: expected {hook}() to return tensors by name, got {type(found).__name__}")
    for name, value in found.items():
        if name not in given:
            raise ValueError(f"{defense}: {hook}() returned {name!r}, which it was not given")
        if not hasattr(value, "shape") or isinstance(value, np.ndarray):
            raise TypeError(f"{defense}: expected {hook}() to return tensors, got {type(value).__name__} for {name!r}")
        if tuple(value.shape) != tuple(given[name].shape):
            raise ValueError(
                f"{defense}: expected {hook}() to return {name!r} of shape {tuple(given[name].shape)}, got "
                f"{tuple(value.shape)}"
            )
    return {**found}


def expect_numbers(defense: str, hook: str, found: object, names: Iterable[str]) -> dict[str, float]:
    """Return the numbers that a hook of a defense returned, one for each tensor.

    Raises:
        TypeError: they are no real numbers by name.
        ValueError: that of a tensor is missing.
    """
    if not isinstance(found, Mapping) or not all(isinstance(value, int | float) for value in found.values()):
        got = type(found).__name__
        if isinstance(found, Mapping):
            got = type(next(value for value in found.values() if not isinstance(value, int | float))).__name__
        raise TypeError(f"{defense}: expected {hook}() to return a number by name of each tensor, got {got}")
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"{defense}: expected {hook}() to return a number for each tensor it is given, {missing[0]!r} is missing"
        )
    return {**found}


def expect_made(method: str, hook: str, kind: type[Kind], found: object) -> Kind:
    """Return what a hook of a method returned, which has to be of a kind.

    Raises:
        TypeError: it is none of that kind.
    """
    if not isinstance(found, kind):
        raise TypeError(f"{method}: expected {hook}() to return a {kind.__name__}, got {type(found).__name__}")
    return found
