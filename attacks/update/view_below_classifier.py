"""Cuts a view off below its classifier: what flows back into a linear layer stands in the update itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attacks.network.linear_layers import VectorLayer, vector_layers
from attacks.network.network_parts import network_below
from attacks.network.operation_trace import MODEL_ERRORS
from attacks.result import NotApplicable
from attacks.update.earlier_rounds import with_history
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.step_gradient import single_step_obstacle
from fl.method import Method, Step
from fl.network import Network, call_with
from fl.runtime.module_copies import deep_copy
from fl.tensors import Tensors, dense
from fl.types import Batch, Group, Phase, Scope, Task
from fl.view import ServerView

LAYER_SIGNAL = "signal"
"""The payload of a rewritten view that holds `delta` and `features`: read off the update, not sent by the server."""


class _OutputTap:
    """Keeps one module's output and returns it in place of the whole model's."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def keep_output(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.value = output

    def replace_output(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        value, self.value = self.value, None
        return value


def truncate_at(model: nn.Module, layer: str, head: str) -> nn.Module:
    """Return a copy of `model` that returns the output of its module `layer` and has no parameters under `head`.

    The other parameters keep their names.

    Args:
        model: the network.
        layer: name of one of its modules.
        head: prefix of the parameters that are dropped.
    """
    model = deep_copy(model)
    for name, module in list(model.named_modules()):
        if name and f"{name}.".startswith(head) and any(True for _ in module.parameters()):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())
    tap = _OutputTap()
    model.get_submodule(layer).register_forward_hook(tap.keep_output)
    model.register_forward_hook(tap.replace_output)
    return model


@dataclass(frozen=True, kw_only=True)
class LayerSignal(Method):
    """One step on `<delta, output of a linear layer>`: the loss whose gradient is the network's own below that layer.

    Attributes:
        layer: name of the linear layer.
        weight: name of its weight in the update; empty where that is the layer's name and `.weight`.
        bias: likewise.
        ends_there: whether the task's network ends with the layer as it is.
    """

    name = "signal"
    uses_labels = False

    layer: str
    weight: str = ""
    bias: str = ""
    ends_there: bool = False

    def client_model(self, task: Task) -> nn.Module:
        """Return the network up to the layer."""
        return task.model if self.ends_there else truncate_at(task.model, self.layer, task.head)

    def scope(self, name: str, task: Task) -> Scope:
        """Return SHARED for every parameter."""
        return Scope.SHARED

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one step of size 1."""
        return (Phase(groups=(Group(lr=1.0),), steps=1),)

    def landmarks(self) -> tuple[str, ...]:
        """Return the layer's weight, whose update is delta times the layer's input: it says how far that is right."""
        return (self.weight or f"{self.layer}.weight",)

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the layer's outputs (1, out) weighted by the signal that flowed back (out,)."""
        return (network(batch.inputs) * dense(step.received[LAYER_SIGNAL]["delta"])).sum()


def view_below_classifier(view: ServerView, layer: str | None = None) -> ServerView | NotApplicable:
    """Return the view of the network up to a linear layer, without labels, and with earlier rounds on the same image.

    Args:
        view: of one step on one image.
        layer: name of the linear layer; None takes the last one with a bias outside the classifier.

    Returns:
        A view whose method is `LayerSignal`, or why there is none.
    """

    def below(view: ServerView) -> ServerView | NotApplicable:
        return _cut_below_classifier(view, layer)

    cut = below(view)
    return with_history(view, cut, below) if isinstance(cut, ServerView) else cut


def _cut_below_classifier(view: ServerView, layer: str | None) -> ServerView | NotApplicable:
    reason = single_step_obstacle(view)
    if reason is not None:
        return NotApplicable(reason)
    if not view.task.head:
        return NotApplicable(NO_CLASSIFIER, limit=True)
    found = _find_layer(view, layer)
    if found is None:
        return NotApplicable(f"{layer!r} has {NOT_SENT}" if layer else NO_LAYER)
    observed = ObservedUpdate(view)
    gradient = observed.gradient
    if isinstance(gradient, NotApplicable):
        return gradient
    weight, bias = (found.names[kind] for kind in ("weight", "bias"))
    if not {weight, bias} <= gradient.keys() & view.task.parameters.keys():
        return NotApplicable(f"{found.name!r} has {NOT_SENT}")
    if not bool(dense(gradient[bias]).any()):
        return NotApplicable(f"no signal flows back into {found.name!r}: its bias moved by no more than rounding")
    if (reason := observed.altered(bias)) is not None:
        return NotApplicable(reason)
    # a prediction is as small as the signal, and a difference of weights rounded as they are: that would hide it
    signal = observed.before_defense(bias, dense(gradient[bias]))
    gradient, _ = rescale_to_unit({**gradient, LAYER_SIGNAL: signal})
    delta, signal = (found.arrange("bias", dense(value)) for value in (gradient[bias], gradient.pop(LAYER_SIGNAL)))
    features = delta @ found.arrange("weight", dense(gradient[weight])) / (delta @ delta)
    method = LayerSignal(layer=found.name, weight=weight, bias=bias, train_mode=view.method.train_mode)
    if found.node >= 0:
        model = network_below(view, weight)
        if model is None:
            return NotApplicable(f"the network up to {found.name!r} can't be told", limit=True)
        view = replace(view, task=replace(view.task, model=model))
        method = replace(method, ends_there=True)
    return _truncated_view(view, method, gradient, signal, features)


