"""Copies of networks, faster than by `copy.deepcopy` alone, also of layers that hold a weight that was computed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
TORCH_LAYERS = "torch.nn."
"""Where layers are defined that keep nothing of a call."""


def deep_copy(model: M) -> M:
    """Return what `copy.deepcopy` returns, in about half the time.

    A layer holds a dozen dictionaries of hooks, most of them empty, and `copy.deepcopy` takes longer over those than
    over the weights of a small network.

    Args:
        model: any; never changed.
    """
    return copy.deepcopy(model, _copies_of_empty(model))


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a network that can be copied again, whatever it has computed.

    `torch.nn.utils.weight_norm` and `spectral_norm` compute a layer's weight anew before every call and keep it in the
    layer, and modules of a user's own may keep features or attention. What autograd computed can't be copied, so the
    copy's layers forget it after each call.

    Args:
        model: any; never changed.
    """
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for kept in vars(module).values()
        for value in _tensors_in(kept)
    }
    result = copy.deepcopy(model, {**_copies_of_empty(model), **computed})
    for module in result.modules():
        kept = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        if kept:
            module.register_forward_hook(_restore_hook(kept))
    own = {name: part for name, part in result.named_modules() if not type(part).__module__.startswith(TORCH_LAYERS)}
    if own:  # at the end of all, as a module may read what another keeps
        result.register_forward_hook(_forget_hook({name: _plain_attributes(part) for name, part in own.items()}))
    return result


def _copies_of_empty(model: nn.Module) -> dict[int, Any]:
    """Return copies of the empty collections that its layers hold, as `copy.deepcopy` remembers what it copied."""
    return {
        id(value): type(value)()
        for module in model.modules()
        for value in vars(module).values()
        if type(value) in (dict, OrderedDict, set) and not value
    }


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module's class keeps in it, by name, of lists and dictionaries a copy."""
    kept = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: copy.copy(value) if isinstance(value, list | dict) else value for name, value in kept.items()}


def _forget_hook(kept: dict[str, dict[str, Any]]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that takes what autograd computed out of the parts of a network, which held something else before.

    It is that of any copy of the network: parts go by their names.
    """

    def forget(network: nn.Module, _args: Any, _output: Any) -> None:
        parts = dict(network.named_modules())
        for part, before in kept.items():
            now: dict[str, Any] = parts[part].__dict__ if part in parts else {}
            for name in [name for name, value in now.items() if not name.startswith("_") and _is_computed(value)]:
                if name in before:
                    value = before[name]
                    now[name] = copy.copy(value) if isinstance(value, list | dict) else value
                else:
                    del now[name]

    return forget


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a tensor itself, or those in a list or dictionary that autograd computed."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple, dict) and _is_computed(value):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _is_computed(value: Any) -> bool:
    """Return whether autograd computed a tensor, or one in a list or dictionary."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if isinstance(value, dict):
        return any(map(_is_computed, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_computed, value))


def _restore_hook(kept: dict[str, Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that puts tensors back that the call computed."""

    def restore(module: nn.Module, _args: Any, _output: Any) -> None:
        for name, value in kept.items():
            if vars(module).get(name) is not value:
                vars(module)[name] = value

    return restore
