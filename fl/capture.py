"""A server's view of your own model: simulated from a batch, or put together from an update you captured."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.local import sampling
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.model_checks import ONE_CLASS, abbreviate_list, count_logits, find_head
from fl.runtime.module_copies import copy_model
from fl.seeds import stream
from fl.settings import options_or_settings
from fl.simulation.capture_checks import (
    check_images,
    check_model,
    check_settings,
    check_shape,
    check_training,
    choose_layout,
    protect_inputs,
    refuse_secure_aggregation,
    tensor_conversion_hint,
    untie_parameters,
    unwrap_model,
)
from fl.simulation.nonfinite_updates import form_mismatch
from fl.tensors import Tensors, Value, dense, flatten
from fl.types import Batch, Scope, Task, Truth, frozen
from fl.view import ServerView, ThreatModel


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How the client behind an update trains, and what the server knows of it.

    Attributes:
        method: how the client trains; None is one FedAvg step on the whole batch at step size 1 (FedSGD).
        defense: of the client; None is none.
        threat: what the server knows beside the update; None is the `ThreatModel` as it comes.
        head: prefix of the classifier's parameters; None takes the last `nn.Linear`.
        mean: per channel (C,), of the normalization inside the model; 0 where it is empty. Attacks work in normalized
            pixels, so step sizes and total variation mean what their papers say only with `mean` and `std`.
        std: per channel (C,), likewise, > 0; 1 where it is empty.
    """

    method: Method | None = None
    defense: Defense | None = None
    threat: ThreatModel | None = None
    head: str | None = None
    mean: Sequence[float] = ()
    std: Sequence[float] = ()

    def check(self) -> None:
        """Refuse what is no method, defense or threat model, and a defense that takes several clients.

        Raises:
            ValueError: says which, and what was expected.
        """
        check_settings(self.method, self.defense, self.threat)
        refuse_secure_aggregation(self.defense)

    def task(self, model: nn.Module, input_shape: tuple[int, int, int], num_classes: int) -> Task:
        """Return the task of classifying images (C, H, W) into K classes by a model.

        Raises:
            ValueError: a shape, a number of classes, a mean or a std that cannot be; says which.
        """
        sides = tuple(map(_to_python_number, input_shape)) if isinstance(input_shape, Iterable) else ()
        if len(sides) != 3 or not all(map(_check_positive, sides)):
            raise ValueError(f"expected input_shape (C, H, W), three positive ints, got {input_shape!r}")
        if not _check_positive(num_classes) or num_classes < 2:
            why = f": {ONE_CLASS}" if num_classes == 1 and num_classes is not True else ""
            raise ValueError(f"expected num_classes, an int >= 2, got {num_classes!r}{why}")
        mean, std = _per_channel("mean", self.mean, -math.inf), _per_channel("std > 0", self.std, 0)
        return Task(
            model, (sides[0], sides[1], sides[2]), num_classes, find_head(model, self.head, num_classes), mean, std
        )

    def client(self, task: Task) -> Client:
        """Return the client that trains so."""
        return Client(task, self.method or _one_step(task.model), self.defense or Defense())


@dataclass(frozen=True, kw_only=True)
class CapturedUpdateSettings(ClientSettings):
    """What is known of the client behind a captured update, and of the update.

    Attributes:
        threat: as above; `knows_labels` follows from `labels`.
        batch_size: how many images the client held, >= 1.
        labels: theirs (batch_size,) int64, if known.
        shared: what the server sent, by name; None takes the model's own parameters, if it sent those (no
            hypernetwork, say).
        buffers: the model's shared buffers as the server sent them; None takes the model's own.
        buffers_after: the same as they came back (running statistics of batch norm, say); None where they did not.
        kind: "update", or "gradient" for one that was sent before a step of plain SGD was made of it. That is a claim
            that the numbers are no difference of weights: they are taken as exact however small they are. A difference
            divided by the step size still has the weights' rounding, which nothing in it tells: pass it as an update,
            with a `method` of that step size.
    """

    batch_size: int = 1
    labels: Tensor | None = None
    shared: Mapping[str, Tensor] | None = None
    buffers: Mapping[str, Tensor] | None = None
    buffers_after: Mapping[str, Tensor] | None = None
    kind: Literal["update", "gradient"] = "update"


