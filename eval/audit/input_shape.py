"""Whether images fit a user's model, said before anything is attacked and in the words of the command."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from eval.run.runner import RUN_ERRORS
from fl.method import Method
from fl.models.building_blocks.model_checks import refuse_parted
from fl.runtime.module_copies import copy_model
from fl.simulation.capture_checks import floating_weight

TRIED_SIZES = (8, 16, 28, 32, 48, 64, 96, 128, 224, 256, 299)
"""Heights and widths that are tried on a model that takes no images of those given."""
Shape = tuple[int, int, int]
LAST = "inputs[0].permute(0, 2, 3, 1)"
"""Pictures with channels last, of those with channels first."""
SCALED = "inputs[0] * 255"
"""Pixels from 0 to 255, of those from 0 to 1."""
BYTES_ALONE = (
    "it runs on bytes (uint8) alone, by which nothing is differentiated: let its forward take floats from 0 to 255 as "
    f"well, and with pixels in [0, 1]: model.register_forward_pre_hook(lambda module, inputs: ({SCALED},))"
)
"""What to do where a model refuses floats."""


def check_images_fit(model: nn.Module, shape: Shape, what: str = "inputs", source: str = "") -> None:
    """Refuse images of a shape that the model does not take.

    Args:
        model: of the user's.
        shape: (C, H, W) of the images.
        what: they are called in errors.
        source: where they come from, if others may be given instead.

    Raises:
        ValueError: the model does not run on such images (says on which it does).
    """
    probe = copy_model(model).eval()
    try:
        _run(probe, shape)
    except RUN_ERRORS as error:
        refuse_parted(model, error)
        got = _size(shape) + (f" of {source}" if source else "")
        if other := _other_form(probe, shape):
            raise ValueError(f"expected {what} that fit the model, got {got}; {other}") from error
        taken = sorted(_accepted_shapes(probe))
        own = str(error) or f"{type(error).__name__} without a word"
        said = _describe_accepted(taken, shape, ready=bool(source)) if taken else f"it says: {own}"
        raise ValueError(f"expected {what} that fit the model, got {got}; {said}") from error


def _other_form(probe: nn.Module, shape: Shape) -> str:
    """Return how a model comes to take pictures that it takes with channels last, or as bytes; empty of another."""
    like = floating_weight(probe)
    picture = torch.full((1, *shape), 0.5)
    turned = picture.permute(0, 2, 3, 1)
    forms = {
        f"it runs on them with channels last: {hook_hint(LAST)}, and give them channels first, as here": turned.to(
            like
        ),
        BYTES_ALONE: picture.to(torch.uint8),
        f"{BYTES_ALONE}; and since it takes channels last: {hook_hint(LAST)}": turned.to(torch.uint8),
    }
    for hint, given in forms.items():
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                probe(given.to(like.device))
        except RUN_ERRORS:
            continue
        return hint
    return ""


def hook_hint(change: str) -> str:
    """Return the line that has a model change its inputs first."""
    return f"model.register_forward_pre_hook(lambda module, inputs: ({change},))"


def _describe_accepted(taken: Sequence[Shape], shape: Shape, *, ready: bool) -> str:
    """Return what the model takes, of that whatever is most like `shape`, and how to give it that."""
    channels, size, _ = min(taken, key=lambda one: (one[1] != shape[1], one[1] != 32, one))
    others = f" (and {len(taken) - 1} more sizes that were tried)" if len(taken) > 1 else ""
    fits = f"it runs on {_size((channels, size, size))}{others}"
    if not ready:
        return fits
    name = {1: "faces", 3: "photos"}.get(channels)
    known = f"--images '{{name: {name}, size: {size}}}', or " if name else ""
    return f"{fits}: give {known}an .npz file of such images (see --help)"


def _accepted_shapes(probe: nn.Module) -> set[Shape]:
    """Return shapes of square images that the model runs on, among likely ones."""
    layers = [layer for layer in probe.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    found = set()
    for channels in (layers[0].in_channels,) if layers and isinstance(layers[0], nn.Conv2d) else (1, 3):
        flat = {math.isqrt(layer.in_features // channels) for layer in layers[:1] if isinstance(layer, nn.Linear)}
        for side in {*TRIED_SIZES, *flat} - {0}:
            try:
                _run(probe, (channels, side, side))
            except RUN_ERRORS:
                continue
            found.add((channels, side, side))
    return found


def _run(probe: nn.Module, shape: Shape) -> object:
    """Return what the model returns for a gray image; the global random numbers stay as they were."""
    like = floating_weight(probe)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return probe(torch.full((1, *shape), 0.5).to(like))


def _size(shape: Shape) -> str:
    return "x".join(map(str, shape))


@contextmanager
def with_command_hints(model: nn.Module, method: Method | None) -> Iterator[None]:
    """Add to errors about training mode, and about what the server sent, what helps on the command line."""
    try:
        yield
    except ValueError as error:
        if remedy := _remedy(str(error), model, method):
            raise ValueError(f"{error}. On the command line: {remedy}") from error
        raise


def _remedy(words: str, model: nn.Module, method: Method | None) -> str:
    if "what the server sent as `shared`" in words:
        return "no option takes it; call fl.capture.from_update(..., shared=...) in a script"
    if "train mode" not in words or not (model.training if method is None else method.train_mode):
        return ""
    if method is not None:
        return f"--method '{{name: {method.name}, ..., train_mode: false}}'"
    return "--method '{name: fedavg, train_mode: false}', or let your function return model.eval()"
