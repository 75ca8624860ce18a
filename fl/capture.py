"""A server's view of your own model: simulated from a batch, or put together from an update you captured."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.inputs.description import Range, check_values, describe_inputs
from fl.inputs.form import InputForm, InputHook, Inputs, tensors_of
from fl.local import sampling
from fl.losses import Loss
from fl.losses.cross_entropy import ONE_CLASS
from fl.losses.function import IN_ONE_TYPE, FunctionError, TargetKind, build_loss, function_errors_named, known_loss
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.model_checks import (
    WITHOUT_LABELS,
    abbreviate_list,
    describe_tensor,
    find_head,
    prepare_outputs,
)
from fl.models.building_blocks.model_outputs import Choice
from fl.runtime.module_copies import copy_model
from fl.seeds import stream
from fl.settings import fit_value, options_or_settings
from fl.simulation.capture_checks import (
    check_given,
    check_loss,
    check_model,
    check_settings,
    check_training,
    choose_layout,
    floating_weight,
    layout_hint,
    protect_inputs,
    rebind_forward,
    refuse_secure_aggregation,
    tensor_conversion_hint,
    untie_parameters,
    unwrap_model,
    unwrap_parts,
)
from fl.simulation.dropout_masks import with_masks_read_off
from fl.simulation.frozen_parts import keep_frozen_parts
from fl.simulation.id_counts import count_ids
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
        threat: what the server knows beside the update, as an object or its settings ({"knows_labels": True}); None is
            the `ThreatModel` as it comes.
        head: prefix of the classifier's parameters; None takes the last `nn.Linear`.
        mean: per channel (C,), of the normalization inside the model; 0 where it is empty. Attacks work in normalized
            pixels, so step sizes and total variation mean what their papers say only with `mean` and `std`.
        std: per channel (C,), likewise, > 0; 1 where it is empty.
        loss: what the client minimizes: a name of `fl.losses` ("cross-entropy", "bce", "mse", "segmentation"),
            settings, `module:function`, a loss of torch.nn or any callable of (outputs, targets).
        targets: of a loss function of the user's own, what its unknown targets are (`fl.losses.function.OwnLoss`):
            "free" numbers, "binary" ones or "probabilities", in the outputs' shape; "classes"; or "known", which the
            attacker has to know. None finds out whether they are classes, and takes others for known.
        output: which part of what the model returns the loss is taken of: its name or place, or a function of the
            whole; None takes the only tensor, or the one called logits.
        input_range: least and largest number that inputs can have, one or one for each channel or column; None is
            [0, 1]. Searches stay in it; it is what the attacker knows, and not read off the inputs.
        categories: of a table (B, F), where categories lie that are given as one-hot numbers: (first column, the one
            behind the last) of each.
        column_std: of a table, the standard deviation of each column, by which numbers are scored.
    """

    method: Method | None = None
    defense: Defense | None = None
    threat: ThreatModel | None = None
    head: str | None = None
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    loss: str | Mapping[str, Any] | Loss | Callable[..., Tensor] = "cross-entropy"
    targets: TargetKind | None = None
    output: Choice = None
    input_range: Range | None = None
    categories: Sequence[tuple[int, int]] = ()
    column_std: Sequence[float] = ()

    def __post_init__(self) -> None:
        given: object = self.threat
        if isinstance(given, Mapping):
            object.__setattr__(self, "threat", fit_value(ClientSettings, "threat", given))

    def check(self) -> None:
        """Refuse what is no method, defense, loss or threat model, and a defense that takes several clients.

        Raises:
            ValueError: says which, and what was expected.
        """
        check_settings(self.method, self.defense, self.threat)
        refuse_secure_aggregation(self.defense)
        check_loss(self.built_loss, self.method, self.defense)

    @property
    def built_loss(self) -> Loss:
        """What the client minimizes, as an object."""
        return build_loss(self.loss, self.targets)

    def input_form(self, inputs: Inputs, ids: Sequence[Sequence[int]] = ()) -> InputForm:
        """Return what inputs of this form are, by a batch or an example of them.

        Args:
            inputs: of the model.
            ids: of each input how many ids there are, one number or one for each column; none takes the largest given.

        Raises:
            ValueError: they are no inputs, or the range or categories do not fit them.
        """
        return describe_inputs(
            inputs, input_range=self.input_range, categories=self.categories, column_std=self.column_std, ids=ids
        )

    def task(self, model: nn.Module, form: InputForm, output_shape: torch.Size) -> Task:
        """Return the task that the model is trained for.

        Args:
            model: takes inputs as `form` packs them, and returns one tensor.
            form: of its inputs.
            output_shape: of what it returns for one example.

        Raises:
            ValueError: a mean, a std or a head that cannot be; says which.
        """
        loss, classes = known_loss(self.built_loss, output_shape), output_shape[0]
        mean, std = _per_channel("mean", self.mean, -math.inf), _per_channel("std > 0", self.std, 0)
        own = form.units()
        head = find_head(model, self.head, classes, strict=self.built_loss.is_cross_entropy and form.is_image)
        return Task(model, form.shape, classes, head, mean or own[0], std or own[1], loss, output_shape, form)

    def client(self, task: Task) -> Client:
        """Return the client that trains so."""
        return Client(task, self.method or _one_step(task.model), self.defense or Defense())