def from_batch(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    num_classes: int | None = None,
    seed: int = 0,
    options: ClientSettings | None = None,
    **settings: Any,
) -> tuple[ServerView, Truth]:
    """Return what the server sees of a client that trains `model` on one batch, and the truth to score attacks with.

    Args:
        model: takes pixels in [0, 1] and returns logits (B, K); it is copied, never changed. Parameters with
            `requires_grad=False` are frozen: not trained, not sent, and known to the server.
        inputs: (B, C, H, W) in [0, 1].
        labels: (B,) int64 in [0, K).
        num_classes: K; by default what the model returns.
        seed: of all randomness.
        options: how the client trains, and what the server knows of it.
        **settings: single ones of the options in their place: `from_batch(model, inputs, labels, method=FedAvg())`.
            They are `method`, `defense`, `threat`, `head`, `mean` and `std` (see `ClientSettings`).

    Raises:
        ValueError: images, labels or model do not fit each other (says which), the defense takes several clients, or
            options and settings are both given.
        TypeError: there is no such setting; says what is close.
    """
    chosen = options_or_settings(ClientSettings, options, settings)
    chosen.check()
    check_images(inputs, labels)
    inputs, labels = inputs.detach().clone(), labels.detach().clone()
    own = _trainable(model)
    inputs = choose_layout(own, inputs)
    protect_inputs(own, inputs)
    classes = count_logits(own, inputs, num_classes)
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"expected labels in [0, {classes}), got {int(labels.min())} to {int(labels.max())}")
    channels, height, width = inputs.shape[1:]
    client = chosen.client(chosen.task(own, (channels, height, width), classes))
    check_training(client, inputs, default=chosen.method is None)
    batch = Batch(inputs, labels)
    return Federation(client, [ClientData(batch, batch)], seed).observe(0, threat=chosen.threat)


def from_update(
    model: nn.Module,
    update: Mapping[str, Tensor],
    *,
    input_shape: tuple[int, int, int],
    num_classes: int,
    options: CapturedUpdateSettings | None = None,
    **settings: Any,
) -> ServerView:
    """Return the server's view that a captured update belongs to.

    Args:
        model: as the client got it, before training; copied, never changed. Parameters with `requires_grad=False`
            are frozen: the server knows them, and `update` has no tensor for them.
        update: `weights before - weights after` by parameter name, or the gradient (see `kind`).
        input_shape: (C, H, W) of the images.
        num_classes: K.
        options: what is known of the client and of the update.
        **settings: single ones of the options in their place: `from_update(..., method=FedAvg(), batch_size=4)`. They
            are `batch_size`, `labels`, `shared`, `buffers`, `buffers_after`, `kind` (see `CapturedUpdateSettings`),
            `method`, `defense`, `threat`, `head`, `mean` and `std` (see `ClientSettings`).

    Raises:
        ValueError: a tensor is missing, unknown, of a wrong shape or not finite (says which), settings don't fit, or
            options and settings are both given.
        TypeError: there is no such setting; says what is close.
    """
    known = options_or_settings(CapturedUpdateSettings, options, settings)
    known.check()
    known, num_classes = replace(known, batch_size=_to_python_number(known.batch_size)), _to_python_number(num_classes)
    own = _trainable(model, known.shared if isinstance(known.shared, Mapping) else ())
    task = known.task(own, input_shape, num_classes)
    protect_inputs(task.model, _gray_batch(task, 1))
    client = known.client(task)
    if known.method is None:  # what nobody stated is not known to be plain SGD
        known = replace(known, threat=replace(known.threat or ThreatModel(), knows_optimizer=False))
    knowledge = _knowledge(client, known)
    params = client.method.initial_parameters(client.task, stream(0, "capture"))
    scopes = client.scopes({**params, **client.task.buffers})
    sent, taken, buffers = _captured(client, params, scopes, update, known)
    returned = _returned_buffers(client, scopes, known)
    check_shape(task.model, _gray_batch(task, known.batch_size), task.num_classes)
    check_training(client, _gray_batch(task, known.batch_size), default=known.method is None)
    return ServerView(
        method=client.method,
        defense=client.defense,
        task=task,
        shared=sent,
        update=taken,
        private=_private_shapes(client, params, scopes),
        buffers={name: dense(value) for name, value in buffers.items() if scopes[name] is Scope.SHARED},
        buffers_after=returned,
        rounded=known.kind == "update",
        **knowledge,  # type: ignore[arg-type]
    )


