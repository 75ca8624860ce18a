"""An update that a user captured: read from a file, brought into the model's names, and joined with its true images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from defenses import Defense
from eval import meant, plausible
from eval.audit import MISMATCH, prediction_error
from eval.fitting import classes, said_for_the_command
from eval.report.load import DAMAGED
from eval.subjects import Subject
from fl.capture import from_update
from fl.method import Method
from fl.types import Batch, ServerView, frozen

LOOSE = 0.5
"""The tolerance where the order of the images in local training is not known."""
WRAPPERS = {"module", "_orig_mod"}
"""What wrapping a model (`DistributedDataParallel`, `torch.compile`) puts into its parameters' names."""


@dataclass(frozen=True)
class Captured:
    """What a file holds.

    Attributes:
        update: weights before - after by parameter name.
        buffers: the same of buffers.
        notes: how it was read, where that is not plain.
    """

    update: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load(path: Path) -> Captured:
    """Tensors by name, from an `.npz` or a `.pt` file; nothing in it is executed.

    One dictionary of tensors inside another that has none of its own is taken for the update.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected the update as .npz or .pt, tensors by parameter name")
    wanted = f"expected tensors by parameter name in {path}"
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return Captured({name: torch.from_numpy(file[name]) for name in file.files})
        found = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise ValueError(f"{wanted}, got a file that must not be read") from error
    except (*DAMAGED, TypeError, AttributeError) as error:  # what they say is of their own workings, and of pickle
        kind = ".npz" if path.suffix == ".npz" else ".pt"
        raise ValueError(f"{wanted}, got a file that can't be read as {kind}, or other objects in it") from error
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":  # torch's word for objects that loading could run
            raise ValueError(f"{wanted}, got other objects") from error
        raise
    if not isinstance(found, dict):
        raise ValueError(f"{wanted}, a dictionary, got {type(found).__name__}")
    if _tensors(found):
        return Captured({str(name): value for name, value in found.items()})
    inner = [name for name, value in found.items() if isinstance(value, dict) and value and _tensors(value)]
    if len(inner) == 1 and not any(isinstance(value, Tensor) for value in found.values()):
        note = f"the update is what {path.name} holds under {str(inner[0])!r}"
        return Captured({str(name): value for name, value in found[inner[0]].items()}, notes=(note,))
    name, odd = next((name, value) for name, value in found.items() if not isinstance(value, Tensor))
    remedy = "save the dictionary in it by itself" if isinstance(odd, dict) else "leave it out"
    raise ValueError(f"{wanted}, got a {type(odd).__name__} under {str(name)!r}: {remedy}")


def _tensors(found: dict[object, object]) -> bool:
    return all(isinstance(value, Tensor) for value in found.values())


def fitted(captured: Captured, model: nn.Module) -> Captured:
    """The update in the model's own names, without what of a state is no part of an update.

    Names lose what wrapping a model adds where all of them fit then. Buffers stand by themselves, and frozen
    parameters that have not moved are left out.
    """
    update, notes = captured.update, list(captured.notes)
    known = set(model.state_dict())
    bare = {".".join(part for part in name.split(".") if part not in WRAPPERS): name for name in update}
    if not known.issuperset(update) and known.issuperset(bare) and len(bare) == len(update):
        added = sorted({part for name in update for part in name.split(".")} & WRAPPERS)
        update = {own: update[name] for own, name in bare.items()}
        notes.append(f"names lose {' and '.join(f'{part}.' for part in added)}, which wrapping a model adds")
    kept = {name for name, _ in model.named_buffers()} & known
    buffers = {name: value for name, value in update.items() if name in kept}
    still = {name for name in frozen(model) if name in update and not update[name].any()}
    if buffers:
        notes.append(f"{len(buffers)} buffer(s) of the file (running statistics, say) are no part of the update")
    if still:
        notes.append(f"{len(still)} frozen parameter(s) of the file that have not moved are left out")
    update = {name: value for name, value in update.items() if name not in kept | still}
    return Captured(update, buffers, tuple(notes))


def of_update(
    model: nn.Module,
    captured: Captured,
    *,
    input_shape: tuple[int, int, int],
    batch_size: int,
    given: Batch | None,
    source: str = "",
    method: Method | None,
    defense: Defense,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Subject:
    """The one captured update, with the images it was made of if they are known: the first `batch_size` of those given.

    Errors about the images' shape name `source`, if that is what says it, and else the option.

    Raises:
        ValueError: model, update and images do not fit each other; says which tensor.
    """
    count = classes(model, input_shape, "inputs" if source else "--input-shape of images", source)

    def view_of(size: int) -> ServerView:
        with said_for_the_command(model, method):
            return from_update(
                model,
                captured.update,
                input_shape=input_shape,
                num_classes=count,
                method=method,
                defense=defense,
                batch_size=size,
                mean=mean,
                std=std,
            )

    if given is not None:
        _check_truth(given, batch_size, input_shape, count)
    view = _with_buffers(view_of(batch_size), captured.buffers)
    if given is None:
        return Subject(view, None, doubt=plausible.doubt(view))
    truth = meant.first(given, batch_size)
    # without a method the step size is a guess
    error = prediction_error(view, truth, scaled=method is None)
    subject = Subject(view, truth, error, _tolerance(view, batch_size), len(given))
    if not subject.mismatched:
        return subject
    fits = meant.fits(view, given, view_of, tolerance=MISMATCH, scaled=method is None)
    return replace(subject, doubt=fits or plausible.doubt(view))


def _with_buffers(view: ServerView, change: dict[str, Tensor]) -> ServerView:
    """The view with the buffers after training, where the file says of all that the server sent how they changed."""
    if not view.buffers or not set(view.buffers) <= set(change):
        return view
    after = {}
    for name, before in view.buffers.items():
        if change[name].shape != before.shape:
            shapes = f"{tuple(before.shape)}, got {tuple(change[name].shape)}"
            raise ValueError(f"expected the buffer {name!r} of shape {shapes}")
        if not bool(change[name].isfinite().all()):
            raise ValueError(f"expected finite numbers in the buffer {name!r}; leave the buffers out")
        after[name] = before - change[name].to(before)
    return replace(view, buffers_after=after)


def _check_truth(given: Batch, batch_size: int, input_shape: tuple[int, int, int], count: int) -> None:
    if len(given) < batch_size:
        raise ValueError(f"expected {batch_size} true image(s), as many as --batch-size says, got {len(given)}")
    if given.inputs.shape[1:] != input_shape:
        raise ValueError(f"expected true images of --input-shape {input_shape}, got {tuple(given.inputs.shape[1:])}")
    low, high = int(given.labels.min()), int(given.labels.max())
    if low < 0 or high >= count:
        raise ValueError(f"expected labels in [0, {count}), got {low} to {high}")


def _tolerance(view: ServerView, batch_size: int) -> float:
    """Small steps on parts of the batch come close to each other in any order, but not within `MISMATCH`."""
    sizes = [size for steps in view.schedule or () for step in steps for size in step]
    return MISMATCH if all(size == batch_size for size in sizes) else LOOSE
