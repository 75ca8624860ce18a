"""A server's view of your own model: simulated from a batch, or put together from an update you captured."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.local import sampling
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.model_checks import ONE_CLASS, classes_of, head_of, some
from fl.runtime.module_copies import copied
from fl.seeds import stream
from fl.simulation.capture_checks import (
    check_alone,
    check_images,
    check_model,
    check_settings,
    check_shape,
    check_training,
    in_a_layout_for,
    keep_inputs,
    no_tensor,
    untied,
    unwrapped,
)
from fl.simulation.nonfinite_updates import unfit
from fl.tensors import Tensors, Value, dense, flatten
from fl.types import Batch, Scope, Task, Truth, frozen
from fl.view import ServerView, ThreatModel


def from_batch(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    method: Method | None = None,
    defense: Defense | None = None,
    threat: ThreatModel | None = None,
    num_classes: int | None = None,
    head: str | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    seed: int = 0,
) -> tuple[ServerView, Truth]:
    """What the server sees of a client that trains `model` on one batch, and the truth to score attacks with.

    Args:
        model: takes pixels in [0, 1] and returns logits (B, K); it is copied, never changed. Parameters with
            `requires_grad=False` are frozen: not trained, not sent, and known to the server.
        inputs: (B, C, H, W) in [0, 1].
        labels: (B,) int64 in [0, K).
        method: the federated method; one FedAvg step on the whole batch at step size 1 by default (FedSGD).
        defense: of the client; none by default.
        threat: what the server knows beside the update.
        num_classes: K; by default what the model returns.
        head: prefix of the classifier's parameters; by default the last `nn.Linear`.
        mean: per channel (C,), of the normalization inside `model`; 0 by default. Attacks work in normalized pixels,
            so step sizes and total variation mean what their papers say only with `mean` and `std`.
        std: per channel (C,), likewise; 1 by default.
        seed: of all randomness.

    Raises:
        ValueError: images, labels or model do not fit each other (says which), or the defense takes several clients.
    """
    check_settings(method, defense, threat)
    check_alone(defense)
    check_images(inputs, labels)
    inputs, labels = inputs.detach().clone(), labels.detach().clone()
    own = _trainable(model)
    inputs = in_a_layout_for(own, inputs)
    keep_inputs(own, inputs)
    classes = classes_of(own, inputs, num_classes)
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"expected labels in [0, {classes}), got {int(labels.min())} to {int(labels.max())}")
    channels, height, width = inputs.shape[1:]
    task = _task(own, (channels, height, width), classes, head, mean, std)
    client = Client(task, method or _one_step(own), defense or Defense())
    check_training(client, inputs, default=method is None)
    batch = Batch(inputs, labels)
    return Federation(client, [ClientData(batch, batch)], seed).observe(0, threat=threat)


def from_update(
    model: nn.Module,
    update: Mapping[str, Tensor],
    *,
    input_shape: tuple[int, int, int],
    num_classes: int,
    method: Method | None = None,
    defense: Defense | None = None,
    batch_size: int = 1,
    labels: Tensor | None = None,
    shared: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    threat: ThreatModel | None = None,
    head: str | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    kind: Literal["update", "gradient"] = "update",
) -> ServerView:
    """The server's view that a captured update belongs to.

    Args:
        model: as the client got it, before training; copied, never changed. Parameters with `requires_grad=False`
            are frozen: the server knows them, and `update` has no tensor for them.
        update: `weights before - weights after` by parameter name, or the gradient (see `kind`).
        input_shape: (C, H, W) of the images.
        num_classes: K.
        method: how the client trained; one FedAvg step on the whole batch at step size 1 by default.
        defense: of the client, as far as known; none by default.
        batch_size: how many images the client held.
        labels: theirs (batch_size,) int64, if known.
        shared: what the server sent; by default the model's own parameters, if it sent those (no hypernetwork, say).
        buffers: the model's shared buffers as the server sent them; the model's own by default.
        threat: what the server knows beside; `knows_labels` follows from `labels`.
        head: prefix of the classifier's parameters; by default the last `nn.Linear`.
        mean: per channel (C,), of the normalization inside `model`; 0 by default (see `from_batch`).
        std: per channel (C,), likewise; 1 by default.
        kind: "update", or "gradient" for one that was sent before a step of plain SGD was made of it. That is a claim
            that the numbers are no difference of weights: they are taken as exact however small they are. A difference
            divided by the step size still has the weights' rounding, which nothing in it tells: pass it as an update,
            with a `method` of that step size.

    Raises:
        ValueError: a tensor is missing, unknown, of a wrong shape or not finite (says which), or settings don't fit.
    """
    check_settings(method, defense, threat)
    check_alone(defense)
    batch_size, num_classes = _plain(batch_size), _plain(num_classes)
    task = _task(
        _trainable(model, shared if isinstance(shared, Mapping) else ()), input_shape, num_classes, head, mean, std
    )
    keep_inputs(task.model, _gray(task, 1))
    client = Client(task, method or _one_step(task.model), defense or Defense())
    if method is None:  # what nobody stated is not known to be plain SGD
        threat = replace(threat or ThreatModel(), knows_optimizer=False)
    knowledge = _knowledge(client, threat, labels, batch_size, num_classes)
    params = client.method.initial_parameters(client.task, stream(0, "capture"))
    scopes = client.scopes({**params, **client.task.buffers})
    sent, taken, known = _captured(client, params, scopes, update, shared, buffers, kind)
    check_shape(task.model, _gray(task, batch_size), task.num_classes)
    check_training(client, _gray(task, batch_size), default=method is None)
    return ServerView(
        method=client.method,
        defense=client.defense,
        task=task,
        shared=sent,
        update=taken,
        private=_private(client, params, scopes),
        buffers={name: dense(value) for name, value in known.items() if scopes[name] is Scope.SHARED},
        rounded=kind == "update",
        **knowledge,  # type: ignore[arg-type]
    )


def _captured(
    client: Client,
    params: Tensors,
    scopes: Mapping[str, Scope],
    update: Mapping[str, Tensor],
    shared: Mapping[str, Tensor] | None,
    buffers: Mapping[str, Tensor] | None,
    kind: Literal["update", "gradient"],
) -> tuple[Tensors, Tensors, Mapping[str, Value]]:
    """What the server sent, the update and the buffers it sent, each with every name it must have."""
    if kind not in {"update", "gradient"}:
        raise ValueError(f"expected kind 'update' or 'gradient', got {kind!r}")
    task = client.base
    expected = {name: value for name, value in params.items() if scopes[name] is Scope.SHARED}
    if shared is None and (foreign := sorted(set(expected) - set(task.parameters))):
        raise ValueError(f"expected what the server sent as `shared`, got none: the model itself has no {foreign[0]!r}")
    why = dict.fromkeys(task.buffers, "a buffer, not a parameter: leave it out")
    why |= dict.fromkeys(frozen(task.model), "frozen by requires_grad=False, so not trained: leave it out")
    update = untied(task.model, update) if isinstance(update, Mapping) else update
    shared = untied(task.model, shared) if isinstance(shared, Mapping) else shared
    sent = expected if shared is None else _like(shared, expected, why, "shared")
    taken = _like(update, expected, why, kind)
    if kind == "gradient":
        rates = _rates(client, list(expected))
        taken = {name: value * rates[name] for name, value in taken.items()}
    known: dict[str, Value] = dict(task.buffers)
    if buffers is not None:
        known |= _like(buffers, task.buffers, why, "buffers")
    return sent, taken, known


def _knowledge(
    client: Client, threat: ThreatModel | None, labels: Tensor | None, batch_size: int, num_classes: int
) -> dict[str, object]:
    """What the server knows beside the update, as `ServerView` has it."""
    if not _positive(batch_size):
        raise ValueError(f"expected batch_size, an int >= 1, got {batch_size!r}")
    for key in ("knows_order", "knows_randomness", "knows_private_init", "history_rounds"):
        if threat is not None and getattr(threat, key):
            raise ValueError(f"expected a threat model without {key}: a captured update does not come with it")
    if labels is None and threat is not None and threat.knows_labels:
        raise ValueError("expected labels under a threat model that knows them, got none")
    if labels is not None and not isinstance(labels, Tensor):
        raise ValueError(f"expected labels as a tensor int64 ({batch_size},), got {no_tensor(labels)}")
    if labels is not None and (labels.shape != (batch_size,) or labels.dtype != torch.int64):
        raise ValueError(f"expected labels int64 ({batch_size},), got {labels.dtype} {tuple(labels.shape)}")
    if labels is not None and not ((labels >= 0) & (labels < num_classes)).all():
        raise ValueError(f"expected labels in [0, {num_classes}), got {labels.tolist()}")
    threat = replace(threat or ThreatModel(), knows_labels=labels is not None)
    order = sampling.plan(client.method.phases(client.task, 0), batch_size, stream(0, "capture", "order"))
    return {
        "threat": threat,
        "labels": labels,
        "batch_size": batch_size if threat.knows_batch_size else None,
        "schedule": sampling.schedule(order) if threat.knows_schedule else None,
    }


def _plain(value: int) -> int:
    """NumPy's integers as Python's, which torch wants; all else as it is, to be refused by name."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_step(model: nn.Module) -> FedAvg:
    # step size 1: before - after then rounds the gradient least, and attacks do not depend on its unit
    return FedAvg(steps=1, batch_size=None, lr=1.0, train_mode=model.training)


