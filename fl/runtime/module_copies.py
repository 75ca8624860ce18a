"""Copies of networks, faster than by `copy.deepcopy` alone, also of layers that hold a weight that was computed."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

M = TypeVar("M", bound=nn.Module)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module, in which it keeps nothing of a call."""
COLLECTIONS = (list, dict, set, deque)
CODE = (type, FunctionType, MethodType, ModuleType, partial)
SIMPLE = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
"""Types of values that hold no tensors."""
COPY_ERRORS = (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError, OSError)
"""What `copy.deepcopy` raises of things that can't be copied."""
MAX_DEPTH = 4
"""Collections and objects in each other, at most, in which what was computed is looked for."""


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
    layer, and others may keep features or attention, in attributes or in objects there. What autograd computed can't be
    copied, so the copy's layers forget it after each call.

    Args:
        model: any; never changed.

    Raises:
        ValueError: it keeps something that no copy can be made of (a lock, an open file, a generator); names it.
    """
    finder = _ComputedFinder()
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for name, kept in vars(module).items()
        if name not in OF_EVERY_MODULE
        for value in _tensors_in(kept, finder)
    }
    try:
        result = copy.deepcopy(model, {**_copies_of_empty(model), **computed})
    except COPY_ERRORS as error:
        raise ValueError(
            f"expected a model that copy.deepcopy copies, which fails{_uncopied_part(model)}: {error}; let the model "
            "keep no such thing (locks, open files, loggers and generators may stay outside), or define __deepcopy__"
        ) from error
    for module in result.modules():
        kept = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        if kept and not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_hook(partial(_restore, kept))
    if isinstance(result, torch.jit.ScriptModule):  # which takes no hooks, and is refused by name later
        return result
    forgetting = _Forgetting()
    result.register_forward_pre_hook(forgetting.note, prepend=True)
    result.register_forward_hook(forgetting.forget)  # at the end of all, as a module may read what another keeps
    return result


def forget_kept(module: nn.Module, name: str) -> None:
    """Let a copy's module no longer put back a tensor of this name, as where it becomes a parameter.

    Args:
        module: of a network that `copy_model` made, or a copy of one; changed.
        name: of the attribute.
    """
    for key, hook in list(module._forward_hooks.items()):
        if isinstance(hook, partial) and hook.func is _restore:
            (kept,) = hook.args
            module._forward_hooks[key] = partial(_restore, {n: value for n, value in kept.items() if n != name})


def forget_computed(model: nn.Module) -> None:
    """Let a copy's layers forget what a call computed that did not come to its end, as they do after each that did.

    Args:
        model: a network that `copy_model` made, or a copy of one; of others nothing is known.
    """
    for module in model.modules():
        for hook in list(module._forward_hooks.values()):
            is_own = isinstance(getattr(hook, "__self__", None), _Forgetting)
            if is_own or (isinstance(hook, partial) and hook.func is _restore):
                hook(module, (), None)


def _uncopied_part(model: nn.Module) -> str:
    """Return which attribute of a network's part can't be copied, in words; "" where none fails by itself."""
    for part, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE or isinstance(value, Tensor):
                continue
            try:
                copy.deepcopy(value)
            except COPY_ERRORS:
                where = f" in {part!r}" if part else ""
                return f" for {name!r}{where} ({type(value).__name__})"
    return ""


def _copies_of_empty(model: nn.Module) -> dict[int, Any]:
    """Return copies of the empty collections that its layers hold, as `copy.deepcopy` remembers what it copied."""
    return {
        id(value): type(value)()
        for module in model.modules()
        for value in vars(module).values()
        if type(value) in (dict, OrderedDict, set) and not value
    }


@dataclass(frozen=True)
class _Kept:
    """What an object held, a module or another that one keeps: its attributes, of collections copies.

    Attributes:
        holder: the object; None for a module, which else would lie in a cycle with its hooks and not be freed at once.
        attributes: by name.
    """

    holder: object | None
    attributes: dict[str, Any]

    @classmethod
    def of(cls, holder: object, depth: int = MAX_DEPTH) -> _Kept:
        """Return what an object holds, and what objects in its attributes do, `depth` of them one in another."""
        own = {name: value for name, value in vars(holder).items() if name not in OF_EVERY_MODULE}
        kept = {name: cls._snapshot(value, depth) for name, value in own.items()}
        return cls(None if isinstance(holder, nn.Module) else holder, kept)

    @classmethod
    def _snapshot(cls, value: Any, depth: int) -> Any:
        if isinstance(value, COLLECTIONS):
            return copy.copy(value)
        return cls.of(value, depth - 1) if depth and _is_holder(value) else value

    def restore(self, holder: object, finder: _ComputedFinder) -> None:
        """Put back what the object held, in place of each attribute that holds what autograd computed."""
        now = vars(holder)
        for name in [n for n, value in now.items() if n not in OF_EVERY_MODULE and finder.finds_in(value)]:
            before = self.attributes.get(name)
            if name not in self.attributes:
                del now[name]
            elif not isinstance(before, _Kept):
                now[name] = copy.copy(before) if isinstance(before, COLLECTIONS) else before
            elif _is_holder(now[name]):
                before.restore(now[name], finder)
            else:
                now[name] = before.holder


class _ComputedFinder:
    """Tells whether a value is a tensor that autograd computed, or holds one; it looks at each object once."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def finds_in(self, value: Any, depth: int = MAX_DEPTH) -> bool:
        """Return whether autograd computed a tensor, or one in a collection or an object, `depth` in each other."""
        if isinstance(value, Tensor):
            return value.grad_fn is not None or is_functorch_wrapped_tensor(value)
        if type(value) in SIMPLE or not depth:
            return False
        if id(value) not in self._known:
            self._known[id(value)] = False  # until it is known, as it may hold itself
            self._known[id(value)] = any(self.finds_in(one, depth - 1) for one in _held_by(value))
        return self._known[id(value)]