@dataclass(frozen=True, kw_only=True)
class CapturedUpdateSettings(ClientSettings):
    """What is known of the client behind a captured update, and of the update.

    Attributes:
        threat: as above; `knows_labels` follows from `labels`, and can't be true without them.
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
    inputs: Inputs,
    labels: Tensor,
    *,
    num_classes: int | None = None,
    seed: int = 0,
    options: ClientSettings | None = None,
    **settings: Any,
) -> tuple[ServerView, Truth]:
    """Return what the server sees of a client that trains `model` on one batch, and the truth to score attacks with.

    Args:
        model: takes the inputs and returns what the loss takes; it is copied, never changed. Parameters with
            `requires_grad=False` are frozen: not trained, not sent, and known to the server.
        inputs: pictures (B, C, H, W) in [0, 1]; or a table (B, F), a series (B, C, T), ids (B, T) int64, or several
            inputs, one after the other or by the names of forward's arguments. In the view and the truth they are one
            tensor (B, C, H, W) in [0, 1], which `view.task.inputs.restore` turns back.
        labels: (B,) int64 in [0, K), or the targets of the loss that is stated.
        num_classes: K; by default what the model returns.
        seed: of all randomness.
        options: how the client trains, and what the server knows of it.
        **settings: single ones of the options in their place: `from_batch(model, inputs, labels, method=FedAvg())`.
            They are those of `ClientSettings`.

    Raises:
        ValueError: images, labels or model do not fit each other (says which), the defense takes several clients, the
            step on the images fails or is not finite, or options and settings are both given.
        TypeError: there is no such setting; says what is close.
    """
    chosen = options_or_settings(ClientSettings, options, settings)
    chosen.check()
    loss = chosen.built_loss
    check_given(inputs, labels, chosen.input_range, classes=loss.is_cross_entropy)
    form = chosen.input_form(inputs, count_ids(model, inputs))
    own = _trainable(model)
    packed = _pack(own, form, inputs)
    described = " and ".join(map(describe_tensor, tensors_of(inputs)))
    shape = prepare_outputs(own, packed, loss, chosen.output, described)
    if num_classes not in {None, shape[0]}:
        raise ValueError(f"expected num_classes {shape[0]}, as the model has, got {num_classes}")
    task = chosen.task(own, form, shape)
    targets = _prepare_targets(loss, task.loss, labels.detach().clone(), shape)
    client = chosen.client(task)
    check_training(client, packed, default=chosen.method is None)
    return _observe_step(client, Batch(packed, targets), seed, chosen.threat)


def _pack(model: nn.Module, form: InputForm, inputs: Inputs) -> Tensor:
    """Return inputs as one tensor, in the model's type as an audit has them, and let the model take it."""
    kind = floating_weight(model).dtype
    packed = form.pack(inputs, kind).detach().to(kind, copy=True)
    check_values(form, packed)
    return _with_inputs(model, form, packed)


def _observe_step(client: Client, batch: Batch, seed: int, threat: ThreatModel | None) -> tuple[ServerView, Truth]:
    """Return what the server sees of a client's step on a batch, and the truth.

    Raises:
        ValueError: the step fails, or its numbers are not finite.
    """
    several = "; a loss that compares examples takes several (batch_size)" if len(batch) == 1 else ""
    try:
        with function_errors_named():
            view, truth = Federation(client, [ClientData(batch, batch)], seed).observe(0, threat=threat)
    except FunctionError as error:
        several = "" if str(error).endswith(IN_ONE_TYPE) else several
        several = "; give targets as the function takes them" if "must match" in str(error) else several
        outputs, targets = (len(batch), *client.task.output_shape), batch.labels
        given = f"{len(batch)} example(s), outputs {outputs} and targets {targets.dtype} {tuple(targets.shape)}"
        raise ValueError(f"{error}, in the client's own step on {given}{several}") from error
    if bad := [name for name, value in view.update.items() if not bool(dense(value).isfinite().all())]:
        raise ValueError(
            f"expected a step that can be taken on these {len(batch)} example(s), got numbers that are not finite in "
            f"{abbreviate_list([repr(name) for name in bad])}: what the model returns of them, the loss or its "
            f"gradient is not finite{several}"
        )
    return view, truth