NO_CLASSIFIER = "the network has no linear classifier to cut off: name what stands for it (head)"
NO_LAYER = "no linear layer with a bias outside the classifier is in the update"
NOT_SENT = "no weight and bias of the network in the update"
IS_MODULE = -1
"""Stands for the operation of a layer that runs as a module of its own."""


def _find_layer(view: ServerView, layer: str | None) -> VectorLayer | None:
    """Return the linear layer of this name, or the last one with a bias outside the classifier that was sent.

    A module that runs is cut by its hooks; any other layer is looked for among the operations that the network runs.
    """
    name = layer or _last_linear_below_classifier(view)
    if name is not None and _runs(view, name):
        names = {kind: f"{name}.{kind}" for kind in ("weight", "bias")}
        return VectorLayer(name, names, {}, None, IS_MODULE)
    traced = [found for found in vector_layers(view).layers.values() if set(found.names.values()) <= view.update.keys()]
    if layer is not None:
        return next((found for found in traced if found.name == layer), None)
    below = [found for found in traced if not found.names["weight"].startswith(view.task.head)]
    return below[-1] if below else None


def _runs(view: ServerView, layer: str) -> bool:
    """Return whether the network runs this module of it, rather than functions of the module's weights."""
    model = deep_copy(view.client.fixed_statistics_model)
    if layer not in dict(model.named_modules()):
        return False
    ran: list[str] = []
    model.get_submodule(layer).register_forward_hook(lambda *_: ran.append(layer))
    probe = torch.full((1, *view.task.input_shape), 0.5, dtype=view.dtype, device=view.device)
    with torch.no_grad():
        try:
            model(probe)
        except MODEL_ERRORS:
            return True  # what comes behind it has no weights here
    return bool(ran)


def _last_linear_below_classifier(view: ServerView) -> str | None:
    """Return the last linear layer with a bias outside the classifier whose gradient was sent."""
    found = None
    for name, module in view.task.model.named_modules():
        sent = f"{name}.weight" in view.update and f"{name}.bias" in view.update
        if isinstance(module, nn.Linear) and sent and not f"{name}.".startswith(view.task.head):
            found = name
    return found


def _truncated_view(
    view: ServerView, method: LayerSignal, gradient: Tensors, delta: Tensor, features: Tensor
) -> ServerView | NotApplicable:
    layer, model = method.layer, view.task.model
    if not method.ends_there:
        model = truncate_at(view.client.fixed_statistics_model, layer, view.task.head)
    weights = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    probe = torch.full((1, *view.task.input_shape), 0.5, dtype=view.dtype, device=view.device)
    try:
        output = call_with(model, weights, probe)
    except RuntimeError as error:  # what comes behind the layer takes something else than the layer gives
        return NotApplicable(f"the network does not run up to {layer!r} alone: {error}", limit=True)
    if not isinstance(output, Tensor) or output.numel() != delta.numel() or output.shape[:1] != (1,):
        return NotApplicable(f"{layer!r} sees more than one input per image", limit=True)
    grads = torch.autograd.grad(output.sum(), list(weights.values()), allow_unused=True)
    below = [n for n, g in zip(weights, grads, strict=True) if g is not None]
    buffers = dict(model.named_buffers())
    return replace(
        view,
        method=method,
        defense=view.defense.with_unknown_scale(),
        shared={n: v for n, v in view.shared.items() if n in weights and n in view.task.parameters},
        update={n: gradient[n] for n in below if n in gradient},
        private={n: shape for n, shape in view.private.items() if n in weights or n in buffers},
        private_init=None,
        schedule=(((1,),),),
        order=None,
        draws=None,
        buffers={n: v for n, v in view.buffers.items() if n in buffers},
        scale_unknown=False,  # the signal has the update's own factor
        received={LAYER_SIGNAL: {"delta": delta, "features": features}},
        history=(),
    )
