"""What a network of a user's own is checked for: that it takes the images and returns logits, and where its head is."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fl.losses import Loss
from fl.losses.cross_entropy import ONE_CLASS
from fl.models.building_blocks.model_outputs import Choice, OutputHook, choose_output
from fl.runtime.random_state import preserve_global_rng

MAX_LISTED = 5
"""So many names stand in an error; of a large network nobody reads them all."""
BY_NAME = "; give inputs by the names of forward's arguments, {'name': tensor}, each"
WITHOUT_LABELS = (
    "where forward takes labels or returns the loss, give a model that returns outputs (logits) of inputs alone, "
    "and state the loss (loss, --loss) that it computes of them"
)
"""What to give in place of a network that computes its own loss."""
FORWARD_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError, TypeError)
"""What a network raises that is given images of a shape or type that it does not take, or too few inputs."""


def probe_outputs(model: nn.Module, inputs: Tensor, described: str = "") -> object:
    """Return what a copy of the model returns, in evaluation mode; no running statistic changes.

    Args:
        model: any.
        inputs: of it.
        described: what the user gave, for the error.

    Raises:
        ValueError: it does not take such inputs.
    """
    probe = copy.deepcopy(model).eval()
    with torch.no_grad(), preserve_global_rng(inputs.device):
        try:
            return probe(inputs)
        except FORWARD_ERRORS as error:
            refuse_parted(model, error)
            by_name = isinstance(error, TypeError) and ("positional" in str(error) or "keyword" in str(error))
            hint = f"{BY_NAME}; {WITHOUT_LABELS}" if by_name else ""
            raise ValueError(
                f"expected inputs that fit the model, got {described or describe_tensor(inputs)}: {error}{hint}"
            ) from error


def refuse_parted(model: nn.Module, error: Exception) -> None:
    """Refuse a network that does not run since its tensors do not lie in one place or are not of one type.

    Args:
        model: that has been seen not to run; networks that convert between their parts do.
        error: that it raised; nothing is said of it where it is about neither.

    Raises:
        ValueError: names two of them, and says what to do.
    """
    tensors, said = {**dict(model.named_parameters()), **dict(model.named_buffers())}, str(error)
    if "type" not in said and "device" not in said:
        return
    if on_meta := [repr(name) for name, value in tensors.items() if value.is_meta]:
        raise ValueError(
            f"expected a model whose tensors have numbers, got {abbreviate_list(on_meta)} on the device meta: build it "
            "elsewhere and load its weights there (load_state_dict, or to_empty(device='cpu') first)"
        )
    places: dict[str, str] = {}
    types: dict[str, str] = {}
    for name, value in tensors.items():
        places.setdefault(str(value.device), name)
        if value.is_floating_point() and isinstance(value, nn.Parameter):
            types.setdefault(str(value.dtype), name)
    for found, about, what, remedy in (
        (places, "device", "on one device", "model.to('cpu')"),
        (types, "type", "of one type", "model.float()"),
    ):
        if len(found) > 1 and about in said:
            (first, one), (second, other) = list(found.items())[:2]
            raise ValueError(
                f"expected a model whose weights are {what}, or that converts between them itself, got {one!r} in "
                f"{first} and {other!r} in {second}: call {remedy}"
            )


def describe_tensor(value: Tensor) -> str:
    """Return type and shape of a tensor in words."""
    return f"{value.dtype} {tuple(value.shape)}"


def prepare_outputs(
    model: nn.Module, inputs: Tensor, loss: Loss, choice: Choice = None, described: str = ""
) -> torch.Size:
    """Return the shape of the model's outputs for one example, and let it return them alone (changes the model).

    Args:
        model: a copy of it is run.
        inputs: of the model (B, C, H, W).
        loss: which has to take the outputs.
        choice: which part of what the model returns is meant, where that is not one tensor.
        described: what the user gave as inputs, for errors.

    Raises:
        ValueError: the model does not take such inputs, or the loss does not take what it returns.
    """
    output = probe_outputs(model, inputs, described)
    found = choose_output(output, choice)
    dimensions = _dimensions_if_squeezed(model, inputs, choice, found)
    hook = OutputHook(choice, dimensions)
    if dimensions is not None and found.ndim < dimensions:
        found = found[None]
    if found.ndim == 1 and len(found) == len(inputs) and not loss.is_cross_entropy:
        found = found[:, None]
    elif found.ndim == 0 or len(found) != len(inputs):
        second = found.ndim > 1 and found.shape[1] == len(inputs)
        hint = "; where examples come second (T, B, ...), say output=a function that transposes it" if second else ""
        hint = f"; a single number may be the loss: {WITHOUT_LABELS}" if found.numel() == 1 else hint
        raise ValueError(
            f"expected a model that returns {loss.outputs} of {len(inputs)} example(s), got {tuple(found.shape)}{hint}"
        )
    loss.check_outputs(found)
    if found is not output or dimensions is not None or _returns_parts_in_training(model, inputs):
        model.register_forward_hook(hook)
    return found.shape[1:]


def _dimensions_if_squeezed(model: nn.Module, inputs: Tensor, choice: Choice, found: Tensor) -> int | None:
    """Return how many dimensions outputs of several examples have, where one example's lack the first; else None.

    Networks do so that call `squeeze()`, at their end or behind pooling.

    Args:
        model: a copy of it is run.
        inputs: of the model (B, C, H, W).
        choice: which part of what the model returns is meant.
        found: that part, of these inputs.
    """
    if len(inputs) == 1 and found.ndim and len(found) == 1:
        return None
    try:
        other = choose_output(
            probe_outputs(model, inputs.expand(2, *inputs.shape[1:]) if len(inputs) == 1 else inputs[:1]), choice
        )
    except ValueError:  # it does not run on so many
        return None
    one, several = (found, other) if len(inputs) == 1 else (other, found)
    count = max(len(inputs), 2)
    fits = several.ndim > 0 and len(several) == count and several.shape[1:] == one.shape
    return several.ndim if fits else None


def _returns_parts_in_training(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether a model in training mode returns more than a tensor, as GoogLeNet does with its further heads."""
    if not model.training:
        return False
    probe = copy.deepcopy(model)
    with torch.no_grad(), preserve_global_rng(inputs.device):
        try:
            return not isinstance(probe(inputs), Tensor)
        except FORWARD_ERRORS:  # why it does not run is said where it has to
            return False


