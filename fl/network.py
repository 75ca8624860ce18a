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
        """Logits (B, K), or whatever the module returns.

        Raises:
            RuntimeError: names the tensors that are missing, or that the module does not have.
        """
        layout = _LAYOUTS.get(self.model) or _LAYOUTS.setdefault(self.model, _Layout.of(self.model))
        given = {**layout.constants(self.model), **self.weights, **self.buffers}
        if layout.tied or given.keys() != layout.names:
            given = {**frozen(self.model), **self.weights, **self.buffers}
            return functional_call(self.model, given, inputs, strict=True)
        return functional_call(self.model, given, inputs, tie_weights=False)


@dataclass(frozen=True)
class _Layout:
    """What a module's tensors are called: to look for them at every call cost a small network a sixth of its time.

    Attributes:
        names: all tensors that a call needs.
        fixed: name of each frozen one, its module's, and what it is called there.
        tied: whether some have more than one name.
    """

    names: frozenset[str]
    fixed: tuple[tuple[str, str, str], ...]
    tied: bool

    @classmethod
    def of(cls, model: nn.Module) -> _Layout:
        held = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        fixed = tuple((name, *name.rpartition(".")[::2]) for name in frozen(model))
        return cls(frozenset(held), fixed, len({id(x) for x in held.values()}) < len(held))

    def constants(self, model: nn.Module) -> dict[str, Tensor]:
        """The frozen tensors as they are now."""
        return {name: getattr(model.get_submodule(owner), own).detach() for name, owner, own in self.fixed}


_LAYOUTS: WeakKeyDictionary[nn.Module, _Layout] = WeakKeyDictionary()
