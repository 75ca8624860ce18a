"""An update that a user captured: read from a file, brought into the model's names, and joined with its true images."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from eval.audit import fed_images, update_sanity
from eval.audit.input_shape import count_classes, with_command_hints
from eval.audit.user_model import Subject
from eval.metrics.update_prediction_error import MISMATCH, prediction_error
from fl.capture import CapturedUpdateSettings, ClientSettings, from_update
from fl.runtime import tensor_archives
from fl.simulation.capture_checks import untie_parameters
from fl.types import Batch, frozen
from fl.view import ServerView

UNKNOWN_ORDER_TOLERANCE = 0.5
"""The tolerance where the order of the images in local training is not known."""
WRAPPERS = {"module", "_orig_mod", "_module"}
"""What wrapping a model (`DistributedDataParallel`, `torch.compile`, Opacus) puts into its parameters' names."""
BEFORE_WORDS = {"before", "start", "initial", "old", "global", "received", "sent", "pre"}
AFTER_WORDS = {"after", "end", "final", "new", "local", "returned", "trained", "post"}
"""Words by which people call the weights before and after local training."""
NAMELESS_HINT = (
    "their names are those of model.state_dict(), in its order (Flower's get_parameters, say); save "
    "dict(zip(model.state_dict(), arrays)), of weights before - after"
)
PICKLE_HINT = (
    "pickle can run code, so only tensors are read: save a dictionary of tensors by torch.save, or arrays as .npz"
)


@dataclass(frozen=True)
class CapturedUpdate:
    """What a file holds.

    Attributes:
        update: weights before - after by parameter name.
        buffers: the same of buffers.
        notes: how it was read, where that is not plain.
        before: the weights and buffers before, where the file has them.
    """

    update: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    before: dict[str, Tensor] = field(default_factory=dict)


def load_update(path: Path) -> CapturedUpdate:
    """Read tensors by name from an `.npz` or a `.pt` file; nothing in it is executed.

    One dictionary of tensors inside another that has none of its own is taken for the update; two that are called
    before and after, for the weights whose difference it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected the update as .npz or .pt, tensors by parameter name")
    wanted = f"expected tensors by parameter name in {path}"
    found = _read(path, wanted)
    if isinstance(found, list | tuple):
        raise ValueError(f"{wanted}, got a list of {len(found)} without names: {NAMELESS_HINT}")
    if not isinstance(found, dict):
        raise ValueError(f"{wanted}, a dictionary, got {type(found).__name__}")
    if found and all(re.fullmatch(r"arr_\d+", str(name)) for name in found):
        raise ValueError(f"{wanted}, got {len(found)} arrays without names: {NAMELESS_HINT}")
    if not found:
        raise ValueError(f"{wanted}, got none")
    if _tensors(found):
        flat = {str(name): value for name, value in found.items()}
        return _from_prefixes(flat, path) or CapturedUpdate(flat)
    return _from_nested(found, path, wanted)


def _read(path: Path, wanted: str) -> object:
    """Return what the file holds, whatever that is."""
    try:
        if path.suffix == ".npz":
            return {name: torch.from_numpy(value) for name, value in tensor_archives.read_arrays(path).items()}
        return tensor_archives.read_tensors(path) if path.suffix == ".safetensors" else tensor_archives.read_state(path)
    except PermissionError as error:
        raise ValueError(f"{wanted}, got a file that must not be read") from error
    except tensor_archives.ObjectsError as error:
        raise ValueError(f"{wanted}, got other objects; {PICKLE_HINT}") from error
    except (tensor_archives.DamagedError, TypeError) as error:  # TypeError: numbers of a type that torch has not
        kind = path.suffix if path.suffix in {".npz", ".safetensors"} else ".pt"
        raise ValueError(f"{wanted}, got a file that can't be read as {kind}: {error}") from error


def _from_nested(found: dict[object, object], path: Path, wanted: str) -> CapturedUpdate:
    """Return the update from dictionaries inside a dictionary."""
    inner = {
        str(name): {str(key): tensor for key, tensor in value.items()}
        for name, value in found.items()
        if isinstance(value, dict) and value and _tensors(value)
    }
    loose = any(isinstance(value, Tensor) for value in found.values())
    if len(inner) == 1 and not loose:
        (name,) = inner
        return CapturedUpdate(inner[name], notes=(f"the update is what {path.name} holds under {name!r}",))
    if len(inner) == 2 and not loose:
        return _difference(inner, path)
    name, odd = next((str(name), value) for name, value in found.items() if not isinstance(value, Tensor))
    remedy = "save the update, weights before - after, by itself" if isinstance(odd, dict) else "leave it out"
    raise ValueError(f"{wanted}, got a {type(odd).__name__} under {name!r}: {remedy}")


def _from_prefixes(found: dict[str, Tensor], path: Path) -> CapturedUpdate | None:
    """Return the update from names that all begin with one of two words, such as `before/fc.weight`; None of others."""
    inner: dict[str, dict[str, Tensor]] = {}
    for name, value in found.items():
        word, _, rest = re.sub(r"[/.:]", "\0", name, count=1).partition("\0")
        inner.setdefault(word, {})[rest] = value
    if len(inner) != 2 or {_before_or_after(word) for word in inner} != {"before", "after"}:
        return None
    return _difference(inner, path)


def _difference(inner: dict[str, dict[str, Tensor]], path: Path) -> CapturedUpdate:
    """Return the update from two dictionaries of weights, told apart by what they are called.

    Raises:
        ValueError: nothing says which is which, or they don't belong together.
    """
    parts = {_before_or_after(name): name for name in inner}
    first, second = inner
    if set(parts) != {"before", "after"}:
        raise ValueError(
            f"expected one dictionary of tensors in {path}, or two called 'before' and 'after', got {first!r} and "
            f"{second!r}: save the update, weights before - after, by itself, or call them so"
        )
    before, after = inner[parts["before"]], inner[parts["after"]]
    if odd := next(iter(before.keys() ^ after.keys()), None):
        raise ValueError(f"expected the same names under {first!r} and {second!r} in {path}, got {odd!r} in one alone")
    for name, value in before.items():
        if value.shape != after[name].shape:
            shapes = f"{tuple(value.shape)} and {tuple(after[name].shape)}"
            raise ValueError(f"expected {name!r} in one shape under {first!r} and {second!r} in {path}, got {shapes}")
    note = f"the update is {parts['before']!r} - {parts['after']!r} of {path.name}"
    return CapturedUpdate({name: value - after[name] for name, value in before.items()}, notes=(note,), before=before)


def _before_or_after(name: str) -> str:
    """Return whether a dictionary is called the weights before or after training, in whatever words."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    for half, known in (("before", BEFORE_WORDS), ("after", AFTER_WORDS)):
        if words & known:
            return half
    return name


