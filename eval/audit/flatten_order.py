"""In which order a model flattens the channels that a linear layer takes, read off one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl.inputs.form import Inputs
from fl.runtime.module_copies import copy_model
from fl.runtime.user_code import RUN_ERRORS

CHANNELS_FIRST = ("conv", "pool", "batch_norm", "group_norm", "instance_norm")
"""What is in the names of functions that return channels first."""
MIXING = ("linear", "matmul", "mm", "einsum")
"""What is in the names of functions behind which no order of channels is left."""
COLORS = (1, 3, 4)
"""How many channels a picture has."""
Channels = tuple[int, ...] | None


class _FlattenWatch(TorchFunctionMode):
    """Finds what linear layers take in one forward pass of one example.

    Attributes:
        maps: feature maps of the pass.
        shape: of what the last layer with channels first returned.
        flattened: vectors that were made of whole maps, by their ids.
        orders: what was found, by the name of a weight: as of `_order`.
    """

    def __init__(self, inputs: Tensor, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.maps, self.shape = [inputs], inputs.shape
        self.flattened: dict[int, Tensor] = {}
        self.orders: dict[str, Channels | tuple[()]] = {}
        self._names = {id(weight): name for name, weight in weights.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and keep what it returns."""
        given = list(_tensors((*args, *(kwargs or {}).values())))
        called = getattr(func, "__name__", "")
        if called == "linear" and len(given) > 1 and id(given[1]) in self._names:
            self.orders.setdefault(self._names[id(given[1])], self._order(given[0]))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._keep(called, given, out)
        return out

    def _keep(self, called: str, given: Sequence[Tensor], out: Tensor) -> None:
        if out.ndim > 2:
            self.maps.append(out)
            if any(word in called for word in CHANNELS_FIRST):
                self.shape = out.shape
        if _is_vector(out) and not any(word in called for word in MIXING):
            whole = (one for one in given if one.numel() <= out.numel())  # a mean is of fewer numbers than its map
            if any(id(one) in self.flattened or _has_channels(one) for one in whole):
                self.flattened[id(out)] = out

    def _order(self, taken: Tensor) -> Channels | tuple[()]:
        """Return the shape of the map that was flattened channels first; () where it makes no difference or was last.

        Args:
            taken: what a linear layer is given.

        Returns:
            None where nothing tells.
        """
        if id(taken) not in self.flattened:
            return ()
        flat, sides = taken.flatten(), self.shape[2:]
        alike = [one for one in self.maps if one.numel() == taken.numel()]
        maps = [one for one in alike if one.shape[2:] == sides]
        turned = [one for one in alike if one.shape[1:-1] == sides != one.shape[2:]]
        first = [one.shape[1:] for one in maps if torch.equal(one.flatten(), flat)]
        last = any(torch.equal(one.flatten(), flat) for one in (*turned, *(one.movedim(1, -1) for one in maps)))
        if bool(first) != last:
            return tuple(first[0]) if first else ()
        return None


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among a function's arguments, and of lists those inside."""
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from (part for part in one if isinstance(part, Tensor))


def _is_vector(value: Tensor) -> bool:
    """Return whether a tensor of one example has one side alone."""
    return value.ndim > 0 and value.numel() == value.shape[-1]


def _has_channels(value: Tensor) -> bool:
    """Return whether a map of one example (1, C, ...) has several channels, and several numbers of each."""
    return value.ndim > 2 and 1 < value.shape[1] < value.numel()


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
    linear = {name: layer for name, layer in _linear_layers(model).items() if name in weights}
    convolutional = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in model.modules())
    given = input_shape if isinstance(input_shape, Sequence) else ()
    sides = [side for side in given if isinstance(side, int)]
    if not linear or (not convolutional and not 1 < len(sides) < 4) or (not convolutional and sides[0] == 1):
        return {}
    if len(sides) < 2 or len(sides) != len(given):
        return _by_width(model, linear)
    if not convolutional and len(sides) == 3 and sides[2] in COLORS and sides[0] not in COLORS:
        return {}  # a picture with channels last, as the other frameworks have it
    orders = _watch_orders(model, sides, linear)
    unseen = {name: layer for name, layer in linear.items() if name not in orders}
    found = _by_width(model, unseen) | {name: order for name, order in orders.items() if order != ()}
    # without a convolution nothing tells a series (channels first, as here) from a table (rows first)
    return found if convolutional or len(sides) == 3 else dict.fromkeys(found)


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return a model's linear layers by the names of their weights, without those inside attention."""
    return {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    }


def _watch_orders(
    model: nn.Module, sides: Sequence[int], linear: Mapping[str, nn.Linear]
) -> Mapping[str, Channels | tuple[()]]:
    """Return what layers take, by their weights; nothing where the model does not run on inputs of such sides."""
    copied = copy_model(model).eval()
    like = next(iter(linear.values())).weight
    inputs = torch.rand(1, *sides, generator=torch.Generator().manual_seed(0)).to(like)
    watch = _FlattenWatch(inputs, {name: copied.get_parameter(name) for name in linear})
    try:
        with torch.no_grad(), watch:
            copied(inputs)
    except RUN_ERRORS:  # another input; what is wrong is said where it is used
        return {}
    return watch.orders


def _by_width(model: nn.Module, linear: Mapping[str, nn.Linear]) -> dict[str, Channels]:
    """Return None for layers that are wider than the channels of any convolution and a multiple of one's."""
    channels = {m.out_channels for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    return {
        weight: None
        for weight, layer in linear.items()
        if any(1 < count < layer.in_features and layer.in_features % count == 0 for count in channels)
    }