def _trainable(model: nn.Module, given: Collection[str] = ()) -> nn.Module:
    """A copy of `model`, which has something to train, and numbers where none are `given`."""
    model = unwrapped(model)
    check_model(model, given)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("expected a model with parameters to train, got none; call model.requires_grad_(True)")
    return copied(model)


def _task(
    model: nn.Module,
    input_shape: tuple[int, int, int],
    num_classes: int,
    head: str | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> Task:
    sides = tuple(map(_plain, input_shape)) if isinstance(input_shape, Iterable) else ()
    if len(sides) != 3 or not all(map(_positive, sides)):
        raise ValueError(f"expected input_shape (C, H, W), three positive ints, got {input_shape!r}")
    if not _positive(num_classes) or num_classes < 2:
        why = f": {ONE_CLASS}" if num_classes == 1 and num_classes is not True else ""
        raise ValueError(f"expected num_classes, an int >= 2, got {num_classes!r}{why}")
    mean, std = (values.tolist() if isinstance(values, Tensor | np.ndarray) else values for values in (mean, std))
    for what, values, least in (("mean", mean, -math.inf), ("std > 0", std, 0)):
        numbers = isinstance(values, Sequence) and all(isinstance(value, Real) for value in values)
        if not numbers or not all(least < value < math.inf for value in values):
            raise ValueError(f"expected {what} as finite numbers, one per channel, got {values!r}")
    return Task(
        model, (sides[0], sides[1], sides[2]), num_classes, head_of(model, head, num_classes), tuple(mean), tuple(std)
    )


def _gray(task: Task, count: int) -> Tensor:
    """Images to try the network on, where there are none."""
    return torch.full((count, *task.input_shape), 0.5).to(next(iter(task.parameters.values())))


def _like(given: Mapping[str, Tensor], expected: Mapping[str, object], why: Mapping[str, str], what: str) -> Tensors:
    """Copies of `given`, which must have the names and shapes of `expected`, in its type and on its device."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{what}: expected tensors by name, as a dictionary, got {type(given).__name__}")
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        parts = [f"missing {some([repr(name) for name in missing])}"] if missing else []
        likely = missing or list(expected)
        if given and missing and not unknown:
            parts.append("what was not trained or not sent is frozen: call requires_grad_(False) on these in the model")
        parts += [f"unexpected {some([_hint(name, likely, why) for name in unknown])}"] if unknown else []
        raise ValueError(f"{what}: expected a tensor for each of {len(expected)} names; {'; '.join(parts)}")
    result: Tensors = {}
    for name, like in expected.items():
        value = given[name]
        assert isinstance(like, Tensor)
        if not isinstance(value, Tensor):
            raise ValueError(f"{what}: expected {name!r} as a tensor {tuple(like.shape)}, got {no_tensor(value)}")
        if value.shape != like.shape:
            raise ValueError(f"{what}: expected {name!r} of shape {tuple(like.shape)}, got {tuple(value.shape)}")
        if like.is_floating_point() and (wrong := unfit(value)):
            raise ValueError(f"{what}: expected {name!r} {wrong}")
        if not value.isfinite().all():
            bad = int((~value.isfinite()).sum())
            raise ValueError(f"{what}: expected finite numbers, got NaN or infinity in {name!r} ({bad} of them)")
        result[name] = value.detach().clone().to(like)
    return result


def _hint(name: str, names: Collection[str], why: Mapping[str, str]) -> str:
    if name in why:
        return f"{name!r} ({why[name]})"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else "")


def _private(client: Client, params: Tensors, scopes: Mapping[str, Scope]) -> dict[str, torch.Size]:
    """Shapes of what the client keeps, as `fl.simulation.client_round.observe` lists them."""
    hidden: Tensors = {name: value for name, value in params.items() if scopes[name] is Scope.PRIVATE}
    hidden |= flatten(client.method.init_memory(params, client.task), "memory/")
    if not client.method.train_mode:
        kept = {name: value for name, value in client.task.buffers.items() if scopes[name] is Scope.PRIVATE}
        hidden |= {name: value for name, value in kept.items() if value.is_floating_point()}
    return {name: value.shape for name, value in hidden.items()}


def _rates(client: Client, names: Collection[str]) -> dict[str, float]:
    """The step size of every tensor, for a client that makes one step of plain SGD."""
    phases = client.method.phases(client.task, 0)
    phase = phases[0]
    groups = phase.assign(dict.fromkeys(names))
    decayed = any(group.weight_decay or group.max_norm is not None for group in phase.groups)
    plain = phase.optimizer == "sgd" and not phase.nesterov and not decayed
    if len(phases) > 1 or phase.steps != 1 or not plain or len(groups) < len(names):
        raise ValueError(
            f"expected a method of one plain SGD step on everything for kind='gradient', got {client.method.name} with "
            "more steps, decay or clipping; send the update, or leave the method out"
        )
    return {name: group.lr for name, group in groups.items()}
