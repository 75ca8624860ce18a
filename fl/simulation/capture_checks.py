"""What a user's own model, images and settings are checked for before anything is captured of them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl.client import Client
from fl.defense import Defense
from fl.local import sampling
from fl.method import Method
from fl.models.building_blocks.model_checks import FORWARD_ERRORS, check_logits, preserve_global_rng
from fl.seeds import stream
from fl.view import ThreatModel

TABLE_HINT = (
    ": give rows of a table as images of one row, inputs.view(-1, 1, 1, columns), to a model that flattens them"
)


def check_settings(method: object, defense: object, threat: object) -> None:
    """Refuse names, plain data and classes in place of what they stand for; None is each one's default.

    Raises:
        ValueError: says what makes one.
    """
    made: tuple[tuple[str, object, type, str], ...] = (
        ("method", method, Method, "fl.method.methods.build({})"),
        ("defense", defense, Defense, "defenses.defenses.build({})"),
        ("threat", threat, ThreatModel, "fl.types.ThreatModel(knows_labels=True, ...)"),
    )
    for what, value, kind, how in made:
        if value is not None and not isinstance(value, kind):
            shown = repr(value) if isinstance(value, str | dict) else "..."
            got = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r}"
            raise ValueError(f"expected {what} as a {kind.__name__}, got {got}; {how.format(shown)} makes one")


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the network itself, out of `DataParallel`, `DistributedDataParallel` and what `torch.compile` returns."""
    while isinstance(model, nn.Module):
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            inner = model._orig_mod
            assert isinstance(inner, nn.Module)
            model = inner
        else:
            break
    return model


def check_model(model: object, given: Collection[str] = ()) -> None:
    """Refuse what is no network with numbers in all of its parameters, but for those that are `given` otherwise.

    Raises:
        ValueError: says what it is, or names a parameter.
    """
    if not isinstance(model, nn.Module):
        hint = "; model.load_state_dict(...) takes the weights in" if isinstance(model, Mapping) else ""
        raise ValueError(f"expected model as an nn.Module, got {type(model).__name__}{hint}")
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise ValueError(
                f"expected a model whose parameters have values, got {name!r} without (nn.LazyLinear, say): call the "
                "model once on images"
            )
    for name, value in model.named_parameters():
        if name not in given and not value.isfinite().all():
            bad = int((~value.isfinite()).sum())
            raise ValueError(f"expected a model of finite numbers, got NaN or infinity in {name!r} ({bad} of them)")


def check_shape(model: nn.Module, images: Tensor, num_classes: int) -> None:
    """Refuse images of a shape that the network, a copy of which it runs, does not take, or a number of classes.

    Raises:
        ValueError: says which shape, and what the network says or returns.
    """
    probe = copy.deepcopy(model).eval()
    with torch.no_grad(), preserve_global_rng(images.device):
        try:
            logits = probe(images)
        except FORWARD_ERRORS as error:
            raise ValueError(
                f"expected an input_shape (C, H, W) that the model takes, got {tuple(images.shape[1:])}: on "
                f"{len(images)} image(s) of it the model says: {error}"
            ) from error
    check_logits(logits)
    if logits.shape[1] != num_classes:
        raise ValueError(f"expected num_classes {logits.shape[1]}, as the model has, got {num_classes}")


