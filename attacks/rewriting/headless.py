"""Gradient matching without the classifier: what flows back into the last linear layer is in the update itself."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attacks.base import NotApplicable, Reconstruction, ViewAttack, attacks
from attacks.update.earlier_rounds import with_past
from attacks.update.rescaling import in_unit
from attacks.update.training_phases import rescaled, training
from attacks.update.update_rule import SIGNS, signs_only
from fl.defense import overrides
from fl.local.weight_decay import decay_shares, without_decay
from fl.method import Method, Step
from fl.network import Network
from fl.parametrization import Parametrisation
from fl.tensors import Tensors, Value, dense
from fl.types import Batch, Group, Phase, Scope, ServerView, Task

SIGNAL = "signal"
"""The payload of a rewritten view that holds `delta` and `features`: read off the update, not sent by the server."""


class _Tap:
    """Keeps one module's output and gives it back in place of the whole model's."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.value = output

    def give(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        value, self.value = self.value, None
        return value


def tapped(model: nn.Module, layer: str, head: str) -> nn.Module:
    """A copy of `model` that returns the output of its module `layer` and has no parameters under `head`.

    The other parameters keep their names.
    """
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if name and f"{name}.".startswith(head) and any(True for _ in module.parameters()):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())
    tap = _Tap()
    model.get_submodule(layer).register_forward_hook(tap.keep)
    model.register_forward_hook(tap.give)
    return model


@dataclass(frozen=True, kw_only=True)
class Signal(Method):
    """One step on `<delta, output of a linear layer>`: the loss whose gradient is the network's own below that layer.

    Attributes:
        layer: name of the linear layer.
    """

    name = "signal"
    uses_labels = False

    layer: str

    def client_model(self, task: Task) -> nn.Module:
        """The network up to the layer."""
        return tapped(task.model, self.layer, task.head)

    def scope(self, name: str, task: Task) -> Scope:
        """All there is of it is shared."""
        return Scope.SHARED

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """One step of size 1."""
        return (Phase(groups=(Group(lr=1.0),), steps=1),)

    def landmarks(self) -> tuple[str, ...]:
        """The layer's weight: its update is delta times the layer's input, so it says how far that input is right."""
        return (f"{self.layer}.weight",)

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """The layer's outputs (1, out) weighted by the signal that flowed back (out,)."""
        return (network(batch.inputs) * dense(step.received[SIGNAL]["delta"])).sum()


