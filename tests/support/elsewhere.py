"""A device other than the CPU that every machine has: its tensors keep their numbers in the CPU's memory.

What works on it mixes no tensors of two devices and asks no tensor of it for its numpy array. It goes by the name of
`meta`, the one device type that any build of torch has; transforms of functions (`torch.func`) do not work on it.

Example:
    with elsewhere():
        x = torch.ones(3).to(ELSEWHERE)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ELSEWHERE = "meta"
aten = torch.ops.aten
ACROSS = (aten._to_copy, aten.copy_)
"""May take a tensor of another device."""
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""May take indices that lie on the CPU, as on a GPU, for what lies elsewhere, but not the other way round."""
JOINING = (aten.cat, aten.stack)
"""Take no number of another device either, which elsewhere counts as one of Python's."""


@contextmanager
def elsewhere() -> Iterator[None]:
    """Makes `torch.device(ELSEWHERE)` one that computes."""
    with _Making(), _Computing():
        yield


class _Far(Tensor):
    """A tensor that lies elsewhere."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> _Far:
        made = Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=ELSEWHERE,
        )
        made.near = near
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """By these two `Module.to` takes it for a tensor whose type may change."""
        return ["near"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> _Far:
        return _Far(inner["near"])

    def tolist(self) -> Any:
        return self.near.tolist()


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device where it would be done."""
    given = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
    far = [x for x in given if isinstance(x, _Far)]
    packet = func.overloadpacket
    if packet in INDEXING:  # and values
        given = [x for x in (args[0], *args[2:3]) if isinstance(x, Tensor)]
    mixed = any((x.ndim or packet in JOINING) and not isinstance(x, _Far) for x in given)
    if far and mixed and packet not in ACROSS:
        raise RuntimeError(f"expected all tensors on one device, but {func} got some of the CPU and some of another")
    wanted = torch.device(kwargs.get("device") or "cpu").type
    if kwargs.get("generator") is not None and (far or wanted == ELSEWHERE):
        raise RuntimeError("expected a generator of the device, got the CPU's")
    if far and packet is aten.linalg_lstsq and kwargs.get("driver") not in (None, "gels"):
        raise RuntimeError("expected the driver gels, the only one that a GPU has")
    goes = isinstance(args[0], _Far) if packet is aten.copy_ else bool(far)
    if kwargs.get("device") is not None:
        goes = torch.device(kwargs["device"]).type == ELSEWHERE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    made = func(*_mapped(_Far, lambda x: x.near, args), **_mapped(_Far, lambda x: x.near, kwargs))
    if torch.Tag.inplace_view in func.tags:  # its own shape has to change, too
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    changed = {id(x.near): x for x in far}
    return _mapped(Tensor, lambda x: changed[id(x)] if id(x) in changed else _Far(x), made) if goes else made


def _leaves(tree: Any) -> Iterator[Any]:
    """What lists, tuples and dictionaries hold; `torch.utils._pytree` takes longer for it than an operation does."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        yield tree
        return
    for branch in tree:
        yield from _leaves(branch)


def _mapped(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with all leaves of a kind changed."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(kind, change, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_mapped(kind, change, branch) for branch in tree])
    return tree_map_only(kind, change, tree) if isinstance(tree, tuple) else tree


def _places(index: Any) -> Any:
    """An index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(map(_places, index))
    return torch.tensor(index) if isinstance(index, list) else index


class _Computing(TorchDispatchMode):
    """Sees what makes tensors out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Making(TorchFunctionMode):
    """Makes tensors of Python's numbers, which are beyond the other's reach."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == ELSEWHERE:
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(ELSEWHERE)
        if func is Tensor.new_tensor and isinstance(args[0], _Far):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(ELSEWHERE)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _places(args[1]), *args[2:])
        return func(*args, **kwargs)