def count_logits(model: nn.Module, inputs: Tensor, num_classes: int | None) -> int:
    """Return how many logits `model` returns; runs a copy, so that no running statistic changes."""
    logits = probe_outputs(model, inputs[:1])
    check_logits(logits)
    assert isinstance(logits, Tensor)
    if logits.shape[1] < 2:
        raise ValueError(f"expected a model of 2 outputs or more, got {logits.shape[1]}: {ONE_CLASS}")
    if num_classes not in {None, logits.shape[1]}:
        raise ValueError(f"expected num_classes {logits.shape[1]}, as the model has, got {num_classes}")
    return int(logits.shape[1])


def check_logits(logits: object) -> None:
    """Refuse what a network returned that is no logits (B, K).

    Raises:
        ValueError: says what it is, and how a network is wrapped whose logits are a part of it.
    """
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return
    if isinstance(logits, Tensor):
        raise ValueError(f"expected a model that returns logits (B, K), got {tuple(logits.shape)}")
    part = "output['logits']" if isinstance(logits, Mapping) else "output[0]" if isinstance(logits, tuple) else ""
    hint = f"; give a module whose forward returns the logits alone ({part}, say)" if part else ""
    raise ValueError(f"expected a model that returns logits (B, K), got {type(logits).__name__}{hint}")


def find_head(model: nn.Module, head: str | None, num_classes: int, *, strict: bool = True) -> str:
    """Return the prefix of the classifier's parameters, checked or guessed.

    Args:
        model: the network.
        head: the prefix; None takes the last `nn.Linear`, or the only one of so many outputs.
        num_classes: its outputs.
        strict: whether it has to be a linear layer of so many outputs; else the last layer with parameters is taken.
    """
    names = [name for part in (model.named_parameters(), model.named_buffers()) for name, _ in part]
    if head is not None:
        if not any(name.startswith(head) for name in names):
            raise ValueError(
                f"expected head as a prefix of parameter names, got {head!r}; names: {abbreviate_list(names)}"
            )
        return head
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not strict:
        return _last_layer(model)
    if not linear:
        return _last_matrix(model, num_classes)
    name, last = linear[-1]
    fitting = [one for one in linear if one[1].out_features == num_classes]
    if last.out_features != num_classes and len(fitting) == 1:  # defined before a layer that it comes after
        name, last = fitting[0]
    if last.out_features != num_classes:
        if len(_matrices(model, num_classes)) == 1:  # a bare parameter, as behind features of length one
            return _last_matrix(model, num_classes)
        raise ValueError(
            f"expected the last nn.Linear, {name!r}, to have {num_classes} outputs, got {last.out_features}; "
            "give head='the.classifier.' (--head)"
        )
    return f"{name}." if name else ""


def _last_matrix(model: nn.Module, num_classes: int) -> str:
    """Return the prefix of the last matrix of so many rows, where a network has no `nn.Linear`, as one of `torch.fx`.

    It is that of the module that has the matrix, or the matrix's own name where the module has others.

    Raises:
        ValueError: it has no such matrix.
    """
    fitting = _matrices(model, num_classes)
    if not fitting:
        raise ValueError(
            "expected a model with an nn.Linear as its classifier, found none; give head='its.prefix.' (--head)"
        )
    owner, dot, _ = fitting[-1].rpartition(".")
    mine = model.get_submodule(owner).parameters()
    alone = sum(value.ndim > 1 for value in mine) == 1
    return f"{owner}{dot}" if owner and alone else fitting[-1]


def _matrices(model: nn.Module, rows: int) -> list[str]:
    """Return the names of parameters that are matrices of so many rows."""
    return [name for name, value in model.named_parameters() if value.ndim == 2 and len(value) == rows]


def _last_layer(model: nn.Module) -> str:
    """Return the prefix of the last module with parameters of its own."""
    owners = [name.rpartition(".")[0] for name, _ in model.named_parameters()]
    return f"{owners[-1]}." if owners[-1] else ""


def abbreviate_list(words: Sequence[str]) -> str:
    """Return the first few of a list, and how many more there are."""
    more = len(words) - MAX_LISTED
    return ", ".join(words[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