def _captured(
    client: Client,
    params: Tensors,
    scopes: Mapping[str, Scope],
    update: Mapping[str, Tensor],
    known: CapturedUpdateSettings,
) -> tuple[Tensors, Tensors, Mapping[str, Value]]:
    """Return what the server sent, the update and the buffers it sent, each with every name it must have."""
    if known.kind not in {"update", "gradient"}:
        raise ValueError(f"expected kind 'update' or 'gradient', got {known.kind!r}")
    task = client.base
    expected = {name: value for name, value in params.items() if scopes[name] is Scope.SHARED}
    if known.shared is None and (foreign := sorted(set(expected) - set(task.parameters))):
        raise ValueError(f"expected what the server sent as `shared`, got none: the model itself has no {foreign[0]!r}")
    why = dict.fromkeys(task.buffers, "a buffer, not a parameter: leave it out")
    why |= dict.fromkeys(frozen(task.model), "frozen by requires_grad=False, so not trained: leave it out")
    update = untie_parameters(task.model, update) if isinstance(update, Mapping) else update
    shared = untie_parameters(task.model, known.shared) if isinstance(known.shared, Mapping) else known.shared
    sent = expected if shared is None else _match_tensors(shared, expected, why, "shared")
    withheld = [name for name in expected if client.defense.withholds(name)]
    why |= dict.fromkeys(withheld, f"not sent under the defense {client.defense.name}: leave it out")
    asked = {name: value for name, value in expected.items() if name not in withheld}
    taken = _match_tensors(update, asked, why, known.kind)
    if known.kind == "gradient":
        rates = _step_sizes(client, list(asked))
        taken = {name: value * rates[name] for name, value in taken.items()}
    buffers: dict[str, Value] = dict(task.buffers)
    if known.buffers is not None:
        buffers |= _match_tensors(known.buffers, task.buffers, why, "buffers")
    return sent, taken, buffers


def _returned_buffers(
    client: Client, scopes: Mapping[str, Scope], known: CapturedUpdateSettings
) -> dict[str, Tensor] | None:
    """Return the shared buffers as they came back; None where they did not, or the server is not to look at them."""
    if known.buffers_after is None:
        return None
    found = _match_tensors(known.buffers_after, client.base.buffers, {}, "buffers_after")
    if known.threat is not None and not known.threat.sees_buffers:
        return None
    return {name: dense(value) for name, value in found.items() if scopes[name] is Scope.SHARED}


def _knowledge(client: Client, known: CapturedUpdateSettings) -> dict[str, object]:
    """Return what the server knows beside the update, as `ServerView` has it."""
    threat, labels, batch_size, num_classes = known.threat, known.labels, known.batch_size, client.base.num_classes
    if not _check_positive(batch_size):
        raise ValueError(f"expected batch_size, an int >= 1, got {batch_size!r}")
    for key in ("knows_order", "knows_randomness", "knows_private_init", "history_rounds"):
        if threat is not None and getattr(threat, key):
            raise ValueError(f"expected a threat model without {key}: a captured update does not come with it")
    if labels is None and threat is not None and threat.knows_labels:
        raise ValueError("expected labels under a threat model that knows them, got none")
    if labels is not None and not isinstance(labels, Tensor):
        raise ValueError(f"expected labels as a tensor int64 ({batch_size},), got {tensor_conversion_hint(labels)}")
    if labels is not None and (labels.shape != (batch_size,) or labels.dtype != torch.int64):
        raise ValueError(f"expected labels int64 ({batch_size},), got {labels.dtype} {tuple(labels.shape)}")
    if labels is not None and not ((labels >= 0) & (labels < num_classes)).all():
        raise ValueError(f"expected labels in [0, {num_classes}), got {labels.tolist()}")
    threat = replace(threat or ThreatModel(), knows_labels=labels is not None)
    order = sampling.plan_batches(client.method.phases(client.task, 0), batch_size, stream(0, "capture", "order"))
    return {
        "threat": threat,
        "labels": labels,
        "batch_size": batch_size if threat.knows_batch_size else None,
        "schedule": sampling.batch_sizes(order) if threat.knows_schedule else None,
    }


