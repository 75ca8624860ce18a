"""Networks run in double precision though their forward fixes single precision.

`x.float()`, `torch.zeros(...)` for a hidden state or a matrix of float32 kept as a plain attribute are right in the
precision that a client trains in. In a copy of the network whose weights are float64 they fail, or round in between.
Such a copy runs under a mode in which nothing falls from double to single precision: see `KeepDouble`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fl.runtime.user_code import RUN_ERRORS

SINGLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
"""Types in single precision, and those that stand for them."""
HALF = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.complex32: torch.complex128}
"""Types of lower precision, and those in which their numbers meet others in double precision."""
RAISED = SINGLE | HALF
DOUBLE = frozenset(RAISED.values())
CASTS = {"float": "double", "cfloat": "cdouble"}
"""Methods of a tensor that bring it to single precision, and those that stand for them."""
TYPE_NAME = re.compile(r"(?<=\.)FloatTensor")
"""A type as the method `type` takes it, by its name."""
FILLED = frozenset(
    f"{start}{kind}{end}"
    for kind in ("zeros", "ones", "empty", "full")
    for start, end in (("", ""), ("", "_like"), ("new_", ""))
)
"""Functions whose results are often written into, and hold the same numbers in any precision."""
MAX_DIFFERENCE = 1e-2
"""What the outputs of a network may differ by in double precision, relative to the largest: half precision in it rounds
by a thousandth, a network that is another one differs by more."""
WAY_ON = (
    "write forward so that what it makes has the type of its input or weights (x.new_zeros(...), dtype=x.dtype, "
    "register_buffer for constants), give a model of standard layers that computes the same, or try a search, which "
    "computes in the network's own precision: ig"
)

ROUNDED = (
    "the network rounds its numbers to those that integers can hold ({}, as prepare_qat puts there), by an operation "
    "that PyTorch has in single precision alone, and this is computed in double (float64); try a search, which "
    "computes in the network's own precision: ig"
)
"""What is said of a network that is trained for quantization and does not run in double precision."""


class PrecisionError(RuntimeError):
    """A network does not run in double precision, though it does in its own; says why and what to do."""


class KeepDouble(TorchFunctionMode):
    """A mode in which nothing falls from double to single precision.

    - Where a function takes a tensor in double precision, its other tensors become so, and so does a type that it is
      told to return. Half precision that is asked for is given: a client rounds likewise.
    - What depends on no such tensor is computed as the client computes it: constants keep their last digit.
    - Constants of one number are made in double precision, so that results can be written into them. Others that the
      network itself made become so when such numbers are written into them.

    Functions that see tensors in double precision alone are left as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in {"__get__", "__set__"}:
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.dtype in DOUBLE for leaf in leaves):
            return self._note_made(name, leaves, func(*args, **kwargs))
        if _writes(name):
            self._widen(name, args[0])
        if isinstance(kwargs.get("out"), Tensor):
            self._widen(name, kwargs["out"])
        args, kwargs = pytree.tree_unflatten([_raised(leaf) for leaf in leaves], spec)
        if name in CASTS and isinstance(args[0], Tensor):
            return getattr(args[0], CASTS[name])(*args[1:], **kwargs)
        if name == "type" and len(args) > 1:
            args = (args[0], _raised_type(args[1]))
        return func(*args, **kwargs)

    def _note_made(self, name: str, taken: list[Any], made: Any) -> Any:
        if isinstance(made, Tensor) and made.dtype in RAISED:
            if name in FILLED and made.dtype in SINGLE:
                return made.to(SINGLE[made.dtype])
            if not any(made is leaf for leaf in taken):
                self._made[made] = True
        return made

    def _widen(self, name: str, target: object) -> None:
        """Bring a tensor that is about to be written into to double precision."""
        if not isinstance(target, Tensor) or target.dtype not in RAISED:
            return
        if target not in self._made or target._is_view():
            raise RuntimeError(f"{name} writes numbers of torch.float64 into a tensor of {target.dtype}")
        target.data = target.data.to(RAISED[target.dtype])


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument: `add_`, `__setitem__`, `__iadd__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"})
    return name.endswith("_")


def _raised(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return SINGLE.get(leaf, leaf)
    return leaf.to(RAISED[leaf.dtype]) if isinstance(leaf, Tensor) and leaf.dtype in RAISED else leaf


def _raised_type(given: Any) -> Any:
    """Return what the method `type` was given: a type as it is, a class of tensors by its name, raised."""
    if isinstance(given, torch.dtype):
        return given
    name = given if isinstance(given, str) else f"{given.__module__}.{given.__name__}"
    return TYPE_NAME.sub("DoubleTensor", name)


class _Before:
    """Comes before a network's own class, and stays there in copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made, (first, own) = type(self), type(self).__bases__
        object.__setattr__(self, "__class__", own)  # which may have a way of its own to copy it, as torch.fx has
        try:
            copied: nn.Module = copy.deepcopy(self, memo)  # type: ignore[assignment]
        finally:
            object.__setattr__(self, "__class__", made)
        _put_before(first, copied, refusal=getattr(made, "refusal", ""))
        return copied


class _InDouble(_Before):
    """A network whose calls on tensors in double precision keep it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _takes_double((*args, *kwargs.values())):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with KeepDouble():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _NotInDouble(_Before):
    """A network that does not run in double precision."""

    refusal: ClassVar[str] = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _takes_double((*args, *kwargs.values())):
            raise PrecisionError(self.refusal)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _takes_double(given: tuple[Any, ...]) -> bool:
    return any(_is_of(value, DOUBLE) for value in given)


@dataclass(frozen=True)
class DoubleForm:
    """How a network runs in double precision.

    Attributes:
        fixes_single: whether its forward fixes single precision, so that it has to run under `KeepDouble`.
        refusal: why it does not run at all; "" where it does.
    """

    fixes_single: bool = False
    refusal: str = ""

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the network, in double precision, so that it runs: the same object, its tensors by the same names."""
        if self.refusal:
            _put_before(_NotInDouble, model, refusal=self.refusal)
        elif self.fixes_single:
            _put_before(_InDouble, model)
        return model


def _put_before(first: type, model: nn.Module, refusal: str = "") -> None:
    own = type(model)
    if issubclass(own, _Before):
        return
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    object.__setattr__(model, "__class__", type(own.__name__, (first, own), {**names, "refusal": refusal}))


class _Lowered(TorchDispatchMode):
    """Notes whether an operation returns single precision of what it is given in double."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen and any(_is_of(leaf, SINGLE) for leaf in pytree.tree_leaves(result)):
            self.seen = any(_is_of(leaf, DOUBLE) for leaf in pytree.tree_leaves((args, kwargs or {})))
        return result


def _is_of(leaf: Any, types: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in types


def double_form(model: nn.Module, images: Tensor) -> DoubleForm | None:
    """Return how a network runs in double precision, by trying it; None where it runs in no precision.

    Args:
        model: in the client's precision; it is left as it is.
        images: (B, C, H, W), which it takes.
    """
    like = next((value for value in model.parameters() if value.is_floating_point()), images)
    images = images.to(like)
    with _same_draws(images), torch.no_grad(), _Lowered() as lowered:  # type: ignore[no-untyped-call]
        try:
            copy.deepcopy(model).double()(images.double())
            if not lowered.seen:
                return DoubleForm()
            runs = True
        except RUN_ERRORS:
            runs = False
    try:
        own = _run(copy.deepcopy(model), images)
    except RUN_ERRORS:
        return None
    try:
        kept = _run(DoubleForm(fixes_single=True).apply(copy.deepcopy(model).double()), images.double())
    except RUN_ERRORS as error:
        said = _in_a_line(error)
    else:
        said = _difference(kept, own)
        if not said:
            return DoubleForm(fixes_single=True)
    if runs:
        return DoubleForm()
    rounding = [name for name, module in model.named_modules() if _rounds_to_integers(module)]
    return DoubleForm(refusal=ROUNDED.format(repr(rounding[0])) if rounding else refusal_of(said))


def _rounds_to_integers(module: nn.Module) -> bool:
    """Return whether a module simulates integers, as PyTorch's quantization-aware training has them."""
    return any(kind.__name__ == "FakeQuantizeBase" for kind in type(module).__mro__)


def _same_draws(images: Tensor) -> AbstractContextManager[None]:
    """Return the context in which random numbers are drawn from the state of now, on the images' device as well."""
    return torch.random.fork_rng(devices=[images.device] if images.device.type == "cuda" else [])


def _in_a_line(error: Exception) -> str:
    """Return what an error says; of one that TorchScript wraps, the last line."""
    lines = str(error).strip().splitlines()
    if lines and "TorchScript" in lines[0]:
        return lines[-1]
    return ": ".join([type(error).__name__, *lines[:1]])


def refusal_of(said: str) -> str:
    """Return why a network is refused that does not run in double precision.

    Args:
        said: what happens where it is tried.
    """
    return (
        f"the network does not run in double precision (float64), in which this is computed, though it does in its "
        f"own ({said}); {WAY_ON}"
    )


def _run(model: nn.Module, images: Tensor) -> Any:
    """Return what a network returns, where its gradient can be taken, too."""
    with _same_draws(images), torch.enable_grad():
        returned = model(images)
        if isinstance(returned, Tensor) and returned.requires_grad:
            trained = [value for value in model.parameters() if value.requires_grad]
            torch.autograd.grad(returned.square().sum(), trained, allow_unused=True)
    return returned.detach() if isinstance(returned, Tensor) else returned


def _difference(kept: Any, own: Any) -> str:
    """Return what sets outputs in double precision apart from a network's own, but for rounding; "" for nothing.

    Of what is no tensor nothing is asked.
    """
    if not isinstance(kept, Tensor) or not isinstance(own, Tensor):
        return ""
    if kept.dtype not in DOUBLE:
        return f"it returns numbers of {kept.dtype} whatever it is given"
    size = float(own.abs().max()) if own.numel() else 0.0
    near = kept.shape == own.shape and torch.allclose(
        kept, own.to(kept.dtype), rtol=0.0, atol=MAX_DIFFERENCE * size, equal_nan=True
    )
    return "" if near else "it returns something else than in its own precision"