def _prepare_targets(given: Loss, known: Loss, labels: Tensor, output_shape: torch.Size) -> Tensor:
    """Return targets as the loss that was given takes them.

    Args:
        given: by the user.
        known: the same where nothing else is known of it (`known_loss`).
        labels: a target for each example.
        output_shape: of one example.

    Raises:
        ValueError: the loss does not take them; where it is one that is known, says what is wrong with them.
    """
    prepared = given.prepare(labels, output_shape)
    if known is not given and type(known) is not type(given):
        outputs = torch.randn(len(prepared), *output_shape, generator=stream(0, "targets"))
        if not given.takes(outputs, prepared.cpu()):
            known.prepare(labels, output_shape)
    return prepared


def _with_inputs(model: nn.Module, form: InputForm, packed: Tensor) -> Tensor:
    """Let the model take inputs as they are packed; returns these in a layout that it takes."""
    if form.is_plain:
        packed = choose_layout(model, packed)
    else:
        model.register_forward_pre_hook(InputHook(form), with_kwargs=True, prepend=True)
    protect_inputs(model, packed)
    return packed


def from_update(
    model: nn.Module,
    update: Mapping[str, Tensor],
    *,
    input_shape: Sequence[int] | Inputs,
    num_classes: int | None = None,
    options: CapturedUpdateSettings | None = None,
    **settings: Any,
) -> ServerView:
    """Return the server's view that a captured update belongs to.

    Args:
        model: as the client got it, before training; copied, never changed. Parameters with `requires_grad=False`
            are frozen: the server knows them, and `update` has no tensor for them.
        update: `weights before - weights after` by parameter name, or the gradient (see `kind`).
        input_shape: (C, H, W) of the images, (C, T) of a series or (F,) of a table; of ids or several inputs an example
            of them (1, ...), whose numbers do not matter.
        num_classes: K; by default what the model returns.
        options: what is known of the client and of the update.
        **settings: single ones of the options in their place: `from_update(..., method=FedAvg(), batch_size=4)`. They
            are those of `CapturedUpdateSettings` and `ClientSettings`.

    Raises:
        ValueError: a tensor is missing, unknown, of a wrong shape or not finite (says which), settings don't fit, or
            options and settings are both given.
        TypeError: there is no such setting; says what is close.
    """
    known = options_or_settings(CapturedUpdateSettings, options, settings)
    known.check()
    known = replace(known, batch_size=_to_python_number(known.batch_size))
    task = task_of_update(model, input_shape, known, _to_python_number(num_classes), update)
    client = known.client(task)
    if known.method is None:  # what nobody stated is not known to be plain SGD
        known = replace(known, threat=replace(known.threat or ThreatModel(), knows_optimizer=False))
    knowledge = _knowledge(client, known)
    params = client.method.initial_parameters(client.task, stream(0, "capture"))
    scopes = client.scopes({**params, **client.task.buffers})
    sent, taken, buffers = _captured(client, params, scopes, update, known)
    returned = _returned_buffers(client, scopes, known)
    check_training(client, _gray_batch(task, known.batch_size), default=known.method is None, captured=True)
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


def task_of_update(
    model: nn.Module,
    stated: Sequence[int] | Inputs,
    known: CapturedUpdateSettings,
    num_classes: int | None = None,
    update: Mapping[str, Tensor] | None = None,
) -> Task:
    """Return the task that a captured update belongs to, with a copy of the model.

    Dropout that the client trained with is replaced by the masks that the update tells.

    Args:
        model: as the client got it.
        stated: the shape of one example, or an example of the inputs.
        known: of the client and of the update.
        num_classes: K; by default what the model returns.
        update: by parameter name.

    Raises:
        ValueError: model, shape, loss and number of classes do not fit each other; says which. Or the client drew
            random numbers that the update does not tell.
    """
    own = _trainable(model, known.shared if isinstance(known.shared, Mapping) else ())
    form = _stated_form(known, model, stated)
    _check_classes(num_classes, known.built_loss)
    _with_inputs(own, form, torch.full((1, *form.shape), 0.5).to(floating_weight(own)))
    task = known.task(own, form, _output_shape(own, form, known, num_classes))
    known_update = update if isinstance(update, Mapping) else None
    return with_masks_read_off(task, known_update, known.method, known.defense, known.batch_size)