def _tensors(found: dict[object, object]) -> bool:
    return all(isinstance(value, Tensor) for value in found.values())


def with_model_names(captured: CapturedUpdate, model: nn.Module) -> CapturedUpdate:
    """Return the update in the model's own names, without what of a state is no part of an update.

    Names lose what wrapping a model adds, and what stands before all of them, where all fit then. Buffers stand by
    themselves; frozen parameters that have not moved are left out, and so are further names of one parameter.

    Raises:
        ValueError: two names of one parameter (tied weights) with different numbers.
    """
    own, said = _match_names(list(captured.update), model)
    update = {own[name]: value for name, value in captured.update.items()}
    before = {own[name]: value for name, value in captured.before.items()}
    notes = [*captured.notes, *said]
    whole = set(update)
    update = untie_parameters(model, update)
    if tied := sorted(whole - set(update)):
        notes.append(f"{', '.join(tied)}: further names of parameters that have another (tied weights)")
    kept = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    buffers = {name: value for name, value in update.items() if name in kept}
    still = {name for name in frozen(model) if name in update and not update[name].any()}
    if buffers:
        notes.append(
            f"{len(buffers)} buffer(s) of the file (running statistics, say) are no part of the update; attacks are "
            "told how they moved"
        )
    if still:
        notes.append(f"{len(still)} frozen parameter(s) of the file that have not moved are left out")
    update = {name: value for name, value in update.items() if name not in kept | still}
    return CapturedUpdate(update, buffers, tuple(notes), before)


def _match_names(names: Sequence[str], model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Return the model's own names by those of a file, and what was done to them; as they are where nothing fits."""
    known = set(model.state_dict())
    same = {name: name for name in names}
    if known.issuperset(names):
        return same, []
    bare = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names}
    if known.issuperset(bare.values()) and len({*bare.values()}) == len(names):
        added = sorted({part for name in names for part in name.split(".")} & WRAPPERS)
        return bare, [f"names lose {' and '.join(f'{part}.' for part in added)}, which wrapping a model adds"]
    parts = names[0].split(".") if names else []
    for cut in range(1, len(parts)):
        prefix = f"{'.'.join(parts[:cut])}."
        if all(name.startswith(prefix) and name.removeprefix(prefix) in known for name in names):
            return {n: n.removeprefix(prefix) for n in names}, [f"names lose {prefix}, which stands before all of them"]
    for prefix in dict.fromkeys(name[: -len(names[0])] for name in known if name.endswith(f".{names[0]}")):
        if all(prefix + name in known for name in names):
            return {name: prefix + name for name in names}, [f"names gain {prefix}, as the model has them"]
    return same, []