@attacks.register("headless")
@dataclass(frozen=True, kw_only=True)
class Headless(ViewAttack):
    """Cuts off everything above the extractor's last linear layer; for one step on one image.

    The layer's bias gradient is delta = dL/d(output), exactly what flows back into the layers below, and its weight
    gradient delta z^T gives its input z = gW^T delta / |delta|^2 (in the update's own factor of step size and
    clipping). So the gradient of <delta, output(x)> with respect to every parameter below equals the observed one at
    the true image: classifier, label and loss drop out of the search.

    Threat model: an honest-but-curious server that sees one client's update and knows that it was one step on one
    image; neither classifier, label nor loss need be known, only the layers below.

    Attributes:
        layer: name of the linear layer; None takes the last one with a bias outside the classifier.
    """

    plain: ClassVar[str] = "cuts off the classifier: reads from the update what the last layer below it was given."

    layer: str | None = None

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """The view of the network up to the layer, without labels, and with earlier rounds on the same image."""
        easier = self._rewrite(view)
        return with_past(view, easier, self._rewrite) if isinstance(easier, ServerView) else easier

    def _rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        reason = obstacle(view)
        if reason is not None:
            return NotApplicable(reason)
        layer = self.layer or _last_linear(view)
        if layer is None:
            return NotApplicable("no linear layer with a bias outside the classifier is in the update")
        gradient = one_gradient(view)
        if isinstance(gradient, NotApplicable):
            return gradient
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        if not {weight, bias} <= gradient.keys() & view.task.parameters.keys():
            return NotApplicable(f"{layer!r} has no weight and bias of the network in the update")
        delta = dense(gradient[bias])
        if not bool(delta.any()):
            return NotApplicable(f"no signal flows back into {layer!r}: its bias moved by no more than rounding")
        # a prediction is as small as the signal, and a difference of weights rounded as they are: that would hide it
        gradient, _ = in_unit({**gradient, SIGNAL: undefended(view, bias, delta)})
        delta, signal = dense(gradient[bias]), dense(gradient.pop(SIGNAL))
        features = delta @ dense(gradient[weight]) / (delta @ delta)
        return _cut(view, layer, gradient, signal, features)

    def unwrap(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """The result, with the layer's input under `features`, and the label where the classifier's update tells it."""
        from attacks.labels.assignment import single  # which asks this module what a client steps along

        private = {**result.private, "features": rewritten.received[SIGNAL]["features"]}
        known = () if view.labels is None or "labels" in result.knowledge else ("labels",)
        labels, note = single(view)
        notes = "; ".join(filter(None, (result.note, note)))
        return replace(result, private=private, labels=labels, note=notes, knowledge=(*result.knowledge, *known))


def astray(view: ServerView) -> str | None:
    """That the client steps along something else than the gradient of its method's loss, or None if it does not."""
    _, schedule = training(view)
    if view.method.plain_gradient(None if schedule is None else sum(map(len, schedule))):
        return None
    why = f": {view.method.detour}" if view.method.detour else ""
    return f"{view.method.name} does not step along the gradient of its loss alone{why}"


def obstacle(view: ServerView, *, batches: bool = False) -> str | None:
    """Why the classifier can't be cut off, or None; `batches` are left to an attack that tells their images apart."""
    if not view.update:
        return "nothing is shared"
    if (reason := astray(view)) is not None:
        return reason
    if type(view.method.parametrisation) is not Parametrisation:
        return "the network's weights are generated: peel it first"
    if overrides(view.defense, "wrap_model"):
        return f"the defence {view.defense.name} puts layers of its own into the network"
    if not view.task.head:
        return "the network has no classifier to cut off"
    steps = [step for steps in training(view)[1] or () for step in steps]
    if len(steps) != 1:
        several = "it takes one local step: where several are short, `first-step` works out the first"
        return several if view.schedule is not None else "the number of local steps is unknown"
    if sum(steps[0]) != 1 and not batches:
        return "it takes a batch of one: the signals of several images are summed in the bias gradient"
    if view.batch_size not in {None, sum(steps[0])}:
        one = "one image" if not batches else "as many images as the step's batch has"
        return f"it takes a client of {one}: which of {view.batch_size} the one step was on is unknown"
    return None


def _last_linear(view: ServerView) -> str | None:
    """The last linear layer with a bias outside the classifier whose gradient was sent."""
    found = None
    for name, module in view.task.model.named_modules():
        sent = f"{name}.weight" in view.update and f"{name}.bias" in view.update
        if isinstance(module, nn.Linear) and sent and not f"{name}.".startswith(view.task.head):
            found = name
    return found


def exact_gradient(view: ServerView, *, batches: bool = False) -> Tensors | NotApplicable:
    """The gradient of a view's one step where it is known up to one factor for all tensors, or why it is not.

    Of one image, unless the caller takes `batches`.
    """
    if (reason := obstacle(view, batches=batches)) is not None:
        return NotApplicable(reason)
    if not view.client.defense.keeps_ratios():
        return NotApplicable(f"the defence {view.defense.name} leaves no ratio of a weight's to a bias's update")
    return one_gradient(view)


def one_gradient(view: ServerView) -> Tensors | NotApplicable:
    """The gradient the update is a step along, up to the clip factor."""
    phases, schedule = training(view)
    assert schedule is not None
    (phase,) = [phase for phase, steps in zip(phases, schedule, strict=True) if steps]
    if (reason := rescaled([phase])) is not None:
        return NotApplicable(reason)
    groups = {n: g for n, g in phase.assign(view.shared).items() if g.lr != 0 and n in view.update}
    if signs_only(view):
        return NotApplicable(SIGNS)
    shares = decay_shares(phases, schedule, groups)
    passed = partial(view.client.defense.passed, observed=view.update)
    change = without_decay(view.update, view.shared, shares, passed)
    moved = {n: _heard(value, view.shared[n]) if view.rounded else value for n, value in change.items() if n in groups}
    return {n: value * (1 / phase.first_step(groups[n])) for n, value in moved.items()}


def undefended(view: ServerView, name: str, delta: Tensor) -> Tensor:
    """`delta` at the scale it had before a known defence: a prediction passes through the defence once more."""
    again = dense(view.client.defense.rescaled().passed({name: delta}, {name: view.update[name]})[name])
    sizes = {n: dense(v).norm() for n, v in in_unit({"sent": delta, "again": again})[0].items()}
    return delta * (sizes["sent"] / sizes["again"]) if bool(again.any()) else delta


def _heard(moved: Value, start: Value) -> Value:
    """`moved`, or zero where it is no more than the rounding of `start`."""
    if isinstance(moved, Tensor) and moved.norm() <= 4 * torch.finfo(moved.dtype).eps * dense(start).norm():
        return torch.zeros_like(moved)
    return moved


def _cut(
    view: ServerView, layer: str, gradient: Tensors, delta: Tensor, features: Tensor
) -> ServerView | NotApplicable:
    model = tapped(view.client.predictor, layer, view.task.head)
    weights = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    probe = torch.full((1, *view.task.input_shape), 0.5, dtype=view.dtype, device=view.device)
    try:
        output = torch.func.functional_call(model, weights, (probe,))
    except RuntimeError as error:  # what comes behind the layer takes something else than the layer gives
        return NotApplicable(f"the network does not run up to {layer!r} alone: {error}", limit=True)
    if not isinstance(output, Tensor) or output.shape != (1, *delta.shape):
        return NotApplicable(f"{layer!r} sees more than one input per image", limit=True)
    grads = torch.autograd.grad(output.sum(), list(weights.values()), allow_unused=True)
    below = [n for n, g in zip(weights, grads, strict=True) if g is not None]
    method = Signal(layer=layer, train_mode=view.method.train_mode)
    buffers = dict(model.named_buffers())
    return replace(
        view,
        method=method,
        defense=view.defense.rescaled(),
        shared={n: v for n, v in view.shared.items() if n in weights and n in view.task.parameters},
        update={n: gradient[n] for n in below if n in gradient},
        private={n: shape for n, shape in view.private.items() if n in weights or n in buffers},
        private_init=None,
        schedule=(((1,),),),
        order=None,
        draws=None,
        buffers={n: v for n, v in view.buffers.items() if n in buffers},
        scaled=False,  # the signal has the update's own factor
        received={SIGNAL: {"delta": delta, "features": features}},
        history=(),
    )
