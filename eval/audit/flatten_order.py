"""In which order a model flattens the channels that a linear layer takes, read off one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl.inputs.form import Inputs
from fl.runtime.module_copies import copy_model

LAYERS = ("conv", "pool", "norm")
"""What is in the names of functions that return channels first."""
COLORS = (1, 3, 4)
"""How many channels a picture has."""
Channels = tuple[int, ...] | None


class _Maps(TorchFunctionMode):
    """Keeps feature maps, and of what shape the last layer returned them."""

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.maps, self.shape = [first], first.shape

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and keep what it returns."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.ndim > 2:
            self.maps.append(out)
            if any(word in getattr(func, "__name__", "") for word in LAYERS):
                self.shape = out.shape
        return out


def flattened_channels(
    model: nn.Module, input_shape: Sequence[int] | Inputs | None, weights: Collection[str]
) -> dict[str, Channels]:
    """Return the shape (C, H, W) of what a linear layer's inputs are flattened from, channels first, by its weight.

    Layers that take no such map, or take it with channels last, are left out.

    Args:
        model: in torch.
        input_shape: of one input, where it is known; other inputs tell nothing.
        weights: names of those that are asked for.

    Returns:
        None in place of a shape where nothing tells the order.
    """
    linear = {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight".lstrip(".") in weights
    }
    convolutional = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in model.modules())
    given = input_shape if isinstance(input_shape, Sequence) else ()
    sides = [side for side in given if isinstance(side, int)]
    if not linear or (not convolutional and (len(sides) != 3 or sides[0] == 1)):
        return {}
    if len(sides) < 2 or len(sides) != len(given):
        return _by_width(model, linear)
    if not convolutional and sides[2] in COLORS and sides[0] not in COLORS:
        return {}  # a picture with channels last, as the other frameworks have it
    found: dict[str, Channels] = {}
    copied = copy_model(model).eval()
    like = next(iter(linear.values())).weight
    inputs = torch.rand(1, *sides, generator=torch.Generator().manual_seed(0)).to(like)
    seen = _Maps(inputs)

    def look(weight: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            order = _order(args[0], seen) if args and isinstance(args[0], Tensor) else ()
            if order != ():
                found[weight] = order

        return hook

    modules = dict(copied.named_modules())
    for weight in linear:
        modules[weight.removesuffix("weight").rstrip(".")].register_forward_pre_hook(look(weight))
    try:
        with torch.no_grad(), seen:
            copied(inputs)
    except (RuntimeError, ValueError, TypeError, IndexError):  # another input; what is wrong is said where it is used
        return _by_width(model, linear)
    return found


def _by_width(model: nn.Module, linear: dict[str, nn.Linear]) -> dict[str, Channels]:
    """Return None for layers that are wider than the channels of any convolution and a multiple of one's."""
    channels = {m.out_channels for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    return {
        weight: None
        for weight, layer in linear.items()
        if any(1 < count < layer.in_features and layer.in_features % count == 0 for count in channels)
    }


def _order(taken: Tensor, seen: _Maps) -> Channels | tuple[()]:
    """Return the shape of the map that was flattened channels first; () where it makes no difference or was last."""
    if taken.ndim != 2:
        return ()
    channels, *sides = seen.shape[1:]
    if taken.numel() != seen.shape.numel() or channels == 1 or all(side == 1 for side in sides):
        return ()
    maps = [one for one in seen.maps if one.shape == seen.shape]
    first = any(torch.equal(one.flatten(), taken.flatten()) for one in maps)
    last = any(torch.equal(one.movedim(1, -1).flatten(), taken.flatten()) for one in maps)
    if first != last:
        return (channels, *sides) if first else ()
    return None