def of_update(
    model: nn.Module,
    captured: CapturedUpdate,
    client: ClientSettings,
    *,
    input_shape: tuple[int, int, int],
    batch_size: int,
    given: Batch | None,
    source: str = "",
) -> Subject:
    """Return the one captured update, with the images it was made of if they are known.

    Args:
        model: as it was before the update.
        captured: the update in the model's own names (`fitted`).
        client: how the client trained, as far as known.
        input_shape: (C, H, W) of the images.
        batch_size: how many images the update was made of.
        given: images and labels, of which the update was made of the first `batch_size`; None where nobody knows them.
        source: what says the images' shape, for errors about it; that is the option where nothing else does.

    Raises:
        ValueError: model, update and images do not fit each other; says which tensor.
    """
    count = count_classes(model, input_shape, "inputs" if source else "--input-shape of images", source)

    def view_of(size: int) -> ServerView:
        known = CapturedUpdateSettings(
            **{field.name: getattr(client, field.name) for field in fields(ClientSettings)},
            batch_size=size,
            shared=_parameters(captured, model),
            buffers=_known_buffers(captured, model),
        )
        with with_command_hints(model, client.method):
            return from_update(model, captured.update, input_shape=input_shape, num_classes=count, options=known)

    if given is not None:
        _check_truth(given, batch_size, input_shape, count)
    view = _with_buffers(view_of(batch_size), captured.buffers)
    doubts = (
        _train_mode_contradiction(view, captured.buffers),
        update_sanity.find_mistaken_weights(view),
        update_sanity.find_inconsistency(view),
    )
    subject = Subject(view, None, inconsistency="; ".join(filter(None, doubts)), captured=True)
    # without a method the step size is a guess
    return subject if given is None else _with_truth(subject, given, view_of, batch_size, scaled=client.method is None)


def _with_truth(
    subject: Subject, given: Batch, view_of: Callable[[int], ServerView], batch_size: int, *, scaled: bool
) -> Subject:
    """Return the update with its true images, and whether it is what the model makes of them.

    Args:
        subject: the update by itself.
        given: images and labels, of which the first are the true ones.
        view_of: the view of an update of so many images.
        batch_size: how many images the update was made of.
        scaled: whether the step size is unknown.
    """
    view = subject.view
    truth = fed_images.take_truth(given, batch_size)
    error = prediction_error(view, truth, scaled=scaled)
    known = replace(subject, truth=truth, error=error, tolerance=_tolerance(view, batch_size), n_given=len(given))
    if not known.mismatched:
        return replace(known, inconsistency="")
    fits = fed_images.describe_matching_images(view, given, view_of, tolerance=MISMATCH, scaled=scaled)
    return replace(known, inconsistency=fits or subject.inconsistency)


def _parameters(captured: CapturedUpdate, model: nn.Module) -> dict[str, Tensor] | None:
    """Return the weights before that the file has, for all that the client trained; None where it has none."""
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    return {name: captured.before[name] for name in names if name in captured.before} or None


def _known_buffers(captured: CapturedUpdate, model: nn.Module) -> dict[str, Tensor] | None:
    """Return the buffers before that the file has; None where it has none, or not all."""
    found = {name: captured.before[name] for name, _ in model.named_buffers() if name in captured.before}
    return found if found and found.keys() == {name for name, _ in model.named_buffers()} else None


def _train_mode_contradiction(view: ServerView, change: dict[str, Tensor]) -> str:
    """Return why running statistics contradict the mode that the client is said to have trained in, or nothing."""
    statistics = {name: value for name, value in change.items() if value.is_floating_point() and name in view.buffers}
    norms = {
        f"{name}.running_mean" for name, module in view.task.model.named_modules() if isinstance(module, _NormBase)
    } & set(statistics)
    if not norms:
        return ""
    moved = any(bool(statistics[name].any()) for name in norms)
    if moved and not view.method.train_mode:
        return (
            "the running statistics of batch norm in the file have moved, which they do in training mode alone, and "
            "the model is in evaluation mode: let your function return model.train(), or give --method '{name: fedavg, "
            "train_mode: true, ...}'"
        )
    if not moved and view.method.train_mode:
        return (
            "the running statistics of batch norm in the file have not moved, as in evaluation mode, and the model is "
            "in training mode: let your function return model.eval(), or give --method '{name: fedavg, train_mode: "
            "false, ...}'"
        )
    return ""


def _with_buffers(view: ServerView, change: dict[str, Tensor]) -> ServerView:
    """Return the view with the buffers after training, where the file says how all that the server sent changed."""
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
    """Return the error up to which images explain an update.

    Small steps on parts of the batch come close to each other in any order, but not within `MISMATCH`.
    """
    sizes = [size for steps in view.schedule or () for step in steps for size in step]
    return MISMATCH if all(size == batch_size for size in sizes) else UNKNOWN_ORDER_TOLERANCE