def choose_layout(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the images as they lie, or row by row where a network that flattens by `view` takes them only so."""
    probe, rows = copy.deepcopy(model).eval(), torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    rows.copy_(inputs)
    if rows.stride() == inputs.stride():
        return inputs
    with torch.no_grad(), preserve_global_rng(inputs.device):
        for images in (inputs, rows):
            with suppress(*FORWARD_ERRORS):
                probe(images[:1].clone())
                return images
    return inputs


def protect_inputs(model: nn.Module, inputs: Tensor) -> None:
    """Let a network that writes into what it is given, as told by running copies on `inputs`, work on copies."""
    given = inputs.detach().clone()
    before = given._version
    with torch.no_grad(), preserve_global_rng(given.device):
        for training in (False, True):
            with suppress(*FORWARD_ERRORS):  # why it does not run is said where it has to
                copy.deepcopy(model).train(training)(given)
    if given._version != before:
        model.register_forward_pre_hook(_copy_inputs)


def _copy_inputs(module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)


def refuse_secure_aggregation(defense: Defense | None) -> None:
    """Refuse secure aggregation, which there is none of with one client.

    Raises:
        ValueError: says what to do instead.
    """
    if defense is not None and defense.group_size > 1:
        name = next(part.name for part in defense.members() if part.group_size > 1)
        raise ValueError(
            f"{name}: a single client's batch or update has no group; leave the defense out, or simulate a federation "
            "(hyperleak audit --method, fl.federation)"
        )


def check_training(client: Client, inputs: Tensor, *, default: bool) -> None:
    """Run copies of the network on the smallest batch of local training, in the mode it is trained in.

    Args:
        client: the local rule.
        inputs: as many as the client holds.
        default: whether the user gave no method, so that the model's own mode counts.

    Raises:
        ValueError: it does not run, or it draws random numbers, which no one could replay.
    """
    order = sampling.plan_batches(client.method.phases(client.task, 0), len(inputs), stream(0, "order", 0, 0))
    sizes = {len(index) for steps in order for step in steps for index in step} - {0}
    batch = inputs[: min(sizes, default=len(inputs))].detach()
    training = client.method.train_mode
    mode = f"in {'train' if training else 'evaluation'} mode"
    remedy = "call model.eval(), or pass method=FedAvg(steps=1, batch_size=None, train_mode=False)"
    if not default:
        remedy = "set train_mode=False in the method"
    with torch.no_grad(), preserve_global_rng(batch.device):
        before = _global_state(batch.device)
        try:
            first, second = (copy.deepcopy(client.task.model)(batch) for _ in range(2))
        except (RuntimeError, ValueError) as error:
            hint = f"; {remedy}" if training else ""
            raise ValueError(
                f"expected a model that runs {mode} on a batch of {len(batch)} image(s), got: {error}{hint}"
            ) from error
        drawn = not torch.equal(before, _global_state(batch.device))
    if drawn or not torch.allclose(first, second, equal_nan=True):
        remedy = remedy if training else "give functional dropout training=self.training"
        raise ValueError(
            f"expected a model without random numbers {mode}, got some (functional dropout, say), which can't be "
            f"replayed; {remedy}"
        )


def _global_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def check_images(inputs: Tensor, labels: Tensor) -> None:
    """Refuse what is no batch of images in [0, 1] with a label each.

    Raises:
        ValueError: says which of both, and what it is.
    """
    for what, values in (("inputs", inputs), ("labels", labels)):
        if not isinstance(values, Tensor):
            raise ValueError(f"expected {what} as a tensor, got {tensor_conversion_hint(values)}")
    if inputs.ndim != 4 or not inputs.is_floating_point() or not len(inputs):
        rows = inputs.ndim == 2 and inputs.is_floating_point() and len(inputs)
        raise ValueError(
            f"expected floating-point inputs (B, C, H, W), got {inputs.dtype} {tuple(inputs.shape)}"
            f"{TABLE_HINT * bool(rows)}"
        )
    if labels.shape != inputs.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"expected labels int64 ({len(inputs)},), got {labels.dtype} {tuple(labels.shape)}")
    low, high = float(inputs.min()), float(inputs.max())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"expected pixels in [0, 1], got [{low:.4g}, {high:.4g}]; a normalization belongs into "
            "the model: give it numbers in [0, 1], and undo the scaling in its first layer"
        )


def untie_parameters(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the first name of each parameter, where a state dictionary has tied ones by each of their names.

    Raises:
        ValueError: names of one parameter have different numbers.
    """
    found, first = dict(given), dict[int, str]()
    for name, value in model.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(value), name)
        if own == name or name not in found:
            continue
        alias = found.pop(name)
        if not torch.equal(torch.as_tensor(found.setdefault(own, alias)), torch.as_tensor(alias)):
            raise ValueError(f"expected the same numbers for {own!r} and {name!r}, which are one parameter, got two")
    return found


def tensor_conversion_hint(value: object) -> str:
    """Return the type of a value that should be a tensor and, for an array, how to convert it."""
    hint = "; torch.from_numpy makes one of it" if isinstance(value, np.ndarray) else ""
    return type(value).__name__ + hint