def _stated_form(known: CapturedUpdateSettings, model: nn.Module, stated: Sequence[int] | Inputs) -> InputForm:
    """Return the form of inputs by a shape or an example."""
    if isinstance(stated, Tensor | Mapping) or (
        isinstance(stated, Sequence) and any(isinstance(value, Tensor) for value in stated)
    ):
        return known.input_form(stated, count_ids(model, stated))  # type: ignore[arg-type]
    sides = tuple(map(_to_python_number, stated)) if isinstance(stated, Iterable) else ()
    if not 1 <= len(sides) <= 4 or not all(map(_check_positive, sides)):
        raise ValueError(
            f"expected input_shape (C, H, W), three positive ints ((C, T) of a series, (F,) of a table), got {stated!r}"
        )
    return known.input_form(torch.zeros(1, *sides))


def _check_classes(num_classes: int | None, loss: Loss) -> None:
    least = 2 if loss.is_cross_entropy else 1
    if num_classes is None or (_check_positive(num_classes) and num_classes >= least):
        return
    why = f": {ONE_CLASS}" if num_classes == 1 and num_classes is not True else ""
    raise ValueError(f"expected num_classes, an int >= {least}, got {num_classes!r}{why}")


def _output_shape(
    model: nn.Module, form: InputForm, known: CapturedUpdateSettings, num_classes: int | None
) -> torch.Size:
    """Return the shape of what the model returns of one example, and let it return that alone."""
    count = known.batch_size if _check_positive(known.batch_size) else 1
    try:
        gray = torch.full((count, *form.shape), 0.5).to(floating_weight(model))
    except RuntimeError as error:  # out of memory
        raise ValueError(f"expected as many images (--batch-size) as memory holds, got {count}") from error
    try:
        shape = prepare_outputs(model, gray, known.built_loss, known.output)
    except ValueError as error:
        if "inputs that fit the model" not in str(error):
            raise
        said = str(error.__cause__)
        hint = f"; {WITHOUT_LABELS}" if isinstance(error.__cause__, TypeError) and "positional" in said else ""
        shown = ", ".join(str(part.shape) for part in form.parts)
        raise ValueError(
            f"expected an input_shape (C, H, W) that the model takes, got {shown}: on {count} example(s) of "
            f"it the model says: {said}{_hint_of_ids(model, form)}{hint}"
        ) from error
    if num_classes not in {None, shape[0]}:
        raise ValueError(f"expected num_classes {shape[0]}, as the model has, got {num_classes}")
    return shape


def _hint_of_ids(model: nn.Module, form: InputForm) -> str:
    """Return how ids are stated, where a network has embeddings and a shape stands for numbers."""
    if form.has_ids or not any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules()):
        return ""
    return (
        "; a shape is that of numbers: where the model takes ids, give an example of them (input_shape=ids[:1], or let "
        "your function return (model, ids, targets))"
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
    threat, labels, batch_size, task = known.threat, known.labels, known.batch_size, client.base
    if not _check_positive(batch_size):
        raise ValueError(f"expected batch_size, an int >= 1, got {batch_size!r}")
    for key in ("knows_order", "knows_randomness", "knows_private_init", "history_rounds"):
        if threat is not None and getattr(threat, key):
            raise ValueError(f"expected a threat model without {key}: a captured update does not come with it")
    if labels is None and threat is not None and threat.knows_labels:
        raise ValueError("expected labels under a threat model that knows them, got none")
    if labels is not None:
        wanted = task.loss.targets_in_words(batch_size, task.output_shape)
        if not isinstance(labels, Tensor):
            raise ValueError(f"expected {wanted}, as a tensor, got {tensor_conversion_hint(labels)}")
        if not labels.ndim or len(labels) != batch_size:
            several = f" (batch_size={batch_size} says how many)" if labels.ndim else ""
            raise ValueError(f"expected {wanted}, got {labels.dtype} {tuple(labels.shape)}{several}")
    labels = None if labels is None else task.loss.prepare(labels, task.output_shape)
    threat = replace(threat or ThreatModel(), knows_labels=labels is not None)
    order = sampling.plan_batches(client.method.phases(client.task, 0), batch_size, stream(0, "capture", "order"))
    return {
        "threat": threat,
        "labels": labels,
        "batch_size": batch_size if threat.knows_batch_size else None,
        "schedule": sampling.batch_sizes(order) if threat.knows_schedule else None,
    }


def _to_python_number(value: Any) -> Any:
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
    own = copy_model(model)
    unwrap_parts(own)
    rebind_forward(own)
    keep_frozen_parts(own)
    return own


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
            hint = layout_hint(like.shape, value.shape) or "the model may be another than the client's"
            raise ValueError(
                f"{what}: expected {name!r} of shape {tuple(like.shape)}, got {tuple(value.shape)}: {hint}"
            )
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
