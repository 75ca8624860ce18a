"""A module with explicit weights."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.func import functional_call

from fl.types import frozen


@dataclass(frozen=True)
class Network:
    """A module with explicit weights, all but the frozen ones: `network(inputs)` returns its logits."""

    model: nn.Module
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return logits (B, K), or whatever the module returns.

        Raises:
            RuntimeError: names the tensors that are missing, or that the module does not have.
        """
        layout = _LAYOUTS.get(self.model)
        if layout is not None and (constants := layout.constants(self.model)) is not None:
            given = {**constants, **self.weights, **self.buffers}
            if given.keys() == layout.names:
                return functional_call(self.model, given, inputs, tie_weights=False)
        _LAYOUTS[self.model] = _Layout.of(self.model)
        given = {**frozen(self.model), **self.weights, **self.buffers}
        return functional_call(self.model, given, inputs, strict=True)


@dataclass(frozen=True)
class _Layout:
    """What a module's tensors are called: to look for them at every call took tenths of a millisecond.

    Tensors frozen, thawed, replaced or removed after the first call are noticed; modules added are not.

    Attributes:
        names: all tensors that a call needs, every name of those that have several.
        fixed: name of each frozen one, its module's, and what it is called there.
    """

    names: frozenset[str]
    fixed: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(cls, model: nn.Module) -> _Layout:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        fixed = tuple((name, *name.rpartition(".")[::2]) for name in frozen(model))
        return cls(frozenset([*parameters, *buffers]), fixed)

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
