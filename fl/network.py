"""A module with explicit weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.func import functional_call

from fl.runtime.gradient_checkpoints import without_checkpoints
from fl.runtime.module_copies import forget_computed
from fl.types import frozen


@dataclass(frozen=True)
class Network:
    """A module with explicit weights, all but the frozen ones: `network(inputs)` returns its logits.

    Attributes:
        model: the module.
        weights: by name.
        buffers: likewise.
        writes: whether what modules write into buffers when they run stays there, as spectral norm's vectors do in
            training mode; else every call begins with them as they were given.
    """

    model: nn.Module
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    writes: bool = True

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return logits (B, K), or whatever the module returns.

        Raises:
            RuntimeError: names the tensors that are missing, or that the module does not have.
        """
        buffers = self.buffers if self.writes else {name: value.clone() for name, value in self.buffers.items()}
        layout = _LAYOUTS.get(self.model)
        given = None if layout is None else layout.complete(self.model, {**self.weights, **buffers})
        if given is None:
            layout = _LAYOUTS[self.model] = _Layout.of(self.model)
            given = layout.complete(self.model, {**self.weights, **buffers})
        with without_checkpoints(), _forgotten_if_ended(self.model):
            if given is not None:
                return functional_call(self.model, given, inputs, tie_weights=False)
            given = {**frozen(self.model), **self.weights, **buffers}
            return functional_call(self.model, given, inputs, strict=True)


@dataclass(frozen=True)
class _Layout:
    """What a module's tensors are called: to look for them at every call took tenths of a millisecond.

    Tensors frozen, thawed, replaced or removed after the first call are noticed; modules added are not.

    A module that has several names counts by its first: swapped by each of them, torch would not put its own tensors
    back (seen with torch 2.15).

    Attributes:
        names: all tensors that a call needs, every name of those that several modules share.
        fixed: name of each frozen one, its module's, and what it is called there.
        ties: the first name of each tensor that has a further one, by the further one.
    """

    names: frozenset[str]
    fixed: tuple[tuple[str, str, str], ...]
    ties: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> _Layout:
        tensors: dict[str, Tensor] = {}
        for owner, module in model.named_modules():
            for kind in (module.named_parameters, module.named_buffers):
                tensors |= kind(owner, recurse=False, remove_duplicate=False)
        first = {id(value): name for name, value in reversed(tensors.items())}
        ties = tuple((name, first[id(value)]) for name, value in tensors.items() if first[id(value)] != name)
        fixed = tuple((name, *name.rpartition(".")[::2]) for name in frozen(model))
        return cls(frozenset(tensors), fixed, ties)

    def complete(self, model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return all tensors that a call of the model needs, or None where those given are others."""
        constants = self.constants(model)
        if constants is None:
            return None
        given = {**constants, **given}
        given |= {name: given[first] for name, first in self.ties if first in given and name not in given}
        return given if given.keys() == self.names else None

    def constants(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return the frozen tensors as they are now, or None where they are others."""
        found = {}
        for name, owner, own in self.fixed:
            value = getattr(model.get_submodule(owner), own, None)
            if not isinstance(value, Tensor) or (isinstance(value, nn.Parameter) and value.requires_grad):
                return None
            found[name] = value.detach()
        return found


_LAYOUTS: WeakKeyDictionary[nn.Module, _Layout] = WeakKeyDictionary()


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], *inputs: Tensor) -> Any:
    """Return what a module returns with some tensors in place of its own, which it has again afterwards.

    Args:
        model: the module; its modules may have several names each.
        tensors: parameters and buffers by their first names; the others stay as they are.
        inputs: what it is given.
    """
    ties = _Layout.of(model).ties
    given = {**tensors, **{name: tensors[first] for name, first in ties if first in tensors and name not in tensors}}
    with _forgotten_if_ended(model):
        return functional_call(model, given, inputs, tie_weights=False)


@contextmanager
def _forgotten_if_ended(model: nn.Module) -> Iterator[None]:
    """Let a network keep nothing of a call that ends in its midst, at a time limit say: else it can't be copied."""
    try:
        yield
    except BaseException:
        forget_computed(model)
        raise