def _to_python_number(value: int) -> int:
    """Convert NumPy's integers to Python's, which torch wants; all else as it is, to be refused by name."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_step(model: nn.Module) -> FedAvg:
    # step size 1: before - after then rounds the gradient least, and attacks do not depend on its unit
    return FedAvg(steps=1, batch_size=None, lr=1.0, train_mode=model.training)


def _trainable(model: nn.Module, given: Collection[str] = ()) -> nn.Module:
    """Return a copy of `model`, which has something to train, and numbers where none are `given`."""
    model = unwrap_model(model)
    check_model(model, given)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("expected a model with parameters to train, got none; call model.requires_grad_(True)")
    return copy_model(model)


def _per_channel(what: str, values: Sequence[float], least: float) -> tuple[float, ...]:
    """Return one finite number above `least` for each channel, also of an array."""
    numbers = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    if not isinstance(numbers, Sequence) or not all(
        isinstance(value, Real) and least < value < math.inf for value in numbers
    ):
        raise ValueError(f"expected {what} as finite numbers, one per channel, got {numbers!r}")
    return tuple(numbers)


def _gray_batch(task: Task, count: int) -> Tensor:
    """Return images to try the network on, where there are none."""
    return torch.full((count, *task.input_shape), 0.5).to(next(iter(task.parameters.values())))


def _match_tensors(
    given: Mapping[str, Tensor], expected: Mapping[str, object], why: Mapping[str, str], what: str
) -> Tensors:
    """Return copies of `given`, which must have the names and shapes of `expected`, in its type and on its device."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{what}: expected tensors by name, as a dictionary, got {type(given).__name__}")
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        parts = [f"missing {abbreviate_list([repr(name) for name in missing])}"] if missing else []
        likely = missing or list(expected)
        if given and missing and not unknown:
            parts.append("what was not trained or not sent is frozen: call requires_grad_(False) on these in the model")
        parts += (
            [f"unexpected {abbreviate_list([_name_hint(name, likely, why) for name in unknown])}"] if unknown else []
        )
        raise ValueError(f"{what}: expected a tensor for each of {len(expected)} names; {'; '.join(parts)}")
    result: Tensors = {}
    for name, like in expected.items():
        value = given[name]
        assert isinstance(like, Tensor)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{what}: expected {name!r} as a tensor {tuple(like.shape)}, got {tensor_conversion_hint(value)}"
            )
        if value.shape != like.shape:
            raise ValueError(f"{what}: expected {name!r} of shape {tuple(like.shape)}, got {tuple(value.shape)}")
        if like.is_floating_point() and (wrong := form_mismatch(value)):
            raise ValueError(f"{what}: expected {name!r} {wrong}")
        if not value.isfinite().all():
            bad = int((~value.isfinite()).sum())
            raise ValueError(f"{what}: expected finite numbers, got NaN or infinity in {name!r} ({bad} of them)")
        result[name] = value.detach().clone().to(like)
    return result


def _name_hint(name: str, names: Collection[str], why: Mapping[str, str]) -> str:
    if name in why:
        return f"{name!r} ({why[name]})"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else "")


def _private_shapes(client: Client, params: Tensors, scopes: Mapping[str, Scope]) -> dict[str, torch.Size]:
    """Return shapes of what the client keeps, as `fl.simulation.client_round.observe` lists them."""
    hidden: Tensors = {name: value for name, value in params.items() if scopes[name] is Scope.PRIVATE}
    hidden |= flatten(client.method.init_memory(params, client.task), "memory/")
    if not client.method.train_mode:
        kept = {name: value for name, value in client.task.buffers.items() if scopes[name] is Scope.PRIVATE}
        hidden |= {name: value for name, value in kept.items() if value.is_floating_point()}
    return {name: value.shape for name, value in hidden.items()}


def _step_sizes(client: Client, names: Collection[str]) -> dict[str, float]:
    """Return the step size of every tensor, for a client that makes one step of plain SGD."""
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
