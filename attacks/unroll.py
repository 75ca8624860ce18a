"""A network as a chain of weighted layers, for attacks that undo it one layer at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attacks.base import NotApplicable
from fl.models.layers import Normalize
from fl.seeds import stream
from fl.tensors import dense
from fl.types import ServerView

WEIGHTED = (nn.Conv2d, nn.Linear)
ACTIVATIONS = (nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.Tanh)
POINTWISE = (nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d, nn.BatchNorm2d, Normalize)
"""Linear maps that move or scale numbers one by one, so that they can be undone."""
BY_HAND = "; write what forward does by itself, such as torch.relu or flatten(1), as modules (nn.ReLU, nn.Flatten)"
POOLING = (nn.AvgPool2d, nn.AdaptiveAvgPool2d)
"""Linear maps that lose numbers."""


@dataclass(frozen=True)
class Stage:
    """A weighted layer with the linear maps around it and the activation above, in float64.

    Attributes:
        name: of the layer, as in the update.
        layer: the layer, with the weights that the server sent.
        shape: of what comes in, (C, H, W) or (F,).
        before: linear maps between the activation below and the layer.
        after: linear maps between the layer and its activation.
        activation: above; `nn.Identity` where there is none.
    """

    name: str
    layer: nn.Module
    shape: torch.Size
    before: nn.Sequential = field(default_factory=nn.Sequential)
    after: nn.Sequential = field(default_factory=nn.Sequential)
    activation: nn.Module = field(default_factory=nn.Identity)

    @property
    def pointwise(self) -> bool:
        """Whether what comes in follows from what the layer is given."""
        return all(isinstance(module, POINTWISE) for module in self.before)

    @property
    def taken(self) -> torch.Size:
        """Shape of what the layer is given, which pooling below makes smaller than what comes in."""
        return self.given(self.blank()).shape[1:]

    def given(self, values: Tensor) -> Tensor:
        """What the layer is given, from what comes in (N, *shape)."""
        result: Tensor = self.before(values)
        return result

    def blank(self, count: int = 1) -> Tensor:
        """Zeros that may come in (count, *shape), where the layer's weight is."""
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return weight.new_zeros(count, *self.shape)

    def affine(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Offset and slope (1, ...) of what comes in on its way to the layer; for pointwise maps.

        Max pooling may lie there, too: behind an activation that rises it passes on what that makes of pooled outputs.
        """
        zero = self.blank().to(dtype)
        offset = self.given(zero)
        return offset, self.given(zero + 1) - offset

    def undo(self, given: Tensor) -> Tensor:
        """What comes in, from what the layer is given (N, ...); for pointwise maps."""
        offset, slope = self.affine(given.dtype)
        return ((given - offset) / slope).view(-1, *self.shape)

    def linear(self, given: Tensor) -> Tensor:
        """What the activation is given, from what the layer is given."""
        result: Tensor = self.after(self.layer(given))
        return result


def unroll(
    view: ServerView, *, max_pooling: bool = False, device: torch.device | str = "cpu"
) -> tuple[Stage, ...] | NotApplicable:
    """The network of `view` as stages on `device`, bottom first, or why it is no such chain.

    `max_pooling` lets it stand among the linear maps, for attacks that know what to do with it.

    The order is traced on an image of noise: each module without children must take what the one before it returned,
    flattened or not, and the stages must give every layer what the network gives it.
    """
    model = copy.deepcopy(view.client.predictor).to(device=device, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.padding = _numbers(module)
    known = {**view.shared, **view.buffers}
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name in known:
                value.copy_(dense(known[name]))
    probe = torch.rand(1, *view.task.input_shape, generator=stream(0, "unroll"), dtype=torch.float64).to(device)
    calls = _trace(model, probe)
    if isinstance(calls, NotApplicable):
        return calls
    stages = _stages(calls, max_pooling)
    if isinstance(stages, NotApplicable):
        return stages
    if apart := _apart(stages, calls, probe):
        return NotApplicable(
            f"the network is no plain chain of modules: something happens before {apart}{BY_HAND}", limit=True
        )
    hidden = sorted(
        name
        for name in view.private
        if any(name.startswith(f"{call.name}.") for call in calls) and not name.startswith(view.task.head or "?")
    )
    if hidden:
        return NotApplicable(f"the server does not know {hidden[0]}")
    return stages


def _numbers(conv: nn.Conv2d) -> str | tuple[int, ...]:
    """Padding in numbers of zeros a side, or as it is where both sides differ."""
    if conv.padding == "valid":
        return (0, 0)
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return tuple(r // 2 for r in reach) if conv.padding == "same" and not any(r % 2 for r in reach) else conv.padding


def _apart(stages: Sequence[Stage], calls: Sequence[_Call], probe: Tensor) -> str | None:
    """The first layer that the network gives something else than its stage does, or None."""
    taken, values = {call.name: call.taken for call in calls}, probe
    with torch.no_grad():
        for stage in stages:
            given = stage.given(values)
            if given.shape != taken[stage.name].shape or not torch.allclose(given, taken[stage.name], equal_nan=True):
                return stage.name
            values = stage.activation(stage.linear(given))
    return None


@dataclass(frozen=True)
class _Call:
    name: str
    module: nn.Module
    taken: Tensor
    given: Tensor


def _trace(model: nn.Module, probe: Tensor) -> tuple[_Call, ...] | NotApplicable:
    """The modules without children in the order they run, up to the one that the network returns."""
    calls: list[_Call] = []
    odd: list[str] = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                calls.append(_Call(name, module, args[0], output))
            else:
                odd.append(f"{name} ({type(module).__name__})")

        return hook

    leaves = {name: module for name, module in model.named_modules() if not any(True for _ in module.children())}
    hooks = [module.register_forward_hook(keep(name)) for name, module in leaves.items()]
    try:
        with torch.no_grad():
            returned = model(probe)
    except RuntimeError as error:
        return NotApplicable(f"the network does not run on one image by itself: {error}", limit=True)
    finally:
        for hook in hooks:
            hook.remove()
    if odd:
        other = f"{odd[0]} takes or returns something else than one tensor"
        return NotApplicable(f"the network is no plain chain of modules: {other}", limit=True)
    ends = [i for i, call in enumerate(calls) if call.given is returned]
    if not ends:
        return NotApplicable(f"the network computes something after its last module{BY_HAND}", limit=True)
    calls = calls[: ends[-1] + 1]
    given = probe
    for call in calls:
        if call.taken.data_ptr() != given.data_ptr() or call.taken.numel() != given.numel():
            other = f"{call.name} takes something else than the module before it gives"
            return NotApplicable(f"the network is no plain chain of modules: {other}{BY_HAND}", limit=True)
        given = call.given
    if len({id(call.module) for call in calls}) < len(calls):
        return NotApplicable("a module runs twice, so that its gradients are summed", limit=True)
    return tuple(calls)


def _stages(calls: Sequence[_Call], max_pooling: bool) -> tuple[Stage, ...] | NotApplicable:
    """The calls cut into stages."""
    stages: list[Stage] = []
    pending: list[nn.Module] = []
    shape, closed = calls[0].taken.shape[1:], True
    for before, call in zip([None, *calls], calls, strict=False):
        if before is not None and call.taken.ndim == 2 < before.given.ndim:  # flattened by no module
            pending.append(nn.Flatten())
        reason = None if max_pooling and isinstance(call.module, nn.MaxPool2d) else _refusal(call)
        if reason is not None:
            return NotApplicable(reason, limit=True)
        if isinstance(call.module, WEIGHTED):
            if not closed:
                stages[-1] = replace(stages[-1], after=nn.Sequential(*pending))
                pending, shape = [], call.taken.shape[1:]
            stages.append(Stage(call.name, call.module, shape, nn.Sequential(*pending)))
            pending, closed = [], False
        elif isinstance(call.module, ACTIVATIONS):
            if closed:
                apart = f"no weighted layer stands between the activation {call.name} and the one below"
                return NotApplicable(apart, limit=True)
            stages[-1] = replace(stages[-1], after=nn.Sequential(*pending), activation=call.module)
            pending, shape, closed = [], call.given.shape[1:], True
        else:
            pending.append(call.module)
    if stages and not closed:
        stages[-1] = replace(stages[-1], after=nn.Sequential(*pending))
    return tuple(stages) if stages else NotApplicable("the network has no convolution, no linear layer", limit=True)


def _refusal(call: _Call) -> str | None:
    """Why a module can't be undone, or None."""
    module, name = call.module, f"{call.name} ({type(call.module).__name__})"
    if isinstance(module, nn.MaxPool2d | nn.AdaptiveMaxPool2d):
        return f"{name}: max pooling is not linear and hides which values it took; see the attack cascade"
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return f"{name}: groups, and padding other than as many zeros on both sides, are not handled"
    elif isinstance(module, nn.Linear):
        if call.taken.ndim != 2:
            return f"{name} sees more than one input per image"
    elif isinstance(module, nn.BatchNorm2d):
        if module.training or not module.track_running_stats:
            return f"{name}: batch statistics couple all values of a channel"
    elif not isinstance(module, ACTIVATIONS + POINTWISE + POOLING):
        return f"{name} is neither a linear map nor an activation whose slope follows from its output"
    return None