class _Forgetting:
    """Takes what autograd computed out of the parts of a network after each call, which held something else before.

    What they held is noted before the first call. Copies and what is sent to other processes note it anew, so that
    nothing is copied twice.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] | None = None

    def note(self, network: nn.Module, _args: Any) -> None:
        """Note what the parts hold, before the first call."""
        if self._kept is None:
            self._kept = {name: _Kept.of(part) for name, part in network.named_modules()}

    def forget(self, network: nn.Module, _args: Any, _output: Any) -> None:
        """Put back what the parts held."""
        finder, kept = _ComputedFinder(), self._kept or {}
        for name, part in network.named_modules():
            if name in kept:
                kept[name].restore(part, finder)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forgetting:
        """Return one that has noted nothing."""
        memo[id(self)] = made = _Forgetting()
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process is sent: nothing."""
        return {"_kept": None}


def _held_by(value: Any) -> Iterable[Any]:
    """Return what a collection or an object holds; nothing of anything else."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (*COLLECTIONS, tuple)):
        return value
    return list(vars(value).values()) if _is_holder(value) else ()


def _is_holder(value: Any) -> bool:
    """Return whether a value is an object with attributes of its own, and neither code nor a part of a network."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, *COLLECTIONS, *CODE))


def _tensors_in(value: Any, finder: _ComputedFinder) -> Iterator[Tensor]:
    """Yield a tensor itself, or those in a collection or an object that autograd computed."""
    if isinstance(value, Tensor):
        yield value
    elif finder.finds_in(value):
        for one in _held_by(value):
            yield from _tensors_in(one, finder)


def _restore(kept: dict[str, Tensor], module: nn.Module, _args: Any, _output: Any) -> None:
    """Put tensors back that the call computed."""
    for name, value in kept.items():
        if vars(module).get(name) is not value:
            vars(module)[name] = value
